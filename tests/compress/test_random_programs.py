"""Random programs, checked in float64 (see random_programs.py). A failure prints the smallest program that fails."""

from __future__ import annotations

import os
import time

import pytest
import random_programs
from hypothesis import given, settings

from ringway.testing import RankPool

SOAK = bool(os.environ.get("RINGWAY_SOAK"))
SECONDS = 600.0 if SOAK else 30.0
KERNELS = ("native", "reference")


class Budget:
    """Programs run until the time is up. While a failure is being reduced, there is no limit."""

    def __init__(self) -> None:
        self.end = time.monotonic() + SECONDS
        self.failed = False
        self.ran = 0

    @property
    def spent(self) -> bool:
        return self.ran > 0 and not self.failed and time.monotonic() > self.end


@pytest.mark.timeout(1200)
def test_random_programs_agree_with_float64(pool: RankPool) -> None:
    budget = Budget()

    @settings(max_examples=100_000 if SOAK else 400, derandomize=not SOAK, print_blob=True, database=None)
    @given(program=random_programs.programs(("shm", "gloo"), (2, 3, 4), KERNELS))
    def check(program: random_programs.Program) -> None:
        if budget.spent:
            return
        budget.ran += 1
        try:
            pool.run(random_programs.run, "cpu", program, world_size=program.ranks, grace=5.0)
        except BaseException:
            budget.failed = True
            raise

    check()
    print(f"{budget.ran} programs")
