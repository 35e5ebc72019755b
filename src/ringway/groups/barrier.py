"""The barrier that names missing ranks. It goes through the job's store, so it works on every backend."""

from __future__ import annotations

from ringway.backends.base import GroupInfo
from ringway.errors import CommTimeout, RingwayError
from ringway.store import Deadline, absent


def monitored_barrier(info: GroupInfo, number: int, timeout: float, wait_all_ranks: bool) -> None:
    """Waits until every rank of the group has arrived at its barrier `number`.

    At the deadline, every rank that arrived raises an error that names the first missing rank, or all of them with
    `wait_all_ranks`. A rank that arrives after another gave up raises too: otherwise it would continue alone.
    """
    gave_up = f"ringway/barrier/{number}/gave up"
    keys = [f"ringway/barrier/{number}/{rank}" for rank in range(info.size)]
    try:
        info.store.set(keys[info.rank], "here")
        if number > 2:
            # Every rank has arrived at the previous barrier, so the one before that is no longer read.
            info.store.delete_key(f"ringway/barrier/{number - 2}/{info.rank}")
        missing = absent(info.store, keys, Deadline(timeout))
        if missing:
            info.store.set(gave_up, str(info.ranks[info.rank]))
        elif info.store.check([gave_up]):
            first = info.store.get(gave_up).decode()
            raise CommTimeout(
                f"monitored_barrier of group {info.name}: all ranks arrived, but rank {first} had already given up",
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
