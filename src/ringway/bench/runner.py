"""Times candidates against each other: warm-up, alternating turns, the slowest rank, medians with intervals.

A sample is the time of several calls in a row, divided by their number. If calls are short, one untimed call comes
first, so that the ranks start closer together than the control group can align them. In each round, every candidate
gives one sample. The order changes from round to round, so that each candidate follows each other one equally often. A
round's time is that of the slowest rank. The result is the median over rounds, with an interval from order statistics:
it needs no assumption about the distribution of times, and outliers move it little.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Candidate:
    """Something to time. All ranks list the same candidates in the same order.

    `prepare` runs before each sample and is not timed. `finish` completes calls that have only been started (on an
    asynchronous device) and is timed. `verify` raises if a call on fresh buffers gives a wrong result.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None
    finish: Callable[[], object] | None = None
    verify: Callable[[], object] | None = None


@dataclass(frozen=True)
class Estimate:
    """A median, and the interval that contains the true one with probability `CONFIDENCE`."""

    median: float
    low: float
    high: float
    count: int

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.median * factor, self.low * factor, self.high * factor, self.count)


@dataclass(frozen=True)
class Measured:
    """Seconds per call of one candidate: one sample per round, each from the slowest rank."""

    name: str
    samples: Sequence[float]
    calls_per_sample: int
    verified: bool

    @property
    def seconds(self) -> Estimate:
        return median_interval(self.samples)


class Ranks:
    """Synchronizes the ranks for the runner, over a control group that is not being measured.

    `group` is a torch group for CPU tensors (gloo will do), or None for a single process.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def align(self) -> None:
        """Make all ranks start together."""
        if self._group is not None:
            c10d.barrier(group=self._group)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over all ranks."""
        greatest = torch.tensor(values, dtype=torch.float64)
        if self._group is not None:
            c10d.all_reduce(greatest, c10d.ReduceOp.MAX, group=self._group)
        return [float(value) for value in greatest]


def measure(
    candidates: Sequence[Candidate],
    ranks: Ranks | None = None,
    *,
    rounds: int = 41,
    warmup_rounds: int = 3,
    sample_seconds: float = 0.002,
    most_calls: int = 1000,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> list[Measured]:
    """Time the candidates in turns. Every rank calls this and gets the same result.

    Candidates that only compute and never wait can be timed with `time.thread_time_ns`, which does not count time
    during which another program has the core.
    """
    together = ranks or Ranks()
    verified = [_verified(candidate) for candidate in candidates]
    take = partial(_sample, ranks=together, clock_ns=clock_ns)
    calls = [_calls_per_sample(candidate, take, together, sample_seconds, most_calls) for candidate in candidates]
    times: list[list[float]] = [[] for _ in candidates]
    with _no_garbage_collection():
        for number in range(-warmup_rounds, rounds):
            for place in _turn(len(candidates), number):
                seconds = take(candidates[place], calls[place])
                if number >= 0:
                    times[place].append(seconds)
    slowest = [together.slowest(samples) for samples in times]
    return [
        Measured(candidate.name, samples, count, checked)
        for candidate, samples, count, checked in zip(candidates, slowest, calls, verified, strict=True)
    ]


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The median, and the narrowest pair of order statistics around it that has the confidence.

    The number of n samples below the true median is binomial(n, 1/2), whatever the distribution. If there are too few
    samples for the confidence, the interval is their whole range.
    """
    if not samples:
        raise ValueError("an estimate needs at least one sample")
    ordered = sorted(samples)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    below, outside = 0, 0.5**count
    # Drop order statistics from both ends while the probability outside stays within the limit.
    while below + 1 <= (count - 1) // 2:
        more = outside + math.comb(count, below + 1) * 0.5**count
        if 2 * more > 1 - confidence:
            break
        below, outside = below + 1, more
    return Estimate(middle, ordered[below], ordered[count - 1 - below], count)


def paired_ratio(measured: Measured, baseline: Measured) -> Estimate:
    """The time of a call relative to the baseline's, from the ratios of the two samples of each round."""
    return median_interval([a / b for a, b in zip(measured.samples, baseline.samples, strict=True)])


def _verified(candidate: Candidate) -> bool:
    if candidate.verify is None:
        return False
    candidate.verify()
    return True


def _calls_per_sample(
    candidate: Candidate, take: Callable[[Candidate, int], float], ranks: Ranks, seconds: float, most: int
) -> int:
    """The number of calls that makes a sample last about `seconds`, the same on every rank. The first calls of a sample
    may take longer than the others, so the number grows until the samples are that long."""
    calls = 2
    while True:
        trials = [take(candidate, calls) for _ in range(3)]
        (longest,) = ranks.slowest([min(trials)])
        wanted = max(1, min(most, round(seconds / longest)))
        if wanted <= 2 * calls:
            return wanted
        calls = min(wanted, 10 * calls)


def _sample(candidate: Candidate, calls: int, ranks: Ranks, clock_ns: Callable[[], int]) -> float:
    if candidate.prepare is not None:
        candidate.prepare()
    run = candidate.run
    ranks.align()
    if calls > 1:
        run()
    begun = clock_ns()
    for _ in range(calls):
        run()
    if candidate.finish is not None:
        candidate.finish()
    return max(1, clock_ns() - begun) / calls / 1e9


def _turn(count: int, number: int) -> list[int]:
    """The order of a round. Over `count` rounds (twice that if it is odd), each candidate takes each position, and
    follows each other candidate, equally often (a Williams design)."""
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(count)]
    order = [(place + number) % count for place in zigzag]
    return order[::-1] if number // count % 2 else order


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
