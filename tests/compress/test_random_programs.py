"""Random programs, checked in float64 (see random_programs.py). A failure prints the smallest program that fails."""

from __future__ import annotations

import os

import pytest
import random_programs

from ringway.testing import RankPool

SECONDS = 600.0 if os.environ.get("RINGWAY_SOAK") else 30.0


@pytest.mark.timeout(1800)
def test_random_programs_agree_with_float64(pool: RankPool) -> None:
    programs = random_programs.programs(("shm", "gloo"), (2, 3, 4), ("native", "reference"))
    assert random_programs.run_for(SECONDS, 22, programs, pool, "cpu") > 0
