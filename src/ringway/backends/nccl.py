"""nccl: torch's own group, with what its users miss.

torch runs it, on its own streams; here its calls get their names, their errors and an end. What NCCL cannot
reduce is exchanged and reduced on the device. A wait only orders the stream, as torch's does; that a collective
has finished is learnt from the device by a thread that looks, so nothing is synchronized. With torch's blocking
wait (TORCH_NCCL_BLOCKING_WAIT=1) a timeout is raised where the program waits and can be caught there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor

from ringway.backends.base import GroupInfo
from ringway.backends.c10d import TorchBackend
from ringway.backends.c10d_work import Announced, mapped
from ringway.backends.compose import reduce_rows
from ringway.backends.device_watch import Ending, device_watch
from ringway.call import Call, Reduce
from ringway.errors import RingwayError
from ringway.work import DONE, Completion, Handle

_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_REDUCED = _FLOATS | {torch.int8, torch.uint8, torch.int32, torch.int64}
_MOVED = _REDUCED | {torch.bool}
_BITWISE = frozenset({Reduce.BAND, Reduce.BOR, Reduce.BXOR})
_DOUBTFUL_SECONDS = 0.1
"""What takes longer than that may have failed. torch warns whoever asks, so of what is quicker nobody asks: where a
peer is lost, the next call says so."""
_LEAVE_SECONDS = 10.0


class NcclHandle(Announced):
    """A collective on NCCL's stream."""

    notifies = False
    on_device = True

    def __init__(self, work: Any, call: Call, backend: NcclBackend, number: int, captured: bool) -> None:
        super().__init__(work, call)
        self._backend = backend
        self._number = number
        self._captured = captured
        self._failure: BaseException | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Orders the current stream behind the collective; blocks only where torch's blocking wait is on."""
        try:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=timeout))
        except Exception as error:
            raise self._error(error) from None

    def when_done(self, completion: Completion) -> None:
        # Somebody asks late: not in line with those that were issued.
        _watch(self, self, self._captured, completion, soon=True)

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        call = self._call
        device = _cuda_device(call)
        if call.async_op or soon or device is None:
            _watch((self._backend, device, _way(call)), self, self._captured, completion, soon)
        else:
            self.behind().when_finished(completion, soon)

    def behind(self) -> Handle:
        device = _cuda_device(self._call)
        return self if device is None else OnStream(self._backend, self._call, self._number, device, self._captured)

    def done(self) -> bool:
        if self._captured:
            return True
        try:
            return bool(self._work.is_completed())
        except Exception as error:
            self._failure = error
            return True

    def outcome(self) -> BaseException | None:
        error = self._failure or self._backend.abortion
        if error is None and _doubtful(self._began):
            error = _trouble(self._work)
        self._backend.forget(_way(self._call), self._number)
        return None if error is None else self._error(error)


class OnStream(Handle):
    """What stands on a stream up to an event that is recorded now: a collective, and perhaps its last step.

    Unlike torch's work it keeps no tensor from being freed. Whether something went wrong, the last work that went the
    same way knows: an error of NCCL's is the whole communicator's.
    """

    notifies = False
    on_device = True

    def __init__(self, backend: NcclBackend, call: Call, number: int, device: torch.device, captured: bool) -> None:
        self._backend = backend
        self._call = replace(call, inputs=(), outputs=())
        self._number = number
        self._device = device
        self._captured = captured
        self._began = time.monotonic()
        self._stream = torch.cuda.current_stream(device)
        self._event = torch.cuda.Event()
        self._event.record(self._stream)

    def wait(self, timeout: float | None = None) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def when_done(self, completion: Completion) -> None:
        _watch(self, self, self._captured, completion, soon=True)

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        line = (self._backend, self._device, self._stream.cuda_stream)
        _watch(line, self, self._captured, completion, soon)

    def done(self) -> bool:
        return self._captured or bool(self._event.query()) or self._trouble() is not None

    def outcome(self) -> BaseException | None:
        error = self._backend.abortion or self._trouble()
        self._backend.forget(_way(self._call), self._number)
        return None if error is None else mapped(error, self._call, time.monotonic() - self._began)

    def _trouble(self) -> BaseException | None:
        last = self._backend.last(_way(self._call))
        return _trouble(last) if last is not None and _doubtful(self._began) and _has_ended(last) else None


def _watch(line: Hashable, ending: Ending, captured: bool, completion: Completion, soon: bool) -> None:
    if captured:
        completion(None)  # it was written down, and runs whenever the graph is replayed
    else:
        device_watch.add(line, ending, completion, soon)


def _way(call: Call) -> Hashable:
    """Messages go by communicators of their own, one for each pair."""
    return None if call.op.collective else (call.op.name, call.peer)


def _doubtful(began: float) -> bool:
    return time.monotonic() - began > _DOUBTFUL_SECONDS


def _has_ended(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except Exception:  # asked about a communicator that was aborted
        return True


def _trouble(work: Any) -> BaseException | None:
    """What went wrong with a work that has ended, if anything, and as far as torch can say it in Python."""
    try:
        error = work.exception()
    except TypeError:  # a C++ exception that has no Python type
        return None
    except Exception as failure:
        error = failure
    return error if isinstance(error, BaseException) else None


def _cuda_device(call: Call) -> torch.device | None:
    for tensor in (*call.outputs, *call.inputs):
        if tensor.is_cuda:
            return tensor.device
    return None


class NcclBackend(TorchBackend):
    """One group of torch's ProcessGroupNCCL."""

    name = "nccl"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, info: GroupInfo, group: Any, destroyed: Callable[[], bool] = lambda: False) -> None:
        super().__init__(info, group)
        self._issued = 0
        self._last: dict[Hashable, tuple[int, Any]] = {}
        """By the way it went: the number and torch's work of the last call, while it is not known to have ended."""
        self._changing = threading.Lock()
        self.abortion: BaseException | None = None
        self._closed = False
        self._destroyed = destroyed

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        if reduce in _BITWISE:
            return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        if reduce is Reduce.AVG:
            return dtype in _FLOATS
        # NCCL's own PREMUL_SUM leaves bfloat16 as it is in a group of one, so inputs are multiplied here.
        return dtype in _REDUCED and reduce is not Reduce.PREMUL_SUM

    def can_move(self, dtype: torch.dtype) -> bool:
        return dtype in _MOVED

    def _start(self, call: Call, method: Callable[..., Any], *arguments: Any) -> Handle:
        try:
            work = method(*arguments)
        except RuntimeError as error:
            raise mapped(error, call, 0.0) from error
        captured = _cuda_device(call) is not None and torch.cuda.is_current_stream_capturing()
        with self._changing:
            number = self._issued = self._issued + 1
            if not captured:  # what was written down into a graph can be asked nothing
                self._last[_way(call)] = (number, work)
        return NcclHandle(work, call, self, number, captured)

    def last(self, way: Hashable) -> Any:
        """torch's work of the last call that went this way, if it may still be under way."""
        return self._last.get(way, (0, None))[1]

    def forget(self, way: Hashable, number: int) -> None:
        """That call has ended: torch's work would keep its tensors from being freed."""
        with self._changing:
            if self._last.get(way, (0, None))[0] == number:
                del self._last[way]

    # Bitwise reductions, of which NCCL has none: exchanged and reduced, all of it on the current stream.

    def _shares(self, call: Call) -> Tensor:
        flat = call.inputs[0].reshape(-1)
        short = -flat.numel() % self.size
        if short:
            flat = torch.cat([flat, flat.new_zeros(short)])
        received = torch.empty_like(flat)
        plain = replace(call, input_splits=None, output_splits=None)
        super().all_to_all_single(replace(plain, inputs=[_bytes(flat)], outputs=[_bytes(received)])).wait()
        return reduce_rows(list(received.view(self.size, -1)), call.reduce)

    def _reduced(self, call: Call) -> Tensor:
        share = self._shares(call)
        whole = share.new_empty(share.numel() * self.size)
        super().all_gather_into_tensor(replace(call, inputs=[_bytes(share)], outputs=[_bytes(whole)])).wait()
        return whole[: call.inputs[0].numel()].view(call.inputs[0].shape)

    def all_reduce(self, call: Call) -> Handle:
        if call.reduce not in _BITWISE:
            return super().all_reduce(call)
        call.outputs[0].copy_(self._reduced(call))
        return DONE

    def reduce(self, call: Call) -> Handle:
        if call.reduce not in _BITWISE:
            return super().reduce(call)
        total = self._reduced(call)
        if self.rank == call.peer:
            call.outputs[0].copy_(total)
        return DONE

    def reduce_scatter(self, call: Call) -> Handle:
        if call.reduce not in _BITWISE:
            return super().reduce_scatter(call)
        joined = replace(call, inputs=[torch.cat([t.reshape(-1) for t in call.inputs])])
        return self.reduce_scatter_tensor(joined)

    def reduce_scatter_tensor(self, call: Call) -> Handle:
        if call.reduce not in _BITWISE:
            return super().reduce_scatter_tensor(call)
        call.outputs[0].copy_(self._shares(call).view(call.outputs[0].shape))
        return DONE

    # The end

    def close(self) -> None:
        """torch's shutdown waits for what is under way, for ever if a rank is gone: what has not finished after a
        while is aborted instead."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _LEAVE_SECONDS
        while not self._all_ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self._all_ended():
            self._abort_group()

    def _all_ended(self) -> bool:
        return all(_has_ended(work) for _, work in list(self._last.values()))

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._abort_group()

    def _abort_group(self) -> None:
        if self._destroyed():  # by torch, behind our back: NCCL frees a communicator twice that is aborted after that
            return
        if not self._all_ended():
            self.abortion = RingwayError("the group was aborted")
        with suppress(RuntimeError):  # a group that never connected has nothing to abort
            self._group.abort()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
