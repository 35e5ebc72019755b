"""A collective under way: the handle a backend returns, and the Work a user holds."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.errors import UsageError

Completion = Callable[[BaseException | None], None]


class Handle(abc.ABC):
    """What a backend's method returns: a collective that has been started."""

    source = -1
    """After a receive from any source: the rank of the group it came from."""

    notifies = True
    """Whether completion is noticed without anybody waiting. If not, `when_done` costs something, and a Work asks for
    it only when its user does."""

    on_device = False
    """Whether `wait` only orders the device's work, as a collective on a CUDA stream does. Then the end is told
    by `when_finished`."""

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Block until done, at most `timeout` seconds where given; raise what went wrong."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it has finished, well or not. Never blocks."""

    @abc.abstractmethod
    def when_done(self, completion: Completion) -> None:
        """Call `completion` once, on whichever thread finishes the work, or now if it has finished."""

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        """As `when_done`, but at the end of the work itself where that comes after the wait's; with `soon` false, at
        the backend's leisure."""
        self.when_done(completion)

    def outcome(self) -> BaseException | None:
        """What went wrong with a collective on a device, once it is done."""
        return None

    def behind(self) -> Handle:
        """What was enqueued on the current stream up to now; for a collective that this stream has waited for."""
        return self

    def then(self, finish: Callable[[], None]) -> Handle:
        """This, with a last step of our own: results copied back, divided, or reduced locally."""
        if not self.on_device:
            return Finishing(self, finish)
        # There the step is enqueued at once, behind the collective, on the stream of whoever issued it: so it is done
        # though nobody waits, and is part of a graph that is being captured.
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
"""The handle of a call that was finished before its method returned."""


class Finishing(Handle):
    """A handle with a last step of our own, not on a device.

    The step runs once, on whichever thread sees the inner handle done first; in inference mode, because that
    thread does not know in which mode the call was made, and tensors made in inference mode are written in no other.
    """

    def __init__(self, inner: Handle, finish: Callable[[], None]) -> None:
        self._inner = inner
        self._finish: Callable[[], None] | None = finish
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.notifies = inner.notifies

    @property
    def source(self) -> int:  # type: ignore[override]
        return self._inner.source

    def _finish_once(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    with torch.inference_mode():
                        finish()
                except BaseException as error:
                    self._error = error
        if self._error is not None:
            raise self._error

    def wait(self, timeout: float | None = None) -> None:
        try:
            self._inner.wait(timeout)
        except BaseException:
            if self._inner.done():
                self._finish = None  # nothing came that could be finished
            raise
        self._finish_once()

    def done(self) -> bool:
        return self._inner.done() and self._finish is None

    def when_done(self, completion: Completion) -> None:
        def finished(error: BaseException | None) -> None:
            if error is None:
                try:
                    self._finish_once()
                except BaseException as failure:
                    error = failure
            completion(error)

        self._inner.when_done(finished)


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
        self._when_all(completion, [handle.when_done for handle in self._handles])

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        self._when_all(completion, [partial(handle.when_finished, soon=soon) for handle in self._handles])

    def outcome(self) -> BaseException | None:
        return next((error for handle in self._handles if (error := handle.outcome()) is not None), None)

    def behind(self) -> Handle:
        return next(handle for handle in self._handles if handle.on_device).behind()

    def _when_all(self, completion: Completion, tellers: Sequence[Callable[[Completion], None]]) -> None:
        if not tellers:
            completion(None)
            return
        lock = threading.Lock()
        left = len(tellers)
        first: BaseException | None = None

        def one_done(error: BaseException | None) -> None:
            nonlocal left, first
            with lock:
                left -= 1
                first = first or error
                last = left == 0
            if last:
                completion(first)

        for tell in tellers:
            tell(one_done)


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


def _tell(callback: Completion, error: BaseException | None) -> None:
    """What a callback raises is its own affair: neither the work nor the other callbacks are to suffer."""
    try:
        callback(error)
    except Exception:
        logging.getLogger("ringway").exception("a completion callback raised")


class Work(c10d.Work):
    """What an asynchronous call returns; its methods mean what torch's do.

    `settle` is told the error or None exactly once, before anybody learns that the work is done; what it
    returns takes the error's place. It is how the communicator records the end and tells the observers.
    """

    def __init__(
        self, handle: Handle, result: Sequence[Tensor], settle: Callable[[BaseException | None], BaseException | None]
    ) -> None:
        super().__init__()
        self._handle = handle
        self._result = list(result)
        self._settle = settle
        self._lock = threading.RLock()
        self._settled = False
        self._error: BaseException | None = None
        self._watched = handle.notifies
        self._future: torch.futures.Future[Any] | None = None
        self._callbacks: list[Completion] = []
        if self._watched:
            handle.when_done(self._completed)

    def _completed(self, error: BaseException | None) -> None:
        with self._lock:
            if self._settled:
                return
            self._error = self._settle(error)
            self._settled = True
            callbacks, self._callbacks = self._callbacks, []
            future = self._future
        if future is not None:
            future.set_result(self._result)
        for callback in callbacks:
            _tell(callback, self._error)

    def fail(self, error: BaseException) -> None:
        """Ends the work for whoever holds it, though its backend has not: nothing will come any more."""
        self._completed(error)

    def has_ended(self) -> bool:
        """Whether the backend is known to be done with it, though nobody may have been told yet."""
        return self._settled or (self._handle.notifies and self._handle.done())

    def _watch(self) -> None:
        with self._lock:
            watched, self._watched = self._watched, True
        if not watched:
            self._handle.when_done(self._completed)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if not self._settled:
            try:
                self._handle.wait(seconds(timeout))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                if not self._handle.done():
                    raise  # this wait's own limit ran out; the collective goes on
                self._completed(error)
            else:
                if not self._handle.on_device:  # there only the stream has waited
                    self._completed(None)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self._settled:
            if not self._handle.on_device:
                self._watch()
            elif self._handle.done():
                self._completed(self._handle.outcome())
        return self._settled

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._handle.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result. Its callbacks run on the thread that completes the work."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._settled:
                    self._future.set_result(self._result)
            future = self._future
        self._watch()

        # An error must come out of `then`: a future that itself holds an exception takes DDP's process down.
        def deliver(done: torch.futures.Future[Any]) -> list[Tensor]:
            if self._error is not None:
                raise self._error
            return list(done.value())

        return future.then(deliver)

    def on_complete(self, callback: Completion) -> None:
        """Call `callback` with the error or None when the work is done, or now if it is."""
        with self._lock:
            if not self._settled:
                self._callbacks.append(callback)
                callback_now = False
            else:
                callback_now = True
        if callback_now:
            _tell(callback, self._error)
        else:
            self._watch()


class Sent(Work):
    """Of a send that has left: nothing can happen to it any more."""

    _handle = DONE
    _settled = _watched = True
    _error = None
    _future = None
    _lock = threading.RLock()

    def __init__(self) -> None:
        c10d.Work.__init__(self)

    @property
    def _result(self) -> list[Tensor]:  # type: ignore[override]
        return []


class WorkHandle(Handle):
    """A Work seen as a handle, to be waited for together with others or with a last step behind it."""

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
