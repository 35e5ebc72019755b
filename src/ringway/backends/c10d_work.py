"""Collectives of torch's under way, as handles: how they are waited for, and how their end is learnt."""

from __future__ import annotations

import ctypes
import logging
import queue
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from ringway.backends.device_watch import device_watch
from ringway.call import ANY_SOURCE, Call
from ringway.errors import CommTimeout, PeerLost, RingwayError
from ringway.threads import start
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


def keep_for_ever(what: object) -> None:
    """For what gloo's threads are still at: they would need the interpreter, perhaps after its end, to let go of it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


class _Waiters:
    """Threads that wait for what torch cannot announce (gloo's point-to-point), reused when idle."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0
        self._lock = threading.Lock()

    def start(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                start("ringway-waiter", self._serve)
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


_waiters = _Waiters()


class TorchsWork(Handle):
    """A work of torch's."""

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
                self._look()
                if deadline is not None and time.monotonic() >= deadline:
                    raise self._call.not_done(timeout) from None

    def _look(self) -> None:
        """Raises where waiting has become vain."""
        if self._call.check is not None:
            try:
                self._call.check()
            except BaseException:
                keep_for_ever(self)
                raise

    def done(self) -> bool:
        return bool(self._work.is_completed())


class InLine(TorchsWork):
    """A collective whose end its group's line tells."""

    leisurely = True

    def __init__(self, work: Any, call: Call, line: Line) -> None:
        super().__init__(work, call)
        self._line = line

    def when_done(self, completion: Completion) -> None:
        self.when_finished(completion)

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        if any(tensor.is_cuda for tensor in self._call.outputs):
            device_watch.add(self, self, completion, soon)  # a wait would order a stream of the waiting thread's
        else:
            self._line.add(_Waiting(self, completion, soon))

    def outcome(self) -> BaseException | None:
        try:
            self._work.get_future().value()
        except Exception as error:
            return self._error(error)
        return None

    def wait_a_slice(self) -> None:
        with suppress(Exception):
            self._work.wait(SLICE)


class _Waiting(NamedTuple):
    """An end that somebody wants to know."""

    handle: InLine
    completion: Completion
    soon: bool

    def tell(self) -> None:
        try:
            self.completion(self.handle.outcome())
        except Exception:
            logging.getLogger("ringway").exception("a completion callback raised")


class Line:
    """Tells the ends of one group's collectives, from threads of ours.

    torch would announce them on threads of its own. Those take the interpreter's lock to do so, and an interpreter that
    ends meanwhile takes the process down. One thread looks: it waits for what somebody wants to know soon, and looks to
    the rest now and then, because mostly whoever issued a call waits for it himself, and two that wait get in each
    other's way. While it tells, another looks: whoever is told may wait for the next end.
    """

    _LOOK_SECONDS = 0.002
    _IDLE_LOOKS = 50
    """After so many with nothing to look at, it sleeps until it is woken."""
    _SPARE_SECONDS = 10.0

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._vacant = threading.Condition(self._lock)
        self._waiting: list[_Waiting] = []
        self._looked = False
        self._awake = True
        self._spare = 0
        self._closed = False

    def add(self, waiting: _Waiting) -> None:
        with self._lock:
            self._waiting.append(waiting)
            if not self._looked:
                self._let_another_look()
            elif waiting.soon or not self._awake:
                self._changed.notify()

    def unfinished(self) -> list[InLine]:
        """The collectives that have not ended."""
        with self._lock:
            return [waiting.handle for waiting in self._waiting if not waiting.handle.done()]

    def close(self) -> None:
        """Tells what has ended; nobody waits for the rest any more."""
        with self._lock:
            ended = self._take_ended()
            self._waiting.clear()
            self._closed = True
            self._changed.notify_all()
            self._vacant.notify_all()
        for waiting in ended:
            waiting.tell()

    def _let_another_look(self) -> None:
        if self._spare:
            self._vacant.notify()
        else:
            start(f"ringway-{self._group}", self._serve)

    def _serve(self) -> None:
        while self._take_turn():
            ended = self._look()
            with self._lock:
                self._looked = False
                if self._waiting:
                    self._let_another_look()
            for waiting in ended:
                waiting.tell()

    def _take_turn(self) -> bool:
        """Whether this thread is to look. One that nobody has needed for a while goes."""
        with self._lock:
            self._spare += 1
            vacant = self._vacant.wait_for(lambda: self._closed or not self._looked, self._SPARE_SECONDS)
            self._spare -= 1
            self._looked = self._looked or vacant
            return vacant and not self._closed

    def _look(self) -> list[_Waiting]:
        """What has ended, as soon as something has."""
        idle = 0
        while True:
            with self._lock:
                ended = self._take_ended()
                if ended or self._closed:
                    return ended
                idle = 0 if self._waiting else idle + 1
                self._awake = idle < self._IDLE_LOOKS
                wanted = next((waiting.handle for waiting in self._waiting if waiting.soon), None)
                if wanted is None:
                    self._changed.wait(self._LOOK_SECONDS if self._awake else None)
            if wanted is not None:
                wanted.wait_a_slice()

    def _take_ended(self) -> list[_Waiting]:
        ended: list[_Waiting] = []
        unfinished: list[_Waiting] = []
        for waiting in self._waiting:
            (ended if waiting.handle.done() else unfinished).append(waiting)
        self._waiting = unfinished
        return ended


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
            _waiters.start(self._wait_here)

    def wait(self, timeout: float | None = None) -> None:
        self._watch()
        if not self._ended.wait(timeout):
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
