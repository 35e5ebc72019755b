"""A thread that polls the device, to learn when work on it has ended.

Polling takes the interpreter's lock, and that costs a program that issues collectives more than issuing them. So polls
are rare if only the recorder wants to know, and ask about few of the collectives: work in one line ends in order.
"""

from __future__ import annotations

import ctypes
import threading
import time
import traceback
from collections.abc import Hashable
from contextlib import suppress
from typing import NamedTuple, Protocol

from ringway.threads import start
from ringway.work import Completion

LOOK_SOON = 0.0002
LOOK_LATER = 0.02
"""The pause once every caller who wants to know soon has waited for `SOON`, or if there is none."""
SOON = 0.005


class Ending(Protocol):
    """Work on the device that ends at some point."""

    def done(self) -> bool:
        """Whether it has ended, well or not. An exception counts as its end."""

    def outcome(self) -> BaseException | None:
        """The error, once it has ended."""


class Pending(NamedTuple):
    """Work whose end has to be reported."""

    ending: Ending
    completion: Completion
    since: float
    soon: bool


class DeviceWatch:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[Hashable, list[Pending]] = {}
        self._thread: threading.Thread | None = None
        self._patient = False

    def add(self, line: Hashable, ending: Ending, completion: Completion, soon: bool) -> None:
        """Calls `completion` with the outcome. Work added to one line must end in the order it was added."""
        with self._changed:
            if not self._lines or (soon and self._patient):
                self._changed.notify()
            self._lines.setdefault(line, []).append(Pending(ending, completion, time.monotonic(), soon))
            if self._thread is None:
                self._thread = start("ringway-device-watch", self._serve)

    def _serve(self) -> None:
        _leave_captures_alone()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                pause = self._pause()
                self._patient = pause > LOOK_SOON
                self._changed.wait(pause)
                self._patient = False
                lines = list(self._lines.items())
            for line, pending in lines:
                count, failure = _ended(pending)
                if count:
                    self._report(line, pending, count, failure)

    def _pause(self) -> float:
        waited = [time.monotonic() - one.since for line in self._lines.values() for one in line if one.soon]
        return LOOK_SOON if min(waited, default=SOON) < SOON else LOOK_LATER

    def _report(self, line: Hashable, pending: list[Pending], count: int, failure: BaseException | None) -> None:
        with self._changed:
            ended = pending[:count]
            del pending[:count]
            if not pending:
                del self._lines[line]
        failed = []
        last = failure or ended[-1].ending.outcome()
        for one in ended:
            if one is ended[-1] or failure is not None:
                error = last
            elif last is not None and not one.ending.done():
                error = last  # a later one is overdue, and has ended before it
            else:
                error = one.ending.outcome()
            if error is None:
                _complete(one, None)
            else:
                failed.append((one, error))
        if failed:
            # To explain an error takes seconds: other groups must not wait for it.
            start("ringway-failed-calls", _complete_all, failed)


def _complete(one: Pending, error: BaseException | None) -> None:
    try:
        one.completion(error)
    except Exception:
        traceback.print_exc()


def _complete_all(failed: list[tuple[Pending, BaseException]]) -> None:
    for one, error in failed:
        _complete(one, error)


def _ended(pending: list[Pending]) -> tuple[int, BaseException | None]:
    """How many have ended, counted from the front, and the error if the device could not be asked."""
    ended, open_from = 0, len(pending)
    failure: BaseException | None = None
    while ended < open_from:
        middle = (ended + open_from) // 2
        try:
            done = pending[middle].ending.done()
        except Exception as error:
            done, failure = True, error
        if done:
            ended = middle + 1
        else:
            open_from = middle
    return ended, failure


def _leave_captures_alone() -> None:
    """Querying events in one thread invalidates a CUDA graph that another thread captures, unless the querying thread
    is in thread-local capture mode."""
    thread_local = ctypes.c_int(1)
    with suppress(OSError, AttributeError):  # not an NVIDIA device
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))
