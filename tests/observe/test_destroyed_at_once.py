"""A rank that destroys its group as soon as its call has failed: the other ranks learn of the failure all the same,
long before their timeout."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

import ringway as dist
from ringway.backends.several import hierarchical
from ringway.backends.several.hierarchical import HierarchicalBackend
from ringway.compare import one_host
from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost
from ringway.groups.world import world
from ringway.observe.stall import explain, fault_board
from ringway.observe.stall.watch import StallWatch
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

GROUPS = 3
TIMEOUT = 60.0
SOON = 30.0


def _left(group: Any) -> str:
    """The key under which rank 0 says that it waits no longer in this group."""
    return f"left {dist.communicator(group).name}"


def _mismatch(group: Any, context: RankContext) -> None:
    """Rank 0 comes last, so it is the one that finds the difference."""
    if context.rank == 0:
        time.sleep(0.1)
    dist.all_reduce(torch.ones(8 if context.rank == 0 else 4), group=group)


def _late(group: Any, context: RankContext) -> None:
    """Rank 0 gives up waiting for rank 1, which comes to the call when rank 0 has left it, and maybe the group."""
    if context.rank == 1:
        context.store.wait([_left(group)], timedelta(seconds=TIMEOUT))
    else:
        world.communicator(group).set_timeout(0.1)
    dist.all_reduce(torch.ones(4), group=group)


def _between_parts(group: Any, context: RankContext) -> None:
    """gloo sends this call as two, one for each dtype. On rank 0 the second fails before it starts."""
    kind: Any = type(next(iter(world.communicator(group).devices.made())))
    before, starts = kind._start, itertools.count()

    def start(self: Any, *arguments: Any) -> Any:
        if context.rank == 0 and next(starts) == 1:
            raise LookupError("between two parts")
        return before(self, *arguments)

    kind._start = start
    try:
        dist.all_reduce_coalesced([torch.ones(3), torch.ones(3, dtype=torch.float64)], group=group)
    finally:
        kind._start = before


def _between_steps(group: Any, context: RankContext) -> None:
    """A call reduces inside the host, then between the hosts. On rank 0 the second step fails before it starts."""
    before = HierarchicalBackend._between

    def between(self: Any, *arguments: Any, **changes: Any) -> Any:
        if context.rank == 0:
            raise LookupError("between two steps")
        return before(self, *arguments, **changes)

    HierarchicalBackend._between = between  # type: ignore[method-assign]
    try:
        dist.all_reduce(torch.ones(64), group=group)
    finally:
        HierarchicalBackend._between = before  # type: ignore[method-assign]


FAILURES: dict[str, tuple[Callable[[Any, RankContext], None], type[Exception], type[Exception]]] = {
    "mismatch": (_mismatch, CollectiveMismatch, CollectiveMismatch),
    "timeout": (_late, CommTimeout, CommTimeout),
    "between parts": (_between_parts, LookupError, PeerLost),
    "between steps": (_between_steps, LookupError, PeerLost),
}
"""How a call fails, and the errors of rank 0 and of the others."""


@contextmanager
def _threads_held() -> Iterator[Callable[[], None]]:
    """The threads that inform the other ranks start late: when the function is called that this yields."""
    before, go = explain.start, threading.Event()

    def start(name: str, target: Callable[..., Any], *arguments: Any) -> threading.Thread:
        return before(name, lambda: (go.wait(TIMEOUT), target(*arguments)))

    explain.start = start
    try:
        yield go.set
    finally:
        explain.start = before


def _destroyed_at_once(context: RankContext, backend: str, hosts: bool, failure: str) -> list[float]:
    """For how long each group's call lasted on this rank."""
    if hosts:
        one_host.host_identity = hierarchical.host_identity = lambda: f"host {context.rank // 2}"
    context.start(backend, timeout=timedelta(seconds=TIMEOUT))
    fail, own, told = FAILURES[failure]
    lasted = []
    for _ in range(GROUPS):
        group = dist.new_group()
        dist.barrier(group=group)
        began = time.monotonic()
        with _threads_held() as go:
            with pytest.raises(own if context.rank == 0 else told):
                fail(group, context)
            if context.rank == 0:
                left = _left(group)
                dist.destroy_process_group(group)
                context.store.set(left, "yes")
            go()
        lasted.append(time.monotonic() - began)
        dist.barrier()
    return lasted


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("backend", "hosts", "failure"),
    [
        ("shm", False, "mismatch"),
        ("shm", False, "timeout"),
        ("gloo", False, "mismatch"),
        ("gloo", False, "timeout"),
        ("gloo", False, "between parts"),
        ("gloo", True, "mismatch"),
        ("hierarchical", True, "between steps"),
    ],
)
def test_a_group_destroyed_right_after_a_failure(pool: RankPool, backend: str, hosts: bool, failure: str) -> None:
    lasted = pool.run(_destroyed_at_once, backend, hosts, failure, world_size=4 if hosts else 3, timeout=110)
    if hosts:
        pool.replace()
    assert all(seconds < SOON for rank in lasted for seconds in rank), lasted


def _started_again(context: RankContext) -> list[float]:
    """A job that failed, and the next one in the same store. There, a rank is asked where it is."""
    leave()
    found = []
    for start in range(2):
        torch.distributed.init_process_group(
            "shm", store=context.store, rank=context.rank, world_size=2, timeout=timedelta(seconds=TIMEOUT)
        )
        group, watch = dist.communicator(), world.listener(StallWatch)
        one = torch.ones(1)
        dist.all_reduce(one)
        if start == 0:
            with pytest.raises(CommTimeout):
                _late(None, context)
            context.store.set(_left(None), "yes")
        elif context.rank == 0:
            assert watch.ask(group.name)[1].state == "here"
            time.sleep(0.5)  # it looks for the failures of its groups
        context.store.set(f"looked {start} {context.rank}", "")
        context.store.wait([f"looked {start} 0", f"looked {start} 1"])
        if start == 1:
            dist.all_reduce(one)
        found.append(one.item())
        dist.destroy_process_group()
    return found


@pytest.mark.timeout(120)
def test_the_failure_of_an_earlier_group_in_the_same_store_ends_no_later_one(pool: RankPool) -> None:
    assert pool.run(_started_again, world_size=2, timeout=100) == [[2.0, 4.0]] * 2


def _starts_again(context: RankContext) -> tuple[str, BaseException | None]:
    """The first world fails. Rank 1's watch looks for the reason just as the second world starts there."""
    context.start("shm")
    watch = world.listener(StallWatch)
    assert watch.job is not None
    fault_board.write(watch.job, world.communicator(None), PeerLost("the first world has failed", rank=0))
    dist.barrier()
    dist.destroy_process_group()
    begin = watch._start
    if context.rank == 1:
        watch._start = lambda job: (watch._give_up_what_failed(), begin(job))[1]  # type: ignore[method-assign]
    context.start("shm")
    watch._give_up_what_failed()
    dist.barrier()
    second = world.communicator(None)
    return second.name, second.fault


def test_a_world_does_not_end_for_what_ended_the_one_before(pool: RankPool) -> None:
    pool.replace()
    assert pool.run(_starts_again, world_size=2) == [("0", None)] * 2
    pool.replace()
