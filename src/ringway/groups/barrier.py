"""The barrier that names the absent: it goes through the job's store, so every backend has it."""

from __future__ import annotations

from ringway.backends.base import GroupInfo
from ringway.errors import CommTimeout, RingwayError
from ringway.store import Deadline, absent


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
        missing = absent(info.store, keys, Deadline(timeout))
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
