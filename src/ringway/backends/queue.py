"""Runs blocking calls in order: the collectives of a group whose library has no asynchronous calls, or whose algorithm
has several steps.

A synchronous call that finds the queue empty may run on the caller's thread. Everything else runs on one thread of the
group, in the order of issue. A collective issued from a completion callback runs at once, ahead of the queue, so that
ranks whose callbacks run at different moments still agree about the order.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Protocol, TypeVar

from ringway.call import Call
from ringway.errors import CommTimeout
from ringway.threads import start
from ringway.work import DONE, Handle, PendingHandle

_DEADLINE_CHECK_SECONDS = 0.25


class _HasQueue(Protocol):
    def _submit(self, call: Call, body: Callable[[Call], None]) -> Handle: ...


_Queued = TypeVar("_Queued", bound=_HasQueue)


def queued(body: Callable[[_Queued, Call], None]) -> Callable[[_Queued, Call], Handle]:
    """Makes an op of a backend's blocking method: `_submit` puts it into the backend's queue."""

    @wraps(body)
    def op(self: _Queued, call: Call) -> Handle:
        return self._submit(call, partial(body, self))

    return op


class _QueuedCall(PendingHandle):
    """One collective, from its issue to the last of its completion callbacks."""

    def __init__(self, queue: CallQueue, call: Call, work: Callable[[], None], deadline: float) -> None:
        super().__init__(callbacks_first=True)
        self._queue = queue
        self._call = call
        self._work: Callable[[], None] | None = work
        self._issued = time.monotonic()
        self.deadline = deadline

    def run(self) -> None:
        error: BaseException | None = None
        work = self._work
        if work is not None:
            try:
                work()
            except BaseException as failure:
                error = failure
        self.finish(error)

    def finish(self, error: BaseException | None) -> None:
        self._work = None
        self._cell.finish(error)

    def expired(self) -> CommTimeout:
        waited = time.monotonic() - self._issued
        return CommTimeout(
            f"{self._call.describe()} timed out after {waited:.1f} s",
            op=self._call.op.name,
            sequence=self._call.sequence,
            waited=waited,
        )

    def wait(self, timeout: float | None = None) -> None:
        self._queue.help_with(self)
        if not self._cell.wait(timeout, self._call.check):
            raise self._call.not_done(timeout)
        self._cell.raise_error()


class CallQueue:
    """The queue of one group.

    A synchronous call may run on its caller's thread, if the calls end by their own deadlines. Calls that cannot be
    interrupted need `deadlines`: they run on the group's thread and are given up when their time is over.
    """

    def __init__(self, name: str, timeout: float, deadlines: Deadlines | None = None) -> None:
        self._name = name
        self._timeout = timeout
        self._inline = deadlines is None
        self._queue: deque[_QueuedCall] = deque()
        self._active: list[_QueuedCall] = []
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if deadlines is not None:
            deadlines.add(self)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def submit(self, call: Call, work: Callable[[], None]) -> Handle:
        if self._failure is not None:
            raise self._failure
        if not call.async_op and self.take():
            try:
                work()
            finally:
                self.give_back()
            return DONE
        limit = self._timeout if call.timeout is None else call.timeout
        job = _QueuedCall(self, call, work, time.monotonic() + limit)
        if threading.current_thread() is self._thread:
            self._run(job)
            return job
        with self._changed:
            self._queue.append(job)
            if self._thread is None:
                self._thread = start(f"ringway-{self._name}", self._serve)
            self._changed.notify()
        return job

    def stop(self, error: BaseException) -> None:
        """Ends everything queued or running, and every later call, with `error`. Does not wait."""
        with self._changed:
            self._failure = self._failure or error
            left = [*self._active, *self._queue]
            self._queue.clear()
            self._changed.notify()
        for job in left:
            job.finish(error)

    def take(self) -> bool:
        """Claims the queue for a call on this thread, if the queue is idle. The caller must `give_back` it."""
        if not self._inline:
            return False
        with self._changed:
            if self._busy or self._queue or self._failure is not None:
                return False
            if threading.current_thread() is self._thread:
                return False
            self._busy = True
            return True

    def give_back(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None or (self._queue and not self._busy))
                if self._failure is not None:
                    return
                job = self._queue.popleft()
                self._busy = True
            self._run(job)
            self.give_back()

    def _run(self, job: _QueuedCall) -> None:
        self._active.append(job)
        try:
            job.run()
        finally:
            self._active.remove(job)

    def help_with(self, job: _QueuedCall) -> None:
        """A callback that waits for a job queued behind it would wait for itself: its thread runs the queue first."""
        while threading.current_thread() is self._thread and not job.done() and self._queue:
            self._run(self._queue.popleft())

    def expire(self) -> None:
        """Gives up a call past its deadline: its thread may be stuck in a library forever."""
        first = next((job for job in [*self._active, *self._queue] if not job.done()), None)
        if first is not None and time.monotonic() > first.deadline:
            self.stop(first.expired())


class Deadlines:
    """One thread that enforces the deadlines of all queues whose work cannot be interrupted."""

    def __init__(self) -> None:
        self._queues: weakref.WeakSet[CallQueue] = weakref.WeakSet()
        self._started = False
        self._lock = threading.Lock()

    def add(self, queue: CallQueue) -> None:
        with self._lock:
            self._queues.add(queue)
            if not self._started:
                start("ringway-deadlines", self._serve)
                self._started = True

    def _serve(self) -> None:
        while True:
            time.sleep(_DEADLINE_CHECK_SECONDS)
            with self._lock:
                queues = list(self._queues)
            for queue in queues:
                queue.expire()
