"""deepspeed's timers. Logged ops add their durations to the timer of their name.

Times are the host's. Code that runs on a GPU has to be synchronized by the caller before a timer is stopped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from ringway.api.groups import get_rank, is_initialized

KEPT = 4096
"""How many of its latest intervals a timer keeps for its mean. Of older ones it keeps the sum."""


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without the smallest and the largest `trim_percent` (0.1 is 10 %) of the values."""
    if not 0.0 <= trim_percent <= 1.0:
        raise AssertionError(f"trim_percent={trim_percent} is not between 0 and 1")
    count = len(data)
    cut = round(count * trim_percent)
    kept = sorted(data)[cut : count - cut]
    return sum(kept) / len(kept) if kept else 0.0


class OneTimer:
    """One timer, in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._began = 0.0
        self._intervals: deque[float] = deque(maxlen=KEPT)
        self._older = 0.0

    def start(self) -> None:
        if self.started_:
            raise AssertionError(f"timer {self.name_} has already been started")
        self._began, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Add the interval since `start`. deepspeed accepts the two arguments and ignores them; so does this."""
        if not self.started_:
            raise AssertionError(f"timer {self.name_} is not started")
        self.started_ = False
        self.add((time.perf_counter() - self._began) * 1e3)

    def add(self, milliseconds: float) -> None:
        """Add an interval that was measured elsewhere."""
        if len(self._intervals) == KEPT:
            self._older += self._intervals[0]
        self._intervals.append(milliseconds)

    def reset(self) -> None:
        self.started_ = False
        self._intervals.clear()
        self._older = 0.0

    def elapsed(self, reset: bool = True) -> float:
        """The sum of all intervals. A running timer is counted up to now, and runs on."""
        running = self.started_
        if running:
            self.stop()
        total = self._older + sum(self._intervals)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """The mean interval, without the 10 % at either end."""
        self.elapsed(reset=False)
        return trim_mean(list(self._intervals), 0.1)


class SynchronizedWallClockTimer:
    """Timers by name."""

    Timer = OneTimer

    def __init__(self) -> None:
        self.timers: dict[str, OneTimer] = {}

    def __call__(self, name: str) -> OneTimer:
        return self.timers.setdefault(name, OneTimer(name))

    def get_timers(self) -> dict[str, OneTimer]:
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """What torch has allocated on the current GPU, in GB; zeros without one."""
        on_gpu = torch.cuda.is_available()
        amounts = (
            ("mem_allocated", torch.cuda.memory_allocated() if on_gpu else 0),
            ("max_mem_allocated", torch.cuda.max_memory_allocated() if on_gpu else 0),
            ("cache_allocated", torch.cuda.memory_reserved() if on_gpu else 0),
            ("max_cache_allocated", torch.cuda.max_memory_reserved() if on_gpu else 0),
        )
        return "".join(f" | {name}: {amount / 2**30:.4f} GB" for name, amount in amounts)

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the elapsed times of these timers divided by `normalizer`, on `ranks` (rank 0 by default)."""
        _check_normalizer(normalizer)
        known = [name for name in names if name in self.timers]
        times = "".join(f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known)
        rank = get_rank() if is_initialized() else 0
        if rank in (ranks or [0]) or -1 in (ranks or ()):
            print(f"[Rank {rank}] time (ms){times}{self.memory_usage() if memory_breakdown else ''}", flush=True)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The mean intervals divided by `normalizer`, in microseconds as in deepspeed."""
        _check_normalizer(normalizer)
        return {name: self.timers[name].mean() * 1e3 / normalizer for name in names if name in self.timers}


def _check_normalizer(normalizer: float) -> None:
    if normalizer <= 0:
        raise AssertionError(f"normalizer={normalizer} is not above 0")


timers = SynchronizedWallClockTimer()
