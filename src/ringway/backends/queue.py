"""Runs what blocks, in order: the collectives of a group whose library has no asynchronous calls, or whose
algorithm has several steps.

A synchronous call that finds nothing before it may run on the caller's own thread. Everything else runs on one
thread of the group, in the order of issue. A collective issued from a completion callback runs at once, before
the next in the queue, so that ranks whose callbacks run at different moments still agree about the order.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable

from ringway.call import Call
from ringway.errors import CommTimeout
from ringway.threads import start
from ringway.work import DONE, Completion, Handle

_WATCH_EVERY = 0.25
_SLICE = 0.1
"""Seconds after which a wait asks whether it has become vain: ranks may have called different things."""


class _Job(Handle):
    """One collective, from its issue to the last of its completion callbacks."""

    def __init__(self, runner: Ordered, call: Call, work: Callable[[], None], deadline: float) -> None:
        self._runner = runner
        self._call = call
        self._work: Callable[[], None] | None = work
        self._issued = time.monotonic()
        self.deadline = deadline
        self.finished = False
        self._error: BaseException | None = None
        self._completions: list[Completion] = []
        self._lock = threading.Lock()
        self._delivered = threading.Event()

    def run(self) -> None:
        error: BaseException | None = None
        work = self._work
        if work is not None:
            try:
                work()
            except BaseException as failure:
                error = failure
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Tells the end, once; whoever waits goes on when the callbacks have run."""
        with self._lock:
            if self.finished:
                return
            self.finished = True
            self._error = error
            self._work = None
            completions, self._completions = self._completions, []
        try:
            for completion in completions:
                completion(error)
        except Exception:
            traceback.print_exc()
        finally:
            self._delivered.set()

    def expired(self) -> CommTimeout:
        waited = time.monotonic() - self._issued
        return CommTimeout(
            f"{self._call.describe()} timed out after {waited:.1f} s",
            op=self._call.op.name,
            sequence=self._call.sequence,
            waited=waited,
        )

    def wait(self, timeout: float | None = None) -> None:
        self._runner.help_with(self)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._delivered.wait(_SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())):
            if self._call.check is not None:
                self._call.check()
            if deadline is not None and time.monotonic() >= deadline:
                raise self._call.not_done(timeout)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self.finished

    def when_done(self, completion: Completion) -> None:
        with self._lock:
            if not self.finished:
                self._completions.append(completion)
                return
        completion(self._error)


class Ordered:
    """The queue of one group.

    `inline`: a synchronous call may run on its caller's thread. That is for functions that end by the deadline
    on their own; those that cannot be interrupted run on the group's thread and are given up at the deadline.
    """

    def __init__(self, name: str, timeout: float, *, inline: bool) -> None:
        self._name = name
        self._timeout = timeout
        self._inline = inline
        self._queue: deque[_Job] = deque()
        self._active: list[_Job] = []
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if not inline:
            _watch.add(self)

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
        job = _Job(self, call, work, time.monotonic() + limit)
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
        """What is queued or under way ends with `error`, and so does whatever comes later. Does not wait."""
        with self._changed:
            self._failure = self._failure or error
            left = [*self._active, *self._queue]
            self._queue.clear()
            self._changed.notify()
        for job in left:
            job.end(error)

    def take(self) -> bool:
        """Takes the turn for a call on this thread, if nothing is before it; then it has to be given back."""
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

    def _run(self, job: _Job) -> None:
        self._active.append(job)
        try:
            job.run()
        finally:
            self._active.remove(job)

    def help_with(self, job: _Job) -> None:
        """A callback that waits for a job behind it in the queue would wait for itself."""
        while threading.current_thread() is self._thread and not job.finished and self._queue:
            self._run(self._queue.popleft())

    def expire(self) -> None:
        """Gives up what is past its deadline: the thread may be stuck in a library for ever."""
        first = next((job for job in [*self._active, *self._queue] if not job.finished), None)
        if first is not None and time.monotonic() > first.deadline:
            self.stop(first.expired())


class _Watch:
    """One thread that keeps the deadlines of all queues whose work cannot be interrupted."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Ordered] = weakref.WeakSet()
        self._started = False
        self._lock = threading.Lock()

    def add(self, ordered: Ordered) -> None:
        with self._lock:
            self._watched.add(ordered)
            if not self._started:
                start("ringway-deadlines", self._serve)
                self._started = True

    def _serve(self) -> None:
        while True:
            time.sleep(_WATCH_EVERY)
            with self._lock:
                watched = list(self._watched)
            for ordered in watched:
                ordered.expire()


_watch = _Watch()
