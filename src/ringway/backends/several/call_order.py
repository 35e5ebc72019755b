"""One order for the calls of a group that has several backends.

Each backend keeps the order of its own calls. A call goes straight to its backend if nothing is in flight on another
one. Otherwise it is queued (`backends/queue.py`) until the calls issued before it have ended, callbacks included.
So every backend sees its calls in the order of issue, on every rank, whether a rank had to wait or not. A call issued
from a completion callback does not wait for the call whose callback it is: it runs before anything that comes after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import ringway._core as _core
from ringway.backends.queue import CallQueue
from ringway.call import Call
from ringway.errors import CommTimeout
from ringway.work import DONE, Handle, PendingHandle

Runner = Callable[[Call], Handle]
Hold = Callable[[int], None]

QUEUED = ""
"""Where a call is that has not reached its backend yet."""


class _CallInFlight(PendingHandle):
    """A call on the backend named `where`. It counts as in flight until its completion callbacks have run."""

    def __init__(self, order: CallOrder, where: str, inner: Handle) -> None:
        super().__init__()
        self._order = order
        self.where = where
        self.inner = inner
        self.released = threading.Event()
        """Set when the calls behind this one need not wait for it any more."""
        order.began(self)
        inner.when_done(self._end)

    def _end(self, error: BaseException | None) -> None:
        with self._order.callbacks_of(self):
            self._cell.finish(error)

    def wait(self, timeout: float | None = None) -> None:
        if self.where == QUEUED:
            self._order.release_callers()
        self.inner.wait(timeout)

    def done(self) -> bool:
        return self.inner.done()


class CallOrder:
    """The order of one group."""

    def __init__(self, group: str, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._in_flight: list[_CallInFlight] = []
        self._queue = CallQueue(f"mixed-{group}", timeout)
        self._holds: list[tuple[str, Hold]] = []
        self.callbacks: dict[int, list[_CallInFlight]] = {}
        """By thread: the calls whose completion callbacks it is running, innermost last."""

    def holding(self, backend: str, hold: Hold) -> None:
        """A backend's fast path bypasses this order. `hold` shuts it (+1) while a call is in flight elsewhere, and
        opens it again (-1)."""
        with self._lock:
            self._holds.append((backend, hold))
            hold(sum(earlier.where != backend for earlier in self._in_flight))

    def start(self, backend: str, runner: Runner, call: Call) -> Handle:
        if not self._in_flight or self._may_go(backend):
            handle = runner(call)
            return _CallInFlight(self, backend, handle) if call.async_op and handle is not DONE else handle
        before = self._started()
        job = _core.pass_on(self._queue.submit, call, lambda: self._after(before, runner, call))
        return job if job is DONE else _CallInFlight(self, QUEUED, job)

    def _may_go(self, backend: str) -> bool:
        if threading.get_ident() in self.callbacks:
            return True
        with self._lock:
            return all(earlier.where == backend for earlier in self._in_flight)

    def _after(self, before: list[_CallInFlight], runner: Runner, call: Call) -> None:
        """Runs the call once the calls before it have ended, and the calls that their callbacks issued."""
        deadline = time.monotonic() + (self._timeout if call.timeout is None else call.timeout)
        while before:
            for earlier in before:
                earlier.inner.wait(max(0.0, deadline - time.monotonic()))  # its error ends this call too
                if not earlier.released.wait(max(0.0, deadline - time.monotonic())):
                    raise CommTimeout(
                        f"{call.describe()} timed out: the completion callbacks of an earlier call have not ended",
                        op=call.op.name,
                        sequence=call.sequence,
                    )
            before = self._started()
        runner(replace(call, async_op=False)).wait()

    def _started(self) -> list[_CallInFlight]:
        """The calls that backends are running and that others wait for."""
        with self._lock:
            return [earlier for earlier in self._in_flight if earlier.where != QUEUED and not earlier.released.is_set()]

    def release_callers(self) -> None:
        """A callback is about to wait for a queued call, which in turn waits for the call of that callback."""
        for earlier in self.callbacks.get(threading.get_ident(), ()):
            earlier.released.set()

    @contextmanager
    def callbacks_of(self, call: _CallInFlight) -> Iterator[None]:
        """While it lasts, this thread runs the completion callbacks of `call`."""
        me = threading.get_ident()
        self.callbacks.setdefault(me, []).append(call)
        try:
            yield
        finally:
            self.callbacks[me].remove(call)
            if not self.callbacks[me]:
                del self.callbacks[me]
            self.ended(call)

    def began(self, call: _CallInFlight) -> None:
        with self._lock:
            self._in_flight.append(call)
            self._hold_others(call, 1)

    def ended(self, call: _CallInFlight) -> None:
        with self._lock:
            self._in_flight.remove(call)
            self._hold_others(call, -1)
        call.released.set()

    def _hold_others(self, call: _CallInFlight, change: int) -> None:
        for backend, hold in self._holds:
            if backend != call.where:
                hold(change)

    def stop(self, error: BaseException) -> None:
        self._queue.stop(error)
