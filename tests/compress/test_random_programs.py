"""Random programs, checked in float64 (see random_programs.py). A failure prints the smallest program that fails."""

from __future__ import annotations

import os
import random

import pytest
import random_programs

from ringway.testing import RankPool

SOAK = bool(os.environ.get("RINGWAY_SOAK"))
SECONDS = 600.0 if SOAK else 30.0


@pytest.mark.timeout(1800)
def test_random_programs_agree_with_float64(pool: RankPool) -> None:
    programs = random_programs.programs(("shm", "gloo"), (2, 3, 4), ("native", "reference"))
    seed = random.randrange(1 << 30) if SOAK else 22
    ran = random_programs.run_for(SECONDS, seed, programs, pool, "cpu")
    print(f"{ran} programs from seed {seed}, 0 differences")
    assert ran > 0
