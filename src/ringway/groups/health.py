"""Whether a group still works, and what ended it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import ringway._core as _core
from ringway.compare.one_host import board_error
from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost, RingwayError, UsageError
from ringway.groups.devices import Devices
from ringway.groups.fast_path import FastPaths
from ringway.groups.listener import Listener
from ringway.work import Work

ENDS_THE_GROUP = (CollectiveMismatch, CommTimeout, PeerLost)
"""Errors after which the ranks of a group no longer agree about its calls."""


class CallTooEarly(UsageError):
    """A signal handler's call came before the interrupted call had started."""


class Health:
    """The health of one group. A fault is final: every later call raises it again."""

    def __init__(
        self,
        group: Any,
        name: str,
        record: _core.GroupRecord,
        devices: Devices,
        paths: FastPaths,
        listeners: Sequence[Listener],
    ) -> None:
        self._group = weakref.ref(group)
        self._name = name
        self._record = record
        self._devices = devices
        self._paths = paths
        self._listeners = listeners
        self._pending: weakref.WeakSet[Work] = weakref.WeakSet()
        self._pending_end_with: BaseException | None = None
        self.fault: BaseException | None = None
        """What ended the group."""
        self.closed = False

    def require(self) -> None:
        """Raise the group's fault, if it has one."""
        if self.fault is not None:
            raise self.fault.with_traceback(None)

    def check(self) -> None:
        """Raise if a wait can no longer succeed. Long waits call it every now and then."""
        error = self._pending_end_with or self._mismatch()
        if error is not None:
            raise error.with_traceback(None)

    def _mismatch(self) -> CollectiveMismatch | None:
        difference = self._record.difference
        return None if difference is None else board_error(self._name, difference)

    def poison(self, error: BaseException) -> None:
        """From now on every call of the group raises `error`, or an earlier fault."""
        self.fault = self.fault or error
        self._paths.close()

    def fail(self, error: BaseException) -> BaseException:
        """A call failed. Returns what to raise; if that ends the group, after the listeners have explained it."""
        if isinstance(error, _core.CallsDiffer):
            error = board_error(self._name, self._record.difference)
        if not isinstance(error, ENDS_THE_GROUP):
            if _sent_in_part(error) and not self._record.is_starting:  # if it is, `interrupted_by` decides
                self._end_in_part(error)
            ended = self._pending_end_with
            # A backend whose calls were ended from outside does not know why.
            return ended if isinstance(ended, ENDS_THE_GROUP) and type(error) is RingwayError else error
        known = self._pending_end_with or self._mismatch()
        if isinstance(known, ENDS_THE_GROUP):  # it says more than the backend's error
            error = known
        first = self.fault is None
        error = self._explained(error)
        if isinstance(error, CollectiveMismatch):
            self._devices.abandon()
            if isinstance(self.fault, PeerLost):  # another rank found the difference first, and aborted the group
                self.fault = error
        self.poison(error)
        if first:
            self._devices.failed(self.fault or error)
        # Another rank's report may have arrived by now. Later calls raise that one, so this call does too.
        return self.fault if first and self.fault is not None else error

    def fail_in_flight(self, error: BaseException) -> BaseException:
        """A call in flight failed. Returns what to raise: what ended the group, if it was not this call."""
        return self._pending_end_with or self.fail(error)

    def _explained(self, error: BaseException) -> BaseException:
        """What the listeners make of an error that ends the group. One of them tells the other ranks."""
        group = self._group()
        if group is not None:
            for listener in list(self._listeners):
                try:
                    error = listener.failed(group, error)
                except Exception:  # the group must fail all the same
                    logging.getLogger("ringway").exception("a listener could not be told of a failed group")
        return error

    def interrupted_by(self, error: BaseException) -> bool:
        """`error` leaves a call that may not have started: a signal handler raised it, or the backend. If nothing of
        the call was sent, its number goes to the next call, as if this one had not been made, and the result is True.
        If a part may have been sent, an interrupt or a refusal ends the group: the other ranks count on the call, and
        would take this rank's next one for it. So does any error between two parts of a call."""
        given_back = self._record.take_back()
        if given_back:
            return True
        interrupted = isinstance(error, CallTooEarly) or not isinstance(error, Exception)
        in_part = interrupted or _sent_in_part(error)
        if given_back is False or (self._record.is_starting and in_part):
            self._end_in_part(error)
        return False

    def _end_in_part(self, error: BaseException) -> None:
        """`error` left a call of which the other ranks have received a part."""
        if self.fault is not None:
            return
        what = f"interrupted by {type(error).__name__} in the middle of a call of the group {self._name}"
        fault = RingwayError(f"this rank was {what}, which has ended; make a new group")
        fault.__cause__ = error
        self._leave(f"was {what}, which has ended", fault, isinstance(error, Exception))

    def device_failed(self, error: BaseException) -> None:
        """This process can no longer use its device. The other ranks are told that this one is lost."""
        if self.fault is None:
            self._leave(f"has lost its device: {error}", error, True)

    def _leave(self, why: str, fault: BaseException, tell: bool) -> None:
        group = self._group()
        if group is not None and tell:  # an interrupt must not wait for the store
            me = group.ranks[group.rank]
            self._explained(PeerLost(f"rank {me} {why}", rank=me))
        self.end(fault)

    def pending(self, work: Work) -> None:
        """Ends this work too if the group ends."""
        self._pending.add(work)

    def end(self, error: BaseException) -> None:
        """Ends the group and all pending calls with `error`, even if their backend still waits."""
        self._devices.abandon()
        self.poison(error)
        self._pending_end_with = self._pending_end_with or error
        self._devices.failed(self.fault or error)
        for work in list(self._pending):
            work.fail(error)

    def end_if_calls_differ(self) -> None:
        """Ends pending calls if ranks were found to call different things: their backend would wait forever."""
        if self.closed or self.fault is not None:
            return
        error = self._mismatch()
        if error is not None:
            self.end(error)

    def close(self, wait: bool) -> None:
        """Ends the group's backends. Idempotent; pending calls end with an error."""
        destroyed = RingwayError(f"the group {self._name} was destroyed; make a new one with new_group")
        self.poison(destroyed)
        self.closed = True
        self._pending_end_with = self._pending_end_with or self.fault
        self._devices.close(wait)
        self._paths.forget()
        for work in list(self._pending):
            if not work.has_ended():
                work.fail(self.fault or destroyed)


def _sent_in_part(error: BaseException) -> bool:
    """Whether the error came between two parts of a call (`backends/compose.py`, `in_parts`)."""
    return getattr(error, "sent_in_part", False)
