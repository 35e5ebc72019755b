"""Frames kept from one call to the next, so that a step of training allocates nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.compress.layout import HEADER_BYTES

KEPT_PER_SHAPE = 8
"""More than a call has in flight at once; what comes back beyond that is freed."""


class Workspace:
    """Frames by shape, place and stream: a stream's frames may be reused as soon as they are enqueued."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, int, torch.device, int], list[Tensor]] = {}

    def take(self, rows: int, nbytes: int, device: torch.device) -> Tensor:
        """Frames of unknown content, [rows, nbytes]."""
        idle = self._idle.get(_key(rows, nbytes, device))
        if idle:
            return idle.pop()
        return torch.empty(rows, nbytes, dtype=torch.uint8, device=device)

    def take_clean(self, rows: int, nbytes: int, device: torch.device) -> Tensor:
        """Frames whose headers are zeros."""
        frames = self.take(rows, nbytes, device)
        frames[:, :HEADER_BYTES].zero_()
        return frames

    def give_back(self, frames: Tensor) -> None:
        """These frames are not needed any more, by anything that is not yet enqueued."""
        idle = self._idle.setdefault(_key(frames.shape[0], frames.shape[1], frames.device), [])
        if len(idle) < KEPT_PER_SHAPE:
            idle.append(frames)

    def clear(self) -> None:
        """Free what is idle."""
        self._idle.clear()


def _key(rows: int, nbytes: int, device: torch.device) -> tuple[int, int, torch.device, int]:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return rows, nbytes, device, stream
