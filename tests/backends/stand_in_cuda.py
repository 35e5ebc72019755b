"""`shm` for CUDA tensors on a stand-in for the driver (cuda_ipc_stand_in.cpp): the tensors are the CPU's, and streams
are threads. It tests the protocol between ranks on hosts without a GPU."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

import ringway
import ringway._core as _core
from ringway.backends import registry
from ringway.backends.compose import reduce_rows
from ringway.backends.shm.cuda import ShmCudaBackend
from ringway.backends.shm.cuda_device import Cuda, Reduction, reduces_as
from ringway.call import DTYPES, Call, Op, Reduce
from ringway.work import Handle

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_uint64))


def library() -> Any:
    loaded = ctypes.CDLL(os.environ["RINGWAY_TEST_CUDA"])
    loaded.stand_in_launch.argtypes = [ctypes.c_void_p, KERNEL, ctypes.c_uint64]
    loaded.stand_in_wait_event.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    for name in ("cuEventRecord", "cuEventQuery"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p] * (2 if name == "cuEventRecord" else 1)
    loaded.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    loaded.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    return loaded


def in_device_memory(count: int, dtype: torch.dtype) -> Tensor:
    """A tensor in memory of the stand-in, which can be shared with other ranks."""
    address = ctypes.c_uint64()
    size = max(count * dtype.itemsize, 1)
    assert library().cuMemAlloc_v2(ctypes.byref(address), size) == 0
    return _at(address.value, count, dtype)


def _at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Event:
    def __init__(self, loaded: Any) -> None:
        self._library = loaded
        self.handle = ctypes.c_void_p()
        loaded.cuEventCreate(ctypes.byref(self.handle), 0)

    def query(self) -> bool:
        return bool(self._library.cuEventQuery(self.handle) == 0)


class StandInCuda(Cuda):
    def __init__(self) -> None:
        super().__init__()
        self.library = os.environ["RINGWAY_TEST_CUDA"]
        self._loaded = library()
        self._kernels: list[Any] = []
        self.stream = 7
        """The current one."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Has the current stream run a function."""
        self._kernels.append(KERNEL(lambda _: work()))
        self._loaded.stand_in_launch(self.stream, self._kernels[-1], 0)

    kind = _core.CPU

    def lacks(self) -> str | None:
        return None

    def stream_of(self, index: int) -> int:
        return self.stream

    def kernel_of(
        self, index: int, dtype_code: int, copies: bool, ins: int, outs: int, aligned: bool, large: bool
    ) -> tuple[int, int, int, int] | None:
        dtype = DTYPES[dtype_code]
        if reduces_as(dtype, Reduce.SUM) is None:
            return None

        def kernel(arguments: Any) -> None:
            count = arguments[16]
            if copies:
                for i in range(ins):
                    _at(arguments[8 + i], count, dtype).copy_(_at(arguments[i], count, dtype))
                return
            total = reduce_rows([_at(arguments[i], count, dtype) for i in range(ins)], Reduce.SUM)
            for i in range(outs):
                _at(arguments[8 + i], count, dtype).copy_(total)

        self._kernels.append(LAUNCHED(kernel))
        return ctypes.cast(self._kernels[-1], ctypes.c_void_p).value or 0, 1, 0, 1 << 40

    def index(self, tensor: Tensor) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def current(self, tensor: Tensor) -> int:
        return self.stream

    def side(self, tensor: Tensor) -> int:
        return 8  # one for all groups: torch's pool of streams may give several groups the same one

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def raw(self, stream: Any) -> int:
        return int(stream)

    def mark(self, stream: Any) -> Event:
        event = Event(self._loaded)
        self._loaded.cuEventRecord(event.handle, stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        self._loaded.stand_in_wait_event(stream, event.handle)

    def step(self, event: Any, work: Callable[[], None]) -> None:
        while not event.query():
            time.sleep(0.0001)
        super().step(event, work)

    def order(self, tensor: Tensor, event: Any) -> None:
        while not event.query():
            time.sleep(0.0001)

    def reduce(self, stream: Any, ins: list[int], outs: list[int], count: int, how: Reduction) -> None:
        if count == 0:
            return
        dtype, kind = how

        def kernel(_: int) -> None:
            total = reduce_rows([_at(address, count, dtype) for address in ins], kind)
            for address in outs:
                _at(address, count, dtype).copy_(total)

        self._kernels.append(KERNEL(kernel))
        self._loaded.stand_in_launch(stream, self._kernels[-1], 0)

    def on_host(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def download(self, pairs: Iterable[tuple[Tensor, Tensor]], near: Tensor) -> None:
        for host, tensor in pairs:
            host.copy_(tensor)

    def upload(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for tensor, host in pairs:
            tensor.copy_(host)

    def aside(self, near: Tensor, work: Callable[[], None]) -> None:
        work()
        self.order(near, self.mark(self.current(near)))


class StandInBackend(ShmCudaBackend):
    """Everything that can be direct is."""

    name = "shm_stand_in"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    make_device = StandInCuda

    def direct_from(self, op: Op) -> int:
        return 0

    def _receive(self, call: Call, near: Tensor) -> Handle:
        """Waits for the device, as a stream would."""
        handle = super()._receive(call, near)
        if not call.async_op:
            self.device.order(near, self.device.mark(self.device.current(near)))
        return handle

    def fast_paths(self, record: Any, health: Any) -> Sequence[Any]:
        """None by default: a call on the fast path returns before the stand-in's device is done, and the CPU does not
        wait for that as a stream would. Tests use `_path`, and wait for the device."""
        super().fast_paths(record, health)
        return ()


if registry.own(StandInBackend.name) is None:
    ringway.register_backend(StandInBackend.name, StandInBackend)
