"""Random programs on shm (shm_programs.py), and calls whose roots change. A failure prints the seed."""

from __future__ import annotations

import functools
import itertools
import os
import random

import pytest
import shm_programs
import torch
from shm_programs import run_programs, share_a_core
from torch import Tensor

from ringway.call import Reduce
from ringway.testing import RankContext, RankPool
from ringway.testing.reference import small_values

PROGRAMS = 10_000 if os.environ.get("RINGWAY_SOAK") else 20
ROOTED = (shm_programs.call_broadcast, shm_programs.call_reduce, shm_programs.call_gather, shm_programs.call_scatter)


@pytest.mark.timeout(60 + 10 * PROGRAMS)
@pytest.mark.parametrize(
    ("size", "uneven"), [(1, False), (2, False), (3, False), (4, False), (8, False), (3, True), (5, True)]
)
def test_random_programs(pool: RankPool, size: int, uneven: bool) -> None:
    first = random.randrange(1 << 30)
    count = PROGRAMS // 3 if size == 8 or uneven else PROGRAMS
    print(f"seeds {first} to {first + count - 1}")
    try:
        pool.run(run_programs, first, count, uneven, world_size=size, timeout=50 + 10 * PROGRAMS)
    finally:
        if uneven:
            pool.replace()


class Prepared(shm_programs.Step):
    """A step that is cheap to make."""

    def given(self, rank: int, block: int = 0) -> Tensor:
        return _kept_values(self.count, self.dtype, (rank + 3 * block + self.salt) % 8, self.reduce)


_kept_values = functools.cache(small_values)


def _changing_roots(context: RankContext) -> None:
    share_a_core(context)
    context.start("shm")
    rooted = list(itertools.product(ROOTED, range(context.world_size)))
    for one, two in itertools.product(rooted, repeat=2):
        pending = shm_programs.Pending()
        for call, root in (one, two, one):
            step = Prepared(
                group=None, size=context.world_size, rank=context.rank, dtype=torch.int64, count=250_000,
                reduce=Reduce.SUM, root=root, strided=False, asynchronous=True, salt=root,
            )  # fmt: skip
            pending.started.append((f"{call.__name__} of {root} among {one} and {two}", *call(step)))
        pending.settle(random.Random(0))


def test_a_root_waits_for_the_readers_of_the_previous_root(pool: RankPool) -> None:
    """Large calls reuse the same memory one after the other, and the root of a rooted call finishes it alone."""
    try:
        pool.run(_changing_roots, world_size=3, timeout=280)
    finally:
        pool.replace()
