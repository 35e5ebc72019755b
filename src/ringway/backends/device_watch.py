"""How the end of what runs on a device is learnt: by a thread that looks.

A look takes the interpreter's lock, and taking it from a program that issues collectives costs that program more
than issuing them. So a look is rare where only the recorder wants to know, and asks about few of the collectives:
what stands in one line of the device's ends in its order.
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
LOOK_LATER = 0.002
"""Once all who want to know soon have waited for `SOON`, and where nobody wants to."""
SOON = 0.005


class Ending(Protocol):
    """Something on the device that ends."""

    def done(self) -> bool:
        """Whether it has ended, well or not. What it raises is taken for its end."""

    def outcome(self) -> BaseException | None:
        """What went wrong with it, once it has ended."""


class Pending(NamedTuple):
    """An end that somebody wants to know."""

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
        """Calls `completion` with the outcome. What is added to one line ends in the order in which it was added."""
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
                    self._tell(line, pending, count, failure)

    def _pause(self) -> float:
        waited = [time.monotonic() - one.since for line in self._lines.values() for one in line if one.soon]
        return LOOK_SOON if min(waited, default=SOON) < SOON else LOOK_LATER

    def _tell(self, line: Hashable, pending: list[Pending], count: int, failure: BaseException | None) -> None:
        with self._changed:
            ended = pending[:count]
            del pending[:count]
            if not pending:
                del self._lines[line]
        for one in ended:
            try:
                one.completion(failure or one.ending.outcome())
            except Exception:
                traceback.print_exc()


def _ended(pending: list[Pending]) -> tuple[int, BaseException | None]:
    """How many have ended, all of them at the front; and why, where the device could not even be asked."""
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
    """While one thread captures a CUDA graph, asking about events in another would end the capture, unless that
    thread has said that it keeps to itself."""
    thread_local = ctypes.c_int(1)
    with suppress(OSError, AttributeError):  # a device of another make
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))
