"""The handles of calls on CUDA tensors: direct ones, and those through the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from ringway.backends.device_watch import DeviceWatch
from ringway.backends.shm.cuda_device import Cuda
from ringway.call import Call
from ringway.work import Completion, CompletionCell, Finishing, Handle


class Owner(Hashable, Protocol):
    """The backend that a direct call belongs to."""

    device: Cuda
    watch: DeviceWatch

    def fault(self) -> BaseException | None:
        """What ended the group, if anything did."""


class DirectHandle(Handle):
    """A direct call. It is launched once all ranks have met, and has ended when the device has passed its event."""

    notifies = False
    on_device = True

    def __init__(self, backend: Owner, call: Call, near: Tensor, captured: bool, line: Any = None) -> None:
        self._backend = backend
        self._line = backend if line is None else line
        self._call = call
        self._near = near
        self._captured = captured
        self._launched: CompletionCell | None = None
        self._steps: list[Callable[[], None]] = []
        self._open = False
        self._lock = threading.Lock()
        self._event: Any = None

    def begun(self, event: Any) -> DirectHandle:
        """The call was launched at once."""
        self._event = event
        return self

    def queued(self) -> CompletionCell:
        """The call will be launched later: finish the cell then."""
        self._open = True
        self._launched = CompletionCell()
        return self._launched

    def then(self, finish: Callable[[], None], device: torch.device | None = None) -> Handle:
        """The last step of a call that is not launched yet comes behind it on its stream. The handle keeps the step,
        and the memory that it uses, until the device has passed it."""
        with self._lock:
            if self._open:
                self._steps.append(finish)
                return self
        return super().then(finish, device)

    def last_steps(self) -> list[Callable[[], None]]:
        """What to enqueue behind the call, now that it is launched."""
        with self._lock:
            self._open = False
        return self._steps

    def wait_for_launch(self) -> None:
        if self._launched is not None:
            self._launched.wait(None, self._call.check)  # `wait` raises what went wrong

    def wait(self, timeout: float | None = None) -> None:
        if self._launched is not None:
            if not self._launched.wait(timeout, self._call.check):
                raise self._call.not_done(timeout)
            self._launched.raise_error()
        if not self._captured:
            self._backend.device.order(self._near, self._event)

    def done(self) -> bool:
        if self._captured:
            return True
        if self._launched is not None:
            if not self._launched.finished:
                return False
            if self._launched.error is not None:
                return True
        return bool(self._event.query())

    def outcome(self) -> BaseException | None:
        if self._captured:
            return None
        return (self._launched and self._launched.error) or self._backend.fault()

    def when_done(self, completion: Completion) -> None:
        self.when_finished(completion)

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        if self._captured:
            completion(None)  # it became part of a graph, and runs whenever that is replayed
        else:
            self._backend.watch.add(self._line, self, completion, soon)

    def behind(self) -> Handle:
        device = self._backend.device
        stream = device.current(self._near)
        later = DirectHandle(self._backend, self._call, self._near, self._captured, (self._backend, device.raw(stream)))
        return later.begun(None if self._captured else device.mark(stream))


class HostHandle(Finishing):
    """An asynchronous call through the host. Its results are on the device once it is done, so any stream may use
    them."""

    def __init__(self, device: Cuda, near: Tensor, inner: Handle, finish: Callable[[], None]) -> None:
        super().__init__(inner, lambda: device.aside(near, finish))
        self._device = device
        self._near = near

    def then(self, finish: Callable[[], None], device: torch.device | None = None) -> Handle:
        return HostHandle(self._device, self._near, self, finish)
