"""A number computed on a device, read by the host as late as possible."""

from __future__ import annotations

import torch
from torch import Tensor


class Verdict:
    """One integer. On a GPU it travels to the host behind the caller's back: reading it waits for what was
    enqueued before it, not for what comes after."""

    def __init__(self, number: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._number = number
        if number.is_cuda:
            self._number = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> int:
        if self._event is not None:
            self._event.synchronize()
        return int(self._number)
