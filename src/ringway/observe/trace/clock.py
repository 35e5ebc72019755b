"""One clock for all ranks.

Ranks on one host share the monotonic clock. Ranks elsewhere estimate their offset from rank 0's clock: they ask for it
a few times through the store and trust the fastest answer, whose error is less than half its round trip.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as c10d

import ringway._core as _core
from ringway.groups.world import world

_ROUNDS = 8


def clock_id() -> str:
    """The same for processes that share a monotonic clock: the same boot and time namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"pid {os.getpid()}"


def offset_from_rank_0(store: c10d.Store, rank: int, size: int, key: str, timeout: float = 60.0) -> int:
    """The nanoseconds to add to this rank's clock to get rank 0's. Collective: every rank calls this, with the same
    key, which no other comparison uses."""
    shared = c10d.PrefixStore(f"ringway/clock/{key}", store)
    shared.set(f"id/{rank}", clock_id())
    limit = timedelta(seconds=timeout)
    shared.wait([f"id/{member}" for member in range(size)], limit)
    clocks = [shared.get(f"id/{member}").decode() for member in range(size)]
    # One rank per foreign clock asks; the others on that clock use its result.
    askers = [member for member in range(size) if clocks[member] not in clocks[:member] and member != 0]
    if rank == 0:
        for asker in askers:
            answer(shared, asker, limit, _core.monotonic_ns)
    elif rank in askers:
        shared.set(f"offset/{rank}", str(ask(shared, rank, limit, _core.monotonic_ns)))
    measured_by = clocks.index(clocks[rank])
    if measured_by == 0:
        return 0
    shared.wait([f"offset/{measured_by}"], limit)
    return int(shared.get(f"offset/{measured_by}"))


def offset_in_world(key: str) -> int:
    """The same for this rank of the world."""
    info = world.communicator(None).info
    return offset_from_rank_0(info.store, info.rank, info.size, key)


def answer(shared: c10d.Store, asker: int, timeout: timedelta, now: Callable[[], int]) -> None:
    """Tell another rank, which calls `ask`, what this rank's clock says."""
    for number in range(_ROUNDS):
        shared.wait([f"ask/{asker}/{number}"], timeout)
        shared.set(f"answer/{asker}/{number}", str(now()))


def ask(shared: c10d.Store, rank: int, timeout: timedelta, now: Callable[[], int]) -> int:
    """The nanoseconds to add to this rank's clock to get that of the rank that calls `answer`."""
    best: tuple[int, int] | None = None
    for number in range(_ROUNDS):
        before = now()
        shared.set(f"ask/{rank}/{number}", "?")
        shared.wait([f"answer/{rank}/{number}"], timeout)
        theirs = int(shared.get(f"answer/{rank}/{number}"))
        after = now()
        took = after - before
        if best is None or took < best[0]:
            best = (took, theirs - (before + after) // 2)
    assert best is not None
    return best[1]
