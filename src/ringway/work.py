"""Collectives in flight: the handle a backend returns, and the Work a user holds."""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

import ringway._core as _core
from ringway.errors import UsageError
from ringway.torch_versions import untraced

Completion = Callable[[BaseException | None], None]
"""A callback for the end of a call. Its argument is the error, or None."""
OnEnd = Callable[[BaseException | None], BaseException | None]

_CHECK_SECONDS = 0.1
"""How often a wait asks whether it can still succeed."""


class CompletionCell:
    """How a call ended. Thread-safe: finished once, awaited and observed by any number of threads.

    `finish` keeps the error and runs the callbacks on the thread that calls it. A callback added later runs at once.
    `on_end` sees the error before anybody else does, exactly once; its result replaces the error. With
    `callbacks_first`, waiters continue only after the callbacks have run.
    """

    __slots__ = ("_callbacks", "_hold_waiters", "_lock", "_on_end", "_wake", "error", "finished")

    def __init__(self, on_end: OnEnd | None = None, *, callbacks_first: bool = False) -> None:
        self.finished = False
        self.error: BaseException | None = None
        self._on_end = on_end
        self._hold_waiters = callbacks_first
        self._callbacks: list[Completion] = []
        self._lock = threading.RLock()
        self._wake: threading.Event | None = None  # made by the first wait: most calls have none

    def finish(self, error: BaseException | None) -> None:
        with self._lock:
            if self.finished:
                return
            self.error = error if self._on_end is None else self._on_end(error)
            self._on_end = None  # it may hold this cell's owner, and buffers of the call
            self.finished = True
            callbacks, self._callbacks = self._callbacks, []
            if self._wake is not None and not self._hold_waiters:
                self._wake.set()
        if not callbacks and not self._hold_waiters:
            return
        try:
            for callback in callbacks:
                self._run(callback)
        finally:
            with self._lock:
                self._hold_waiters = False
                if self._wake is not None:
                    self._wake.set()

    def when_done(self, callback: Completion) -> None:
        with self._lock:
            if not self.finished:
                self._callbacks.append(callback)
                return
        self._run(callback)

    def _run(self, callback: Completion) -> None:
        """A callback that raises harms neither the call nor the other callbacks. It may make calls, even if this thread
        is starting one that waits for this cell."""
        starting = _core.GroupRecord.exchange_starting([])
        try:
            callback(self.error)
        except Exception:
            logging.getLogger("ringway").exception("a completion callback raised")
        finally:
            _core.GroupRecord.exchange_starting(starting)

    def wait(self, timeout: float | None = None, check: Callable[[], None] | None = None) -> bool:
        """Whether the call finished within `timeout` seconds. `check` raises if this wait can no longer succeed.

        Waits in slices, so that Ctrl-C always ends it: CPython's sleep in a lock is interrupted only by a signal that
        arrives in the main thread after the sleep began.
        """
        with self._lock:
            if self.finished and not self._hold_waiters:
                return True
            wake = self._wake = self._wake or threading.Event()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not wake.wait(_CHECK_SECONDS if deadline is None else min(_CHECK_SECONDS, deadline - time.monotonic())):
            if check is not None:
                check()
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


class Handle(abc.ABC):
    """What a backend's method returns: a collective that has been started."""

    source = -1
    """After a receive from any source: the rank of the group it came from."""

    notifies = True
    """Whether completion is noticed without anybody waiting. If not, `when_done` has a cost, and a Work calls it only
    when its user asks."""

    on_device = False
    """Whether `wait` only orders the device's work, as a collective on a CUDA stream does. `when_finished` then reports
    the end."""

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Block until done, or for `timeout` seconds; raise what went wrong."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it has finished, well or not. Never blocks."""

    @abc.abstractmethod
    def when_done(self, completion: Completion) -> None:
        """Call `completion` once, on the thread that finishes the work, or now if it has finished."""

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        """Like `when_done`, but when the work itself ends, if that is after its wait returns. With `soon` false the
        backend may take its time."""
        self.when_done(completion)

    def outcome(self) -> BaseException | None:
        """What went wrong with a collective on a device, once it is done."""
        return None

    def wait_for_launch(self) -> None:
        """Block until the collective is enqueued on its device, if that comes later than its start."""
        return

    def behind(self) -> Handle:
        """A handle for everything enqueued on the current stream so far. The stream has already waited for this
        collective."""
        return self

    def then(self, finish: Callable[[], None], device: torch.device | None = None) -> Handle:
        """This handle followed by a local last step: results copied back, divided, or reduced. `device` is a CUDA
        device that the step uses."""
        if not self.on_device:
            return Finishing(self, finish, device)
        # On a device the step is enqueued right away, behind the collective, on the caller's stream. It runs even if
        # no thread waits, and becomes part of a graph that is being captured.
        self.wait()
        with torch.inference_mode():
            finish()
        return self.behind()


class _Done(Handle):
    def wait(self, timeout: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True

    def when_done(self, completion: Completion) -> None:
        completion(None)


DONE: Handle = _Done()
"""The handle of a call that finished before its method returned."""


class PendingHandle(Handle):
    """A handle that its backend finishes through a cell."""

    def __init__(self, on_end: OnEnd | None = None, *, callbacks_first: bool = False) -> None:
        self._cell = CompletionCell(on_end, callbacks_first=callbacks_first)

    def done(self) -> bool:
        return self._cell.finished

    def when_done(self, completion: Completion) -> None:
        self._cell.when_done(completion)


class Finishing(PendingHandle):
    """A handle with a local last step, not on a device.

    The step runs once, on the first thread that sees the inner handle done. It runs in inference mode: that thread does
    not know the mode of the call, and tensors made in inference mode can be written in no other.

    A step on a CUDA device comes behind the wait of the caller's thread, on its current stream. On any other thread it
    runs on the stream of the call, and a later wait orders the current stream behind it.
    """

    def __init__(self, inner: Handle, finish: Callable[[], None], device: torch.device | None = None) -> None:
        super().__init__(self._run_step)
        self._inner = inner
        self._finish: Callable[[], None] | None = finish
        self._thread = threading.get_ident()
        self._stream = None if device is None else torch.cuda.current_stream(device)
        self._event: Any = None
        self.notifies = inner.notifies

    @property
    def source(self) -> int:  # type: ignore[override]
        return self._inner.source

    def _run_step(self, error: BaseException | None) -> BaseException | None:
        finish, self._finish = self._finish, None  # it holds the call's buffers
        if error is None and finish is not None:
            try:
                stream = None if threading.get_ident() == self._thread else self._stream
                with torch.cuda.stream(stream), torch.inference_mode():
                    finish()
                if stream is not None:
                    self._event = stream.record_event()
            except BaseException as failure:
                return failure
        return error

    def wait_for_launch(self) -> None:
        self._inner.wait_for_launch()

    def wait(self, timeout: float | None = None) -> None:
        try:
            self._inner.wait(timeout)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if self._inner.done():
                self._cell.finish(error)
            raise
        self._cell.finish(None)
        self._cell.raise_error()
        if self._event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def when_done(self, completion: Completion) -> None:
        self._cell.when_done(completion)
        self._inner.when_done(self._cell.finish)


class Together(Handle):
    """Several handles that count as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self.notifies = all(handle.notifies for handle in handles)
        self.on_device = any(handle.on_device for handle in handles)

    def wait(self, timeout: float | None = None) -> None:
        for handle in self._handles:
            handle.wait(timeout)

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def when_done(self, completion: Completion) -> None:
        _when_all([handle.when_done for handle in self._handles], completion)

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        _when_all([partial(handle.when_finished, soon=soon) for handle in self._handles], completion)

    def outcome(self) -> BaseException | None:
        return next((error for handle in self._handles if (error := handle.outcome()) is not None), None)

    def behind(self) -> Handle:
        return next(handle for handle in self._handles if handle.on_device).behind()


def _when_all(subscribe: Sequence[Callable[[Completion], None]], completion: Completion) -> None:
    """Calls `completion` with the first error once every one of them has ended."""
    if not subscribe:
        completion(None)
        return
    lock = threading.Lock()
    left = len(subscribe)
    first: BaseException | None = None

    def one_done(error: BaseException | None) -> None:
        nonlocal left, first
        with lock:
            left -= 1
            first = first or error
            last = left == 0
        if last:
            completion(first)

    for when_done in subscribe:
        when_done(one_done)


def seconds(timeout: timedelta | float | None) -> float | None:
    """A timeout as torch gives it (a timedelta; zero, negative or None for unset), in seconds."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        value = timeout.total_seconds()
    elif isinstance(timeout, (int, float)):
        value = float(timeout)
    else:
        raise UsageError(f"timeout={timeout!r} is neither a timedelta nor a number of seconds")
    return value if value > 0 else None


@untraced
class Work(c10d.Work):
    """What an asynchronous call returns; its methods mean what torch's do.

    `on_end` gets the error or None exactly once, before anybody learns that the work is done. Its result replaces the
    error. The communicator uses it to record the end and to inform the listeners.
    """

    def __init__(self, handle: Handle, result: Sequence[Tensor], on_end: OnEnd) -> None:
        super().__init__()
        self._handle = handle
        self._result = list(result)
        self._cell = CompletionCell(on_end)
        self._watched = handle.notifies
        if self._watched:
            handle.when_done(self._cell.finish)

    def fail(self, error: BaseException) -> None:
        """Ends the work for its user although the backend has not ended it: no result will arrive."""
        self._cell.finish(error)

    def has_ended(self) -> bool:
        """Whether the backend has finished it, even if no callback has run yet."""
        return self._cell.finished or (self._handle.notifies and self._handle.done())

    def _watch(self) -> None:
        watched, self._watched = self._watched, True
        if not watched:
            self._handle.when_done(self._cell.finish)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        cell = self._cell
        if not cell.finished:
            try:
                self._handle.wait(seconds(timeout))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                if not self._handle.done():
                    raise  # this wait's own limit ran out; the collective goes on
                cell.finish(error)
            else:
                if not self._handle.on_device:  # there only the stream has waited
                    cell.finish(None)
        if cell.error is not None:
            raise cell.error
        return True

    def is_completed(self) -> bool:
        if not self._cell.finished:
            if not self._handle.on_device:
                self._watch()
            elif self._handle.done():
                self._cell.finish(self._handle.outcome())
        return self._cell.finished

    def is_success(self) -> bool:
        return self.is_completed() and self._cell.error is None

    def exception(self) -> BaseException | None:
        return self._cell.error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._handle.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result. Its callbacks run on the thread that completes the work."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        # The callback keeps this Work alive until it ends: DDP keeps only the future, and a group that fails must still
        # find the Work to end it.
        self.on_complete(lambda _: future.set_result(self._result))

        # `then` must raise the error: a future that itself holds an exception takes DDP's process down.
        def deliver(done: torch.futures.Future[Any]) -> list[Tensor]:
            self._cell.raise_error()
            return list(done.value())

        return future.then(deliver)

    def on_complete(self, callback: Completion) -> None:
        """Call `callback` with the error or None when the work is done, or now if it is."""
        self._cell.when_done(callback)
        if not self._cell.finished:
            self._watch()


_SENT = CompletionCell()
_SENT.finish(None)


class Sent(Work):
    """The Work of a send that has left: nothing can happen to it any more."""

    _handle = DONE
    _cell = _SENT
    _watched = True

    __init__ = c10d.Work.__init__

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return True

    @property
    def _result(self) -> list[Tensor]:  # type: ignore[override]
        return []


class WorkHandle(Handle):
    """A Work as a handle, to be combined with others or followed by a last step."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.notifies = work._handle.notifies
        self.on_device = work._handle.on_device

    def wait(self, timeout: float | None = None) -> None:
        self._work.wait(timeout)

    def done(self) -> bool:
        return self._work.is_completed()

    def when_done(self, completion: Completion) -> None:
        self._work.on_complete(completion)

    def outcome(self) -> BaseException | None:
        return self._work.exception()

    def behind(self) -> Handle:
        return self._work._handle.behind()
