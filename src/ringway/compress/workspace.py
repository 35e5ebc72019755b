"""Memory for frames, kept from one call to the next, so that a step of training allocates nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.compress.layout import HEADER_BYTES

KEPT = 8
"""More buffers than a call has in flight at once; of what comes back beyond that the smallest are freed."""

_Place = tuple[torch.device, int]


class Workspace:
    """Buffers by place and stream: a stream's buffers may be reused as soon as their last use is enqueued.

    Frames of any shape lie in the smallest idle buffer that holds them, so that windows and tensors of different
    lengths share the same memory.
    """

    def __init__(self) -> None:
        self._idle: dict[_Place, list[Tensor]] = {}

    def take(self, rows: int, nbytes: int, device: torch.device) -> Tensor:
        """Frames of unknown content, [rows, nbytes]."""
        idle = self._idle.get(_place(device), [])
        for index, buffer in enumerate(idle):
            if buffer.numel() >= rows * nbytes:
                del idle[index]
                break
        else:
            if idle:
                del idle[-1]  # too small, as all are: what is allocated now takes its place
            buffer = torch.empty(rows * nbytes, dtype=torch.uint8, device=device)
        return buffer[: rows * nbytes].view(rows, nbytes)

    def take_clean(self, rows: int, nbytes: int, device: torch.device) -> Tensor:
        """Frames whose headers are zeros."""
        frames = self.take(rows, nbytes, device)
        frames[:, :HEADER_BYTES].zero_()
        return frames

    def give_back(self, frames: Tensor) -> None:
        """These frames are not needed any more, by anything that is not yet enqueued."""
        whole = frames.new_empty(0).set_(frames.untyped_storage())
        idle = self._idle.setdefault(_place(frames.device), [])
        idle.append(whole)
        idle.sort(key=Tensor.numel)
        del idle[:-KEPT]

    def clear(self) -> None:
        """Free what is idle."""
        self._idle.clear()


def _place(device: torch.device) -> _Place:
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
