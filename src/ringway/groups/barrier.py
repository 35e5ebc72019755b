"""The barrier that names missing ranks. It goes through the job's store, so it works on every backend."""

from __future__ import annotations

from contextlib import suppress

from ringway.backends.base import GroupInfo
from ringway.errors import CommTimeout, RingwayError
from ringway.store import PASSING, Deadline, absent, read


def next_barrier(info: GroupInfo, last: int) -> int:
    """The number of this rank's next barrier. If others gave up waiting for it at one barrier and some of them are at
    the next, it has missed one, perhaps because of an error, and goes on with theirs."""
    number = last + 1
    with suppress(Exception):  # the barrier itself reports a store that does not answer
        while info.store.check([_gave_up(number)]) and any(info.store.check([key]) for key in _keys(info, number + 1)):
            number += 1
    return number


def monitored_barrier(info: GroupInfo, number: int, timeout: float, wait_all_ranks: bool) -> None:
    """Waits until every rank of the group has arrived at its barrier `number`.

    At the deadline, every rank that arrived raises an error that names the first missing rank, or all of them with
    `wait_all_ranks`. A rank that arrives after another gave up raises too: otherwise it would continue alone.
    """
    gave_up, keys = _gave_up(number), _keys(info, number)
    try:
        info.store.set(keys[info.rank], "here")
        if number > 2:
            # Every rank has arrived at the previous barrier, so the one before that is no longer read.
            info.store.delete_key(_keys(info, number - 2)[info.rank])
        missing = absent(info.store, keys, Deadline(timeout))
        if missing:
            info.store.set(gave_up, str(info.ranks[info.rank]))
        elif (first := read(info.store, gave_up)) is not None:
            raise CommTimeout(
                f"monitored_barrier of group {info.name}: all ranks arrived, but rank {first.decode()} had already "
                "given up",
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
        # torch's wording, because programs search for it. In torch, only rank 0 knows which ranks are missing.
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


def _keys(info: GroupInfo, number: int) -> list[str]:
    return [f"{PASSING}barrier/{number}/{rank}" for rank in range(info.size)]


def _gave_up(number: int) -> str:
    return f"ringway/barrier/{number}/gave up"
