"""What `shm` does on CUDA devices: streams, events, copies and reductions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import ringway._core as _core
from ringway.call import DTYPES, Reduce

Reduction = tuple[torch.dtype, Reduce]

_REALS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_BITWISE = frozenset({Reduce.BAND, Reduce.BOR, Reduce.BXOR})


def reduces_as(dtype: torch.dtype, kind: Reduce) -> tuple[torch.dtype, int] | None:
    """The dtype as which the kernels reduce this one, and how many of those an element has; None if they cannot."""
    if kind is Reduce.PREMUL_SUM:
        return None
    if dtype in _COMPLEX:
        return (_COMPLEX[dtype], 2) if kind in (Reduce.SUM, Reduce.AVG) else None
    if dtype in _REALS:
        return None if kind in _BITWISE else (dtype, 1)
    return (dtype, 1) if dtype in _INTEGERS else None


class Cuda:
    """The CUDA device of one backend. Tests replace it."""

    library = "libcuda.so.1"
    kind = _core.CUDA

    def __init__(self) -> None:
        self._sides: dict[torch.device, Any] = {}

    def lacks(self) -> str | None:
        """Why tensors cannot be reduced on the device, if they cannot."""
        return None if importlib.util.find_spec("triton") else "triton is not installed"

    def index(self, tensor: Tensor) -> int:
        return tensor.device.index

    def stream_of(self, index: int) -> int:
        """The number of the current stream of a device."""
        return torch._C._cuda_getCurrentRawStream(index)

    def kernel_of(
        self, index: int, dtype_code: int, copies: bool, ins: int, outs: int, aligned: bool, large: bool
    ) -> tuple[int, int, int, int] | None:
        """The kernel that sums or copies, as the fast path launches it: function, threads, bytes of shared memory, and
        numbers for each program. None if there is none for the dtype."""
        from ringway.backends.shm.cuda_kernels import BLOCK, compiled

        dtype = DTYPES[dtype_code]
        if reduces_as(dtype, Reduce.SUM) != (dtype, 1):
            return None
        with torch.cuda.device(index):
            kernel = compiled((dtype, None if copies else Reduce.SUM), ins, outs, aligned, large)
            kernel._init_handles()
        return kernel.function, 32 * kernel.metadata.num_warps, kernel.metadata.shared, BLOCK

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def current(self, tensor: Tensor) -> Any:
        return torch.cuda.current_stream(tensor.device)

    def side(self, tensor: Tensor) -> Any:
        """The stream of asynchronous calls."""
        device = tensor.device
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        return self._sides[device]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def raw(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def mark(self, stream: Any) -> Any:
        """An event behind everything on the stream so far."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Everything later on the stream comes after the event."""
        stream.wait_event(event)

    def step(self, event: Any, work: Callable[[], None]) -> None:
        """Enqueues work on the current stream, which has passed the event by then."""
        with torch.inference_mode():
            work()

    def order(self, tensor: Tensor, event: Any) -> None:
        """Everything later that the caller does with the tensor comes after the event."""
        torch.cuda.current_stream(tensor.device).wait_event(event)

    def reduce(self, stream: Any, ins: list[int], outs: list[int], count: int, how: Reduction) -> None:
        """Enqueues the reduction of arrays of `count` elements, in order, into every output."""
        from ringway.backends.shm.cuda_kernels import launch

        with torch.cuda.device(stream.device):
            launch(ins, outs, count, *how, stream)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Host memory for a tensor."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def download(self, pairs: Iterable[tuple[Tensor, Tensor]], near: Tensor) -> None:
        """Copies tensors to the host, and waits until the copies and everything before them on the stream are done.
        Without MPS a copy that waits on the device for other work loses its turn there for 200 µs, so the host waits
        first."""
        stream = torch.cuda.current_stream(near.device)
        stream.synchronize()
        for host, tensor in pairs:
            host.copy_(tensor, non_blocking=True)
        stream.synchronize()

    def upload(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies back, on the current stream."""
        for tensor, host in pairs:
            tensor.copy_(host, non_blocking=True)

    def aside(self, near: Tensor, work: Callable[[], None]) -> None:
        """Enqueues work on the stream of asynchronous calls, from any thread, and waits for it."""
        side = self.side(near)
        with torch.cuda.stream(side):
            work()
        side.synchronize()
