"""The ends of shm groups: on their own threads, on several threads at once, with calls in flight. Nothing is left."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ringway as dist
from ringway.testing import RankContext, RankPool

GROUPS = 600 if os.environ.get("RINGWAY_SOAK") else 40


def _held() -> tuple[int, int, int]:
    """The shared segments that this process maps, its descriptors, and its threads."""
    segments = Path("/proc/self/maps").read_text().count("/memfd:ringway (deleted)")
    return segments, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _released(before: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is held more than before, once the threads that end have ended."""
    deadline = time.monotonic() + 30
    while True:
        gc.collect()
        more = tuple(max(0, now - then) for now, then in zip(_held(), before, strict=True))
        if not any(more) or time.monotonic() > deadline:
            return more  # type: ignore[return-value]
        time.sleep(0.01)


def _warm(context: RankContext) -> None:
    """Makes what a rank keeps after its first group and its first calls."""
    context.start("shm")
    group = dist.new_group()
    _works(context, group)[0].wait()
    dist.barrier()
    dist.destroy_process_group(group)
    dist.barrier()


def _works(context: RankContext, group: Any) -> list[Any]:
    """A collective that all ranks make, and a message that no rank sends."""
    message = dist.irecv(torch.ones(3), (context.rank + 1) % context.world_size, group=group)
    # Last: a rank that ends the group when this completes finds all calls made on every rank.
    return [dist.all_reduce(torch.ones(1000), group=group, async_op=True), message]


def _ended_by_its_own_threads(context: RankContext) -> tuple[int, int, int]:
    _warm(context)
    before = _held()
    failures: list[str] = []
    for number in range(GROUPS):
        ended = [threading.Event(), threading.Event()]
        group: Any = dist.new_group()

        def destroy(event: threading.Event, group: Any = group) -> Callable[[Any], None]:
            def end(_: Any) -> None:
                try:
                    dist.destroy_process_group(group)
                except Exception as error:
                    failures.append(repr(error))
                event.set()

            return end

        works = _works(context, group)
        for work, event in zip(works, ended, strict=True):
            work.get_future().then(destroy(event))
        del group, works, work, destroy
        garbage = [bytearray(1 << size) for size in range(4, 14)]  # takes memory that was freed too early
        for event in ended:
            assert event.wait(30), f"the callbacks of group {number} did not run"
        del garbage
        dist.barrier()
    assert not failures
    return _released(before)


def test_a_callback_may_destroy_its_group(pool: RankPool) -> None:
    """The group's last reference goes on a thread of the group."""
    assert pool.run(_ended_by_its_own_threads, world_size=2, timeout=100) == [(0, 0, 0)] * 2


def _ended_with_calls_in_flight(context: RankContext) -> tuple[int, tuple[int, int, int]]:
    _warm(context)
    before, called = _held(), []
    for _ in range(GROUPS):
        group = dist.new_group()
        work = dist.irecv(torch.ones(3), (context.rank + 1) % context.world_size, group=group)
        assert work is not None
        work.on_complete(called.append)
        time.sleep(0.001)  # the group's thread is asleep by then, or not yet
        dist.destroy_process_group(group)
        del group, work
    dist.barrier()
    return sum(isinstance(error, Exception) for error in called), _released(before)


def test_pending_messages_end_with_their_group(pool: RankPool) -> None:
    reported = pool.run(_ended_with_calls_in_flight, world_size=2, timeout=100)
    assert reported == [(GROUPS, (0, 0, 0))] * 2


def _ended_by_several_threads(context: RankContext) -> tuple[int, int, int]:
    _warm(context)
    before = _held()
    for number in range(GROUPS):
        group = dist.new_group()
        works = _works(context, group)
        dist.barrier()  # a rank that is still making its calls would be told that this one has closed the group
        backend: Any = dist.communicator(group).backend
        together = threading.Barrier(3)

        def close(backend: Any = backend, together: threading.Barrier = together) -> None:
            together.wait(30)
            backend.close()

        threads = [threading.Thread(target=close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), f"closing group {number} hangs"
        dist.destroy_process_group(group)
        del group, works, backend, together, close, thread, threads
        dist.barrier()
    return _released(before)


def test_several_threads_may_close_a_group(pool: RankPool) -> None:
    assert pool.run(_ended_by_several_threads, world_size=2, timeout=100) == [(0, 0, 0)] * 2
