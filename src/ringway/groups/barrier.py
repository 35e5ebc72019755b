"""The barrier that names the absent: it goes through the job's store, so every backend has it."""

from __future__ import annotations

import time

from ringway.backends.base import GroupInfo
from ringway.errors import CommTimeout, RingwayError

_POLL_FIRST = 0.0005
_POLL_MOST = 0.02


def monitored_barrier(info: GroupInfo, number: int, timeout: float, wait_all_ranks: bool) -> None:
    """Waits until every rank of the group has come to its barrier `number`.

    At the deadline every rank that came raises, naming the first rank that is missing, or all of them with
    `wait_all_ranks`. Whoever comes after another gave up raises too: it would go on alone.
    """
    gave_up = f"ringway/barrier/{number}/gave up"
    keys = [f"ringway/barrier/{number}/{rank}" for rank in range(info.size)]
    try:
        info.store.set(keys[info.rank], "here")
        if number > 2:
            # All have come to the barrier before this one, so nobody looks at the one before that any more.
            info.store.delete_key(f"ringway/barrier/{number - 2}/{info.rank}")
        missing = _absent(info, keys, timeout)
        if missing:
            info.store.set(gave_up, str(info.ranks[info.rank]))
        elif info.store.check([gave_up]):
            first = info.store.get(gave_up).decode()
            raise CommTimeout(
                f"monitored_barrier of group {info.name}: all have come, but rank {first} had given up waiting before",
                op="monitored_barrier",
                sequence=number,
            )
    except RingwayError:
        raise
    except Exception as error:
        raise RingwayError(
            f"monitored_barrier: the job's store does not answer ({str(error).splitlines()[0]}); "
            "its host, usually rank 0, is gone"
        ) from error
    if missing:
        named = missing if wait_all_ranks else missing[:1]
        ranks = ", ".join(str(info.ranks[place]) for place in named)
        who = f"Rank{'s' if len(named) > 1 else ''} {ranks}"
        me = info.ranks[info.rank]
        # torch's own words, so that whoever looks for them finds them. There only rank 0 knows who is missing.
        reached = (
            f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank {info.ranks[0]}: "
        )
        raise CommTimeout(
            ("" if info.rank == 0 else reached)
            + f"{who} failed to pass monitoredBarrier of group {info.name} within {timeout:g} s: "
            f"Rank {me} timed out in monitoredBarrier"
            + ("" if len(named) == len(missing) else " (wait_all_ranks=True names all that are missing)"),
            op="monitored_barrier",
            sequence=number,
            waited=timeout,
            missing=[info.ranks[place] for place in named],
        )


def _absent(info: GroupInfo, keys: list[str], timeout: float) -> list[int]:
    """Polls rather than blocks, because a wait inside the store is deaf to Ctrl-C."""
    deadline = time.monotonic() + timeout
    waiting = list(range(info.size))
    pause = _POLL_FIRST
    while True:
        waiting = [rank for rank in waiting if not info.store.check([keys[rank]])]
        if not waiting or time.monotonic() >= deadline:
            return waiting
        time.sleep(pause)
        pause = min(pause * 2, _POLL_MOST)
