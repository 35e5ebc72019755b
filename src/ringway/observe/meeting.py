"""Decides whether all ranks do something together, such as writing one trace, before any of them uses the job's group.

A rank whose program raised an error does not take part. If the others called a collective all the same, it would meet
some other call of that rank and end the group. So the ranks meet in the store first: each says whether it takes part,
and one key holds the decision, which is the same for all.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import torch.distributed as c10d

from ringway.groups.communicator import Communicator
from ringway.groups.world import world
from ringway.store import Deadline, read

_PATIENCE = 60.0
_TOGETHER, _ALONE = "together", "alone"


class _Meetings(Counter[str]):
    """The number of this rank's last meeting with the others of a group, by purpose."""


def meet(purpose: str) -> str | None:
    """Wait for all ranks of the world. Returns a name for what they do now, the same on every rank, if all take part;
    None if a rank declined or did not come in time."""
    meeting = _Meeting(world.communicator(None), purpose)
    return meeting.name if meeting.attend() else None


def decline(purpose: str) -> None:
    """Tell the other ranks that this one does not take part. Waits for nobody."""
    with suppress(Exception):  # it leaves with an error of its own, which must not be replaced
        _Meeting(world.communicator(None), purpose).decide(_ALONE)


class _Meeting:
    """This rank's next meeting."""

    def __init__(self, communicator: Communicator, purpose: str) -> None:
        communicator.health.require()
        self._info = communicator.info
        self._store = c10d.PrefixStore(f"ringway/meet/{purpose}", communicator.info.store)
        numbers = communicator.parts.part(_Meetings)
        self._number = numbers[purpose] + 1
        # A meeting that was decided without this rank, with others at the next: this rank has missed one.
        while self._decision() is not None and any(self._store.check([key]) for key in self._keys(self._number + 1)):
            self._number += 1
        numbers[purpose] = self._number
        self.name = f"{purpose}/{self._number}"

    def attend(self) -> bool:
        keys = self._keys(self._number)
        self._store.set(keys[self._info.rank], "here")
        deadline = Deadline(min(_PATIENCE, self._info.timeout / 2))  # the others must not time out first
        try:
            deadline.poll(lambda: self._decision() or self._store.check(keys) or None)
        finally:
            together = self.decide(_TOGETHER if self._store.check(keys) else _ALONE)
        return together

    def decide(self, decision: str) -> bool:
        """Decide, unless another rank has. Returns whether all ranks take part."""
        return bool(self._store.compare_set(f"{self._number}/decision", "", decision) == _TOGETHER.encode())

    def _decision(self) -> bytes | None:
        return read(self._store, f"{self._number}/decision")

    def _keys(self, number: int) -> list[str]:
        return [f"{number}/{rank}" for rank in range(self._info.size)]
