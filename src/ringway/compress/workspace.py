"""Memory for frames, reused from call to call, so that a training step allocates nothing."""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 8
"""Buffers kept per pool, more than a call has in flight at once. Beyond that, the smallest are freed."""


class BufferPool:
    """Buffers of one device and stream. They may be reused as soon as their last use is enqueued there.

    Frames of any shape use the smallest idle buffer that holds them, so windows and tensors of different lengths share
    the same memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[Tensor] = []

    def take(self, rows: int, nbytes: int) -> Tensor:
        """Uninitialized frames, [rows, nbytes]."""
        idle = self._idle
        for index, buffer in enumerate(idle):
            if buffer.numel() >= rows * nbytes:
                del idle[index]
                break
        else:
            if idle:
                del idle[-1]  # all are too small: the new buffer replaces the largest
            buffer = torch.empty(rows * nbytes, dtype=torch.uint8, device=self._device)
        return buffer[: rows * nbytes].view(rows, nbytes)

    def give_back(self, frames: Tensor) -> None:
        """Return frames that are needed only by work already enqueued."""
        whole = frames.new_empty(0).set_(frames.untyped_storage())
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
        if found is None:
            found = self._pools[device, stream] = BufferPool(device)
        return found

    def clear(self) -> None:
        """Free the idle buffers."""
        self._pools.clear()
