"""The ranks of a communicator meet before NCCL makes it.

NCCL makes a communicator in the first call that needs it, and waits there for its ranks in a function that nothing can
end, not even an abort. So the ranks first wait for each other in the store, where the death of a rank, a mismatch or a
timeout ends the wait. If a rank dies after that, NCCL sees its connection close and returns an error.
"""

from __future__ import annotations

from ringway.backends.base import GroupInfo
from ringway.backends.exchange import mark_of
from ringway.backends.nccl.handles import overdue
from ringway.call import Call, Op
from ringway.store import Deadline


class Meetings:
    """The meetings of one group that is not bound to a device: groups that are connect when they are made."""

    def __init__(self, info: GroupInfo) -> None:
        self._info = info
        self._met: set[tuple[int, ...] | None] = set()
        self._mark = ""

    def pair(self, op: Op, peer: int, coalesced: bool = False) -> tuple[int, ...] | None:
        """The two ranks whose communicator torch takes for a message; None if it takes that of the whole group, as for
        collectives and in a coalesced block."""
        return None if op.collective or coalesced else tuple(sorted((self._info.rank, peer)))

    def have_met(self, pair: tuple[int, ...] | None) -> bool:
        return self._info.size == 1 or pair in self._met

    def meet(self, pair: tuple[int, ...] | None, call: Call, limit: float) -> None:
        """Waits for the ranks, each of which comes here with a call. Raises what ended the group, or CommTimeout."""
        store = self._info.store
        self._mark = self._mark or mark_of(self._info)
        where = f"ringway/nccl/{self._mark}/{pair or 'all'}"
        store.set(f"{where}/{self._info.rank}", "")
        keys = [f"{where}/{rank}" for rank in pair or range(self._info.size)]

        def all_came() -> bool | None:
            if call.check is not None:
                call.check()
            return store.check(keys) or None

        if not Deadline(limit).poll(all_came):
            raise overdue(call, limit)
        self._met.add(pair)
