"""Memory for frames, kept from one call to the next, so that a step of training allocates nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.compress.windows import HEADER_BYTES

KEPT = 8
"""More buffers than a call has in flight at once; of what comes back beyond that the smallest are freed."""


class Shelf:
    """Buffers of one place and stream: they may be reused as soon as their last use is enqueued there.

    Frames of any shape lie in the smallest idle buffer that holds them, so that windows and tensors of different
    lengths share the same memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[Tensor] = []

    def take(self, rows: int, nbytes: int) -> Tensor:
        """Frames of unknown content, [rows, nbytes]."""
        idle = self._idle
        for index, buffer in enumerate(idle):
            if buffer.numel() >= rows * nbytes:
                del idle[index]
                break
        else:
            if idle:
                del idle[-1]  # too small, as all are: what is allocated now takes its place
            buffer = torch.empty(rows * nbytes, dtype=torch.uint8, device=self._device)
        return buffer[: rows * nbytes].view(rows, nbytes)

    def take_clean(self, rows: int, nbytes: int) -> Tensor:
        """Frames whose headers are zeros."""
        frames = self.take(rows, nbytes)
        frames[:, :HEADER_BYTES].zero_()
        return frames

    def give_back(self, frames: Tensor) -> None:
        """These frames are not needed any more, by anything that is not yet enqueued."""
        whole = frames.new_empty(0).set_(frames.untyped_storage())
        self._idle.append(whole)
        self._idle.sort(key=Tensor.numel)
        del self._idle[:-KEPT]


class Workspace:
    """The shelves of all places in use."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[torch.device, int], Shelf] = {}

    def shelf(self, device: torch.device) -> Shelf:
        """That of the current stream."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        found = self._shelves.get((device, stream))
        if found is None:
            found = self._shelves[device, stream] = Shelf(device)
        return found

    def clear(self) -> None:
        """Free what is idle."""
        self._shelves.clear()
