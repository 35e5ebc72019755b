"""What low-communication training sent, and how long it waited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Report:
    """Totals of one rank since the first step."""

    steps: int = 0
    exchanges: int = 0
    sent_bytes: int = 0
    """Bytes that this rank sent to other sites."""
    ddp_bytes: int = 0
    """Bytes that it would have sent if every step had averaged its gradients in fp32 (with a ring all-reduce)."""
    waited: float = 0.0
    """Seconds in which this rank waited for other sites, encoding and decoding included."""
    _began: float | None = None

    @property
    def times_fewer(self) -> float:
        """How many times fewer bytes this is than DDP in fp32 sends."""
        return self.ddp_bytes / self.sent_bytes if self.sent_bytes else float("inf")

    @property
    def elapsed(self) -> float:
        return 0.0 if self._began is None else time.perf_counter() - self._began

    @property
    def utilization(self) -> float:
        """The share of the time since the first step in which this rank did not wait for other sites."""
        return 1 - self.waited / self.elapsed if self.elapsed else 1.0

    def begin(self) -> None:
        if self._began is None:
            self._began = time.perf_counter()

    @contextmanager
    def waiting(self, device: torch.device | None = None) -> Iterator[None]:
        """Count the time of this block. What a GPU was given to do before is not part of it: it is finished first."""
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - began

    def __str__(self) -> str:
        return (
            f"low communication: {self.steps} steps, {self.exchanges} exchanges, {self.sent_bytes / 1e6:.3f} MB sent "
            f"({self.times_fewer:.0f} times fewer than DDP in fp32), utilization {self.utilization:.3f}"
        )
