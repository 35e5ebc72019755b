"""`codec="auto"`: compress only where it helps.

On first use, the group times a small and a large all-reduce, plain and compressed. Both times grow almost linearly
with the size, so two points each predict any size. All ranks take the slowest rank's times, and so make the same
decision. Rank 0 of the group logs it in one line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.compress.codecs.codec import Codec
from ringway.groups.communicator import Communicator

SMALL_BYTES = 1 << 14
LARGE_BYTES = 1 << 22
REPEATS = 3
MARGIN = 0.9
"""Compressed must take less than this share of the plain time: a tie is not worth the lost precision."""

logger = logging.getLogger("ringway.compress")


@dataclass(frozen=True)
class Line:
    """A linear model of seconds over bytes."""

    start: float
    slope: float

    @classmethod
    def through(cls, small: float, large: float) -> Line:
        """The line through the times of `SMALL_BYTES` and `LARGE_BYTES`."""
        slope = max(0.0, (large - small) / (LARGE_BYTES - SMALL_BYTES))
        return cls(max(0.0, small - slope * SMALL_BYTES), slope)

    def at(self, nbytes: int) -> float:
        return self.start + self.slope * nbytes


@dataclass(frozen=True)
class Forecast:
    """Predicts how long an all-reduce over this group takes, plain and compressed."""

    plain_line: Line
    compressed_line: Line

    def plain(self, nbytes: int) -> float:
        return self.plain_line.at(nbytes)

    def compressed(self, nbytes: int) -> float:
        return self.compressed_line.at(nbytes)

    def helps(self, nbytes: int) -> bool:
        return self.compressed(nbytes) < MARGIN * self.plain(nbytes)

    @property
    def threshold(self) -> int | None:
        """The smallest size in bytes at which compression helps: 0 for always, None for never."""
        if self.helps(0):
            return 0
        gain = MARGIN * self.plain_line.slope - self.compressed_line.slope
        if gain <= 0:
            return None
        return int((self.compressed_line.start - MARGIN * self.plain_line.start) / gain) + 1

    def describe(self, codec: Codec, communicator: Communicator) -> str:
        """The decision in one line."""
        threshold = self.threshold
        if threshold is None:
            decision = "stays off: it would not be faster at any size"
        elif threshold == 0:
            decision = "is used at every size"
        else:
            decision = f"is used from {threshold / 1e6:.2f} MB on"
        size = 64 << 20
        return (
            f"compression {codec.spec} over group {communicator.name} ({communicator.size} ranks) {decision}; "
            f"64 MiB take {self.plain(size) * 1e3:.1f} ms plain, {self.compressed(size) * 1e3:.1f} ms compressed"
        )


def measured_forecast(
    communicator: Communicator, codec: Codec, device: torch.device, compressed: Callable[[Tensor], object]
) -> Forecast:
    """Time the group's link and the codec. Collective: every rank gets the same forecast."""

    def plain(trial: Tensor) -> None:
        communicator.all_reduce(trial, c10d.ReduceOp.AVG)

    times = [best_times(communicator, (plain, compressed), nbytes, device) for nbytes in (SMALL_BYTES, LARGE_BYTES)]
    agreed = torch.tensor(times, dtype=torch.float64, device=device)
    communicator.all_reduce(agreed, c10d.ReduceOp.MAX)
    (plain_small, small), (plain_large, large) = agreed.tolist()
    forecast = Forecast(Line.through(plain_small, plain_large), Line.through(small, large))
    if communicator.rank == 0:
        logger.warning("%s", forecast.describe(codec, communicator))
    return forecast


def best_times(
    communicator: Communicator, steps: Sequence[Callable[[Tensor], object]], nbytes: int, device: torch.device
) -> list[float]:
    """The best of a few times of each step, since interference only ever adds time. The steps alternate, so that a
    longer disturbance affects all of them."""
    trial = torch.randn(nbytes // 4, device=device)
    best = [float("inf")] * len(steps)
    for _ in range(1 + REPEATS):
        for number, step in enumerate(steps):
            communicator.barrier()
            _synchronize(device)
            began = time.perf_counter()
            step(trial)
            _synchronize(device)
            best[number] = min(best[number], time.perf_counter() - began)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
