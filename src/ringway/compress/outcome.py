"""Reports values that are not finite, on every rank alike."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ringway.compress.feedback import Slot
from ringway.compress.workspace import HostCopy
from ringway.errors import NotFinite
from ringway.groups.communicator import Communicator


class Status(Protocol):
    """How a call ended, possibly still on its way from the device. 0 means success."""

    def read(self) -> int: ...


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
            self._slot.unread = self
        else:
            self.read()

    def report_earlier(self) -> None:
        """Raise for the slot's previous call, if it did not wait."""
        if self._slot is not None:
            self._slot.read_outcome()

    def read(self) -> None:
        """Raise if a status is not 0. Waits for those that are on their way from the device."""
        status = max([self.status, *(one.read() for one in self._pending)])
        if status == 0:
            return
        culprit = status - 1
        key = None if self._slot is None else self._slot.key
        what = f"compressed_all_reduce of {self._numel} elements" + ("" if key is None else f" ({key!r})")
        group = f"group {self._communicator.name}"
        if culprit == self._communicator.size:
            raise NotFinite(f"{what}: the average over {group} is not finite", key=key)
        raise NotFinite(f"{what}: rank {culprit} of {group} had NaN or infinity in its values", rank=culprit, key=key)
