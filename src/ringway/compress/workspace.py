"""Memory for frames, reused from call to call, so that a training step allocates nothing; and copies to the host."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

KEPT = 8
"""Buffers kept per pool, more than a call has in flight at once. Beyond that, the smallest are freed."""


class BufferPool:
    """Buffers of one device and stream. They may be reused as soon as their last use is enqueued there. Thread-safe:
    a synchronous call and the thread of the asynchronous ones share the CPU's pool.

    Frames of any shape use the smallest idle buffer that holds them, so windows and tensors of different lengths share
    the same memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, rows: int, nbytes: int) -> Tensor:
        """Uninitialized frames, [rows, nbytes]."""
        buffer = self._taken(rows * nbytes)
        if buffer is None:
            buffer = torch.empty(rows * nbytes, dtype=torch.uint8, device=self._device)
        return buffer[: rows * nbytes].view(rows, nbytes)

    def _taken(self, nbytes: int) -> Tensor | None:
        """The smallest idle buffer of at least `nbytes`. If all are too small, the new one replaces the largest."""
        with self._lock:
            for index, buffer in enumerate(self._idle):
                if buffer.numel() >= nbytes:
                    return self._idle.pop(index)
            del self._idle[-1:]
        return None

    def give_back(self, frames: Tensor) -> None:
        """Return frames that are needed only by work already enqueued."""
        whole = frames.new_empty(0).set_(frames.untyped_storage())
        with self._lock:
            self._idle.append(whole)
            self._idle.sort(key=Tensor.numel)
            del self._idle[:-KEPT]


class Workspace:
    """The buffer pools of all devices and streams in use."""

    def __init__(self) -> None:
        self._pools: dict[tuple[torch.device, int], BufferPool] = {}

    def pool(self, device: torch.device) -> BufferPool:
        """The pool of the current stream."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        found = self._pools.get((device, stream))
        return self._pools.setdefault((device, stream), BufferPool(device)) if found is None else found

    def clear(self) -> None:
        """Free the idle buffers."""
        self._pools.clear()


class HostCopy:
    """A small tensor, to be read later. On a GPU it is copied to the host asynchronously: reading it waits for the work
    enqueued before the copy, not for later work."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
