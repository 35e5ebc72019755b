"""Reports values that are not finite, on every rank alike."""

from __future__ import annotations

from torch import Tensor

from ringway.compress.feedback import Slot, Status
from ringway.compress.workspace import HostCopy
from ringway.errors import NotFinite
from ringway.groups.communicator import Communicator


class PlainStatus:
    """The status of a call that was sent uncompressed, to be read later."""

    def __init__(self, status: Tensor) -> None:
        self._status = HostCopy(status)

    def read(self) -> int:
        return int(self._status.read())


class Outcome:
    """Whether the values of one call were finite on every rank.

    A status is 0, or 1 + the group rank that had such a value, or 1 + the group's size if only the average is not
    finite. It is the same on every rank, so all of them raise, or none. With `waits` false, the call must not wait for
    the device: the slot's next call reports.
    """

    def __init__(self, slot: Slot | None, communicator: Communicator, numel: int, waits: bool) -> None:
        self._slot = slot
        self._communicator = communicator
        self._numel = numel
        self._waits = waits
        self._pending: list[Status] = []
        self.status = 0

    def add(self, status: Status) -> None:
        self._pending.append(status)

    def report(self) -> None:
        """Raise if a status is not 0, now or at the slot's next call."""
        if self._slot is not None and self._pending and not self._waits:
            self._slot.unread = self._pending
        else:
            self._raise_for(self.status, self._pending)

    def report_earlier(self) -> None:
        """Raise for the slot's previous call, if it did not wait."""
        if self._slot is not None:
            earlier, self._slot.unread = self._slot.unread, []
            self._raise_for(0, earlier)

    def _raise_for(self, status: int, pending: list[Status]) -> None:
        status = max([status, *(one.read() for one in pending)])
        if status == 0:
            return
        culprit = status - 1
        key = None if self._slot is None else self._slot.key
        what = f"compressed_all_reduce of {self._numel} elements" + ("" if key is None else f" ({key!r})")
        group = f"group {self._communicator.name}"
        if culprit == self._communicator.size:
            raise NotFinite(f"{what}: the average over {group} is not finite", key=key)
        raise NotFinite(f"{what}: rank {culprit} of {group} had NaN or infinity in its values", rank=culprit, key=key)
