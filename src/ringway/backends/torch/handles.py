"""Handles for torch's collectives and messages: how to wait for them, and how to learn that they have ended."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ringway.backends.process import Process
from ringway.call import ANY_SOURCE, Call
from ringway.errors import CommTimeout, PeerLost, RingwayError
from ringway.threads import start
from ringway.work import Completion, Handle, PendingHandle

WAIT_SLICE = timedelta(milliseconds=250)
"""A wait inside torch ignores Ctrl-C, so long waits are cut into slices."""

_TIMED_OUT = re.compile(r"tim(ed?|ing) ?out", re.IGNORECASE)
_CLOSED = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|peer .* (closed|gone)|ncclRemoteError",
    re.IGNORECASE,
)


def mapped(error: BaseException, call: Call, waited: float) -> RingwayError:
    """torch's error as one of ringway's."""
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


class PendingCallbacks:
    """Counts the completion callbacks that torch has yet to run.

    torch runs them on its own threads, which take the interpreter's lock once more after the callback has returned. If
    the interpreter ends in between, the process crashes, so the exit waits for quiet.
    """

    _TAIL = 0.05

    def __init__(self) -> None:
        self._count = 0
        self._last = 0.0
        self._lock = threading.Lock()

    def expect(self) -> None:
        with self._lock:
            self._count += 1

    def ran(self) -> None:
        with self._lock:
            self._count -= 1
            self._last = time.monotonic()

    def wait_for_quiet(self, timeout: float) -> bool:
        """Whether no callback is outstanding any more."""
        deadline = time.monotonic() + timeout
        while self._count or time.monotonic() - self._last < self._TAIL:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


class WaiterThreads:
    """Threads for waits that torch has no callback for (gloo's messages). Idle ones are reused."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                self._threads.append(start("ringway-waiter", self._serve))
        self._jobs.put(job)

    def busy(self) -> bool:
        """Whether one of them is inside torch."""
        return len(self._threads) > self._idle

    def native_ids(self) -> list[int]:
        """The kernel's numbers of the threads."""
        return [thread.native_id for thread in self._threads if thread.native_id is not None]

    def _serve(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


def wait_in_slices(work: Any, call: Call, began: float, timeout: float | None = None) -> None:
    """Waits for torch's `work`, and raises its error as one of ringway's."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            left = WAIT_SLICE if deadline is None else timedelta(seconds=max(0.001, deadline - time.monotonic()))
            work.wait(min(WAIT_SLICE, left))
            return
        except Exception:
            if work.is_completed():
                break
            if call.check is not None:
                call.check()
            if deadline is not None and time.monotonic() >= deadline:
                raise call.not_done(timeout) from None
    try:
        work.wait(WAIT_SLICE)  # it may have succeeded at the very end of the slice that raised
    except Exception as error:
        raise mapped(error, call, time.monotonic() - began) from None


class C10dHandle(Handle):
    """A torch collective, whose future reports the end."""

    def __init__(self, work: Any, call: Call, process: Process) -> None:
        self._work = work
        self._call = call
        self._process = process
        self._began = time.monotonic()

    def _error(self, error: BaseException) -> RingwayError:
        return mapped(error, self._call, time.monotonic() - self._began)

    def wait(self, timeout: float | None = None) -> None:
        wait_in_slices(self._work, self._call, self._began, timeout)

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def when_done(self, completion: Completion) -> None:
        callbacks = self._process.part(PendingCallbacks)

        def ended(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
            except Exception as error:
                completion(self._error(error))
            else:
                completion(None)
            finally:
                callbacks.ran()

        callbacks.expect()
        self._work.get_future().add_done_callback(ended)


class GlooMessage(PendingHandle):
    """A message through gloo. Only a blocking wait shows its end, and that wait cannot be sliced: it needs a thread."""

    notifies = False

    def __init__(self, work: Any, call: Call, process: Process) -> None:
        super().__init__()
        self._work = work
        self._call = call
        self._process = process
        self._began = time.monotonic()
        self._started = False
        self._lock = threading.Lock()

    def _wait_here(self) -> None:
        failure: RingwayError | None = None
        try:
            self._work.wait()
            if self._call.peer == ANY_SOURCE:
                self.source = self._work._source_rank()
        except Exception as error:
            failure = mapped(error, self._call, time.monotonic() - self._began)
        self._cell.finish(failure)

    def _watch(self) -> None:
        with self._lock:
            started, self._started = self._started, True
        if not started:
            self._process.part(WaiterThreads).start(self._wait_here)

    def wait(self, timeout: float | None = None) -> None:
        self._watch()
        if not self._cell.wait(timeout):
            raise self._call.not_done(timeout)
        self._cell.raise_error()

    def done(self) -> bool:
        self._watch()
        return self._cell.finished

    def when_done(self, completion: Completion) -> None:
        self._cell.when_done(completion)
        self._watch()
