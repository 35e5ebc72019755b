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
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import NamedTuple

from ringway.threads import start
from ringway.work import Completion

LOOK_SOON = 0.0002
LOOK_LATER = 0.002
"""Once somebody who wants to know soon has waited for `SOON`."""
SOON = 0.005
LOOK_PATIENTLY = 0.005


class Pending(NamedTuple):
    """Something on the device whose end somebody wants to know."""

    done: Callable[[], bool]
    outcome: Callable[[], BaseException | None]
    completion: Completion
    since: float
    soon: bool


class DeviceWatch:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[Hashable, list[Pending]] = {}
        self._thread: threading.Thread | None = None
        self._patient = False

    def add(
        self,
        line: Hashable,
        done: Callable[[], bool],
        outcome: Callable[[], BaseException | None],
        completion: Completion,
        soon: bool,
    ) -> None:
        """Calls `completion` with the `outcome` once it is `done`. What is added to one line ends in that order."""
        with self._changed:
            if not self._lines or (soon and self._patient):
                self._changed.notify()
            self._lines.setdefault(line, []).append(Pending(done, outcome, completion, time.monotonic(), soon))
            if self._thread is None:
                self._thread = start("ringway-device-watch", self._serve)

    def _serve(self) -> None:
        _leave_captures_alone()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                pause = self._pause()
                self._patient = pause == LOOK_PATIENTLY
                self._changed.wait(pause)
                self._patient = False
                lines = list(self._lines.items())
            for line, pending in lines:
                self._tell(line, pending, _finished(pending))

    def _pause(self) -> float:
        waited = [time.monotonic() - one.since for line in self._lines.values() for one in line if one.soon]
        if not waited:
            return LOOK_PATIENTLY
        return LOOK_SOON if min(waited) < SOON else LOOK_LATER

    def _tell(self, line: Hashable, pending: list[Pending], count: int) -> None:
        with self._changed:
            ended = pending[:count]
            del pending[:count]
            if not pending:
                del self._lines[line]
        for one in ended:
            try:
                one.completion(one.outcome())
            except Exception:
                traceback.print_exc()


def _finished(pending: list[Pending]) -> int:
    """How many have ended, all of them at the front."""
    ended, open_from = 0, len(pending)
    while ended < open_from:
        middle = (ended + open_from) // 2
        if pending[middle].done():
            ended = middle + 1
        else:
            open_from = middle
    return ended


def _leave_captures_alone() -> None:
    """While one thread captures a CUDA graph, asking about events in another would end the capture, unless that
    thread has said that it keeps to itself."""
    thread_local = ctypes.c_int(1)
    with suppress(OSError, AttributeError):  # a device of another make
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))


device_watch = DeviceWatch()
