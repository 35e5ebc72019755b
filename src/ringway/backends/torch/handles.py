"""Collectives of torch's under way, as handles: how they are waited for, and how their end is learnt."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ringway.call import ANY_SOURCE, Call
from ringway.errors import CommTimeout, PeerLost, RingwayError
from ringway.threads import start, wait_in_slices
from ringway.work import Completion, Handle

SLICE = timedelta(milliseconds=250)
"""A wait inside torch is deaf to Ctrl-C, so a long one is made of slices."""

_TIMED_OUT = re.compile(r"tim(ed?|ing) ?out", re.IGNORECASE)
_CLOSED = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|peer .* (closed|gone)|ncclRemoteError",
    re.IGNORECASE,
)


def mapped(error: BaseException, call: Call, waited: float) -> RingwayError:
    """What torch threw, as one of ours."""
    if isinstance(error, RingwayError):
        return error
    text = str(error).split("\n")[0]
    if _CLOSED.search(text):
        return PeerLost(f"{call.describe()}: the connection to another rank is gone ({text})")
    if _TIMED_OUT.search(text):
        return CommTimeout(
            f"{call.describe()} timed out after {waited:.1f} s ({text})",
            op=call.op.name,
            sequence=call.sequence,
            waited=waited,
        )
    return RingwayError(f"{call.describe()} failed: {text}")


class _Announcements:
    """How many completions torch has still to announce.

    torch's threads announce them, and take the interpreter's lock to do so, once more after the callback has
    returned. An interpreter that ends meanwhile takes the process down, so its end waits for quiet.
    """

    _TAIL = 0.05

    def __init__(self) -> None:
        self._pending = 0
        self._last = 0.0
        self._lock = threading.Lock()

    def forget(self) -> None:
        """For a forked child, to which nobody announces anything."""
        self.__init__()  # type: ignore[misc]

    def expect(self) -> None:
        with self._lock:
            self._pending += 1

    def came(self) -> None:
        with self._lock:
            self._pending -= 1
            self._last = time.monotonic()

    def wait_for_quiet(self, timeout: float) -> bool:
        """Whether nothing is to be expected any more."""
        deadline = time.monotonic() + timeout
        while self._pending or time.monotonic() - self._last < self._TAIL:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


announcements = _Announcements()


class _Waiters:
    """Threads that wait for what torch cannot announce (gloo's point-to-point), reused when idle."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """For a forked child, which has none of these threads."""
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0
        self._threads = 0
        self._lock = threading.Lock()

    def start(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                self._threads += 1
                start("ringway-waiter", self._serve)
        self._jobs.put(job)

    def busy(self) -> bool:
        """Whether one of them is inside torch."""
        return self._threads > self._idle

    def _serve(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


waiters = _Waiters()


class Announced(Handle):
    """A collective of torch's, whose future tells the end."""

    def __init__(self, work: Any, call: Call) -> None:
        self._work = work
        self._call = call
        self._began = time.monotonic()

    def _error(self, error: BaseException) -> RingwayError:
        return mapped(error, self._call, time.monotonic() - self._began)

    def _finished(self) -> None:
        """The outcome of a work that has ended: its own, not that of the slice in which it did."""
        try:
            self._work.wait(SLICE)
        except Exception as error:
            raise self._error(error) from None

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                left = SLICE if deadline is None else timedelta(seconds=max(0.001, deadline - time.monotonic()))
                self._work.wait(min(SLICE, left))
                return
            except Exception:
                if self._work.is_completed():
                    self._finished()  # perhaps well, at the very end of the slice
                    return
                if self._call.check is not None:
                    self._call.check()
                if deadline is not None and time.monotonic() >= deadline:
                    raise self._call.not_done(timeout) from None

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def when_done(self, completion: Completion) -> None:
        def tell(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
            except Exception as error:
                completion(self._error(error))
            else:
                completion(None)
            finally:
                announcements.came()

        announcements.expect()
        self._work.get_future().add_done_callback(tell)


class Unannounced(Handle):
    """A message of gloo's: its end shows only to somebody who waits, and waiting cannot be cut in slices."""

    notifies = False

    def __init__(self, work: Any, call: Call) -> None:
        self._work = work
        self._call = call
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._started = False
        self._lock = threading.Lock()
        self._completions: list[Completion] = []
        self._failure: RingwayError | None = None

    def _wait_here(self) -> None:
        failure: RingwayError | None = None
        try:
            self._work.wait()
            if self._call.peer == ANY_SOURCE:
                self.source = self._work._source_rank()
        except Exception as error:
            failure = mapped(error, self._call, time.monotonic() - self._began)
        with self._lock:
            self._failure = failure
            self._ended.set()
            completions, self._completions = self._completions, []
        for completion in completions:
            completion(failure)

    def _watch(self) -> None:
        with self._lock:
            started, self._started = self._started, True
        if not started:
            waiters.start(self._wait_here)

    def wait(self, timeout: float | None = None) -> None:
        self._watch()
        if not wait_in_slices(self._ended, timeout):
            raise self._call.not_done(timeout)
        if self._failure is not None:
            raise self._failure

    def done(self) -> bool:
        self._watch()
        return self._ended.is_set()

    def when_done(self, completion: Completion) -> None:
        with self._lock:
            ended = self._ended.is_set()
            if not ended:
                self._completions.append(completion)
        if ended:
            completion(self._failure)
        else:
            self._watch()
