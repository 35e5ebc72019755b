"""Groups whose members are replaced, through the functions that torch has from 2.15 on."""

from __future__ import annotations

from typing import Any

import pytest
import rank_reconfigure
import torch.distributed as c10d

import ringway as dist
from ringway.errors import UsageError
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

BACKENDS = ("shm", "gloo", "hierarchical")


@pytest.mark.parametrize("backend", BACKENDS)
def test_members_are_replaced(pool: RankPool, backend: str) -> None:
    assert pool.run(rank_reconfigure.changes, backend, world_size=3) == list(rank_reconfigure.CHANGES)
    pool.replace()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dead_process_is_named_and_left_out(pool: RankPool, backend: str) -> None:
    first, second, third = pool.try_run(rank_reconfigure.survivors, backend, world_size=3, timeout=60)
    assert first.value == ("1", (0, 2, 3.0)), first
    assert third.value == ("1", (1, 2, 3.0)), third
    assert not second.ok
    pool.replace()


def _ordinary(context: RankContext) -> None:
    context.start("shm")
    assert not dist._supports_reconfigure()
    with pytest.raises(UsageError, match="cannot be reconfigured"):
        dist._get_reconfigure_handle()
    leave(dist)
    with pytest.raises(UsageError, match="needs a backend and a store"):
        dist.init_process_group("shm", enable_reconfigure=True)
    options: dict[str, Any] = {"store": c10d.HashStore(), "rank": 0, "world_size": 1, "enable_reconfigure": True}
    with pytest.raises(UsageError, match="MPI fixes its processes"):
        dist.init_process_group("mpi", **options)


def test_an_ordinary_group_says_that_it_cannot(pool: RankPool) -> None:
    pool.run(_ordinary, world_size=1)
    pool.replace()
