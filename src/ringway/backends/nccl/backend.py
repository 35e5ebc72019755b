"""nccl: torch's group, with named calls, mapped errors and a bounded end.

torch runs it on its own streams. Reductions that NCCL does not have are exchanged and computed on the device. A wait
only orders the stream, as torch's does. A thread polls the device to learn that a collective has finished, so nothing
is synchronized. With torch's blocking wait (TORCH_NCCL_BLOCKING_WAIT=1) a timeout is raised where the program waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import ringway._core as _core
from ringway.backends.base import GroupInfo, Health
from ringway.backends.compose import reduced, reduced_share
from ringway.backends.nccl.fast_path import NcclFastPath
from ringway.backends.nccl.handles import NcclHandle, Works, communicator_of, cuda_device
from ringway.backends.torch.backend import TorchBackend
from ringway.backends.torch.handles import mapped
from ringway.call import Call, Reduce
from ringway.errors import RingwayError
from ringway.work import DONE, Handle

_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_REDUCED = _FLOATS | {torch.int8, torch.uint8, torch.int32, torch.int64}
_MOVED = _REDUCED | {torch.bool}
_BITWISE = frozenset({Reduce.BAND, Reduce.BOR, Reduce.BXOR})
_LEAVE_SECONDS = 10.0


class NcclBackend(TorchBackend):
    """One group on torch's ProcessGroupNCCL."""

    name = "nccl"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(
        self, info: GroupInfo, group: Any, destroyed: Callable[[], bool] = lambda: False, ours: bool = False
    ) -> None:
        """`destroyed` says whether torch has ended the group without us; it never ends one of `ours`."""
        super().__init__(info, group)
        self._works = Works(info.process)
        self._closed = False
        self._fast_path: NcclFastPath | None = None
        self._limit: float | None = None
        self._destroyed = destroyed
        self._ours = ours

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        if reduce in _BITWISE:
            return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        if reduce is Reduce.AVG:
            return dtype in _FLOATS
        # NCCL's own PREMUL_SUM does not scale bfloat16 in a group of one, so inputs are multiplied here.
        return dtype in _REDUCED and reduce is not Reduce.PREMUL_SUM

    def can_move(self, dtype: torch.dtype) -> bool:
        return dtype in _MOVED

    def fast_paths(self, record: _core.GroupRecord, health: Health) -> Sequence[_core.FastPath]:
        summed = [dtype for dtype in _REDUCED if self.can_reduce(dtype, Reduce.SUM)]
        self._fast_path = NcclFastPath(
            self.group, self._works, self._group, record, health, summed, _MOVED, self._limit
        )
        return (self._fast_path,)

    def set_timeout(self, seconds: float) -> None:
        self._limit = seconds
        if self._fast_path is not None:
            self._fast_path.set_timeout(seconds)

    def _start(self, call: Call, method: Callable[..., Any], *arguments: Any) -> Handle:
        try:
            work = method(*arguments)
        except RuntimeError as error:
            raise mapped(error, call, 0.0) from error
        captured = cuda_device(call) is not None and torch.cuda.is_current_stream_capturing()
        # A call captured into a graph cannot be queried.
        number = -1 if captured else self._works.issued(communicator_of(call), work)
        return NcclHandle(work, call, self._works, number, captured)

    # NCCL has no bitwise reductions: data is exchanged and reduced here, all of it on the current stream.

    def _exchange(self, call: Call) -> Callable[[Tensor, Tensor], None]:
        plain = replace(call, input_splits=None, output_splits=None)

        def exchange(source: Tensor, target: Tensor) -> None:
            super(NcclBackend, self).all_to_all_single(
                replace(plain, inputs=[_bytes(source)], outputs=[_bytes(target)])
            ).wait()

        return exchange

    def _reduced(self, call: Call) -> Tensor:
        def gather(share: Tensor, whole: Tensor) -> None:
            super(NcclBackend, self).all_gather_into_tensor(
                replace(call, inputs=[_bytes(share)], outputs=[_bytes(whole)])
            ).wait()

        return reduced(call, self._exchange(call), gather)

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
        call.outputs[0].copy_(reduced_share(call, self._exchange(call)).view(call.outputs[0].shape))
        return DONE

    # The end

    def close(self) -> None:
        """torch's shutdown waits for calls in flight, forever if a rank is gone. So calls that do not finish in time
        are aborted."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _LEAVE_SECONDS
        while not self._works.all_ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self._works.all_ended():
            self._abort_group()
        elif self._ours:  # without a shutdown its destructor would complain
            with suppress(RuntimeError):
                self._group.shutdown()

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._abort_group()

    def _abort_group(self) -> None:
        if self._destroyed():  # by torch: NCCL would free the communicator twice
            return
        if not self._works.all_ended():
            self._works.aborted_with = RingwayError("the group was aborted")
        with suppress(RuntimeError):  # a group that never connected has nothing to abort
            self._group.abort()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
