"""One clock for all ranks.

Ranks of one host share the monotonic clock. Ranks elsewhere estimate how far theirs is from rank 0's, by asking
it through the store a few times and trusting the quickest answer: it is off by less than half the time that took.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as c10d

import ringway._core as _core

_ROUNDS = 8


def clock_id() -> str:
    """The same for processes whose monotonic clocks are one: of one boot, and of one time namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"pid {os.getpid()}"


def offset_from_rank_0(store: c10d.Store, rank: int, size: int, corner: str, timeout: float = 60.0) -> int:
    """What to add to this rank's clock to have rank 0's, in nanoseconds. Every rank calls it."""
    room = c10d.PrefixStore(f"ringway/clock/{corner}", store)
    room.set(f"id/{rank}", clock_id())
    patience = timedelta(seconds=timeout)
    room.wait([f"id/{member}" for member in range(size)], patience)
    clocks = [room.get(f"id/{member}").decode() for member in range(size)]
    # One rank of each foreign clock asks; its neighbours take over what it found.
    askers = [member for member in range(size) if clocks[member] not in clocks[:member] and member != 0]
    if rank == 0:
        for asker in askers:
            _answer(room, asker, patience)
    elif rank in askers:
        room.set(f"offset/{rank}", str(_ask(room, rank, patience)))
    spokesman = clocks.index(clocks[rank])
    if spokesman == 0:
        return 0
    room.wait([f"offset/{spokesman}"], patience)
    return int(room.get(f"offset/{spokesman}"))


def _answer(room: c10d.Store, asker: int, patience: timedelta) -> None:
    for number in range(_ROUNDS):
        room.wait([f"ask/{asker}/{number}"], patience)
        room.set(f"tell/{asker}/{number}", str(_core.monotonic_ns()))


def _ask(room: c10d.Store, rank: int, patience: timedelta) -> int:
    best: tuple[int, int] | None = None
    for number in range(_ROUNDS):
        before = _core.monotonic_ns()
        room.set(f"ask/{rank}/{number}", "?")
        room.wait([f"tell/{rank}/{number}"], patience)
        theirs = int(room.get(f"tell/{rank}/{number}"))
        after = _core.monotonic_ns()
        took = after - before
        if best is None or took < best[0]:
            best = (took, theirs - (before + after) // 2)
    assert best is not None
    return best[1]
