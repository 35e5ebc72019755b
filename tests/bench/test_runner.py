"""The runner: intervals that cover, fair turns, ranks that agree."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from statistics import median

import pytest
import torch

from ringway.bench import CASES, Candidate, Measured, Place, Ranks, measure, median_interval, paired_ratio
from ringway.testing import RankContext, RankPool


def test_interval_of_known_samples() -> None:
    # For ten samples the 95 % interval of the median is from the second to the ninth (binomial tables).
    estimate = median_interval([float(value) for value in range(1, 11)])
    assert (estimate.median, estimate.low, estimate.high, estimate.count) == (5.5, 2.0, 9.0, 10)
    # For forty-one it is from the fourteenth to the twenty-eighth.
    estimate = median_interval([float(value) for value in range(1, 42)])
    assert (estimate.median, estimate.low, estimate.high) == (21.0, 14.0, 28.0)


def test_too_few_samples_give_their_range() -> None:
    assert (median_interval([3.0]).low, median_interval([3.0]).high) == (3.0, 3.0)
    estimate = median_interval([4.0, 1.0, 2.0])
    assert (estimate.median, estimate.low, estimate.high) == (2.0, 1.0, 4.0)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        median_interval([])


def test_intervals_cover_the_true_median_as_often_as_they_say() -> None:
    chance = random.Random(1)
    covered = 0
    for _ in range(1000):
        estimate = median_interval([chance.expovariate(1.0) for _ in range(31)])
        covered += estimate.low <= 0.6931471805599453 <= estimate.high
    assert 935 <= covered <= 995


def test_an_outlier_does_not_move_the_median() -> None:
    samples = [1.0 + place / 1000 for place in range(41)]
    spoiled = [*samples[:-1], 1e6]
    assert median_interval(spoiled) == median_interval(samples)


def test_ratio_pairs_the_samples_of_a_round() -> None:
    drift = [1.0 + place / 10 for place in range(21)]
    baseline = Measured("baseline", drift, 1, True)
    twice = Measured("twice", [2 * value for value in drift], 1, True)
    ratio = paired_ratio(twice, baseline)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_candidates_take_turns_and_each_begins_as_often() -> None:
    events: list[str] = []
    candidates = [Candidate(name, run=lambda: None, prepare=lambda name=name: events.append(name)) for name in "abc"]
    measure(candidates, rounds=12, warmup_rounds=0)
    rounds = [events[place : place + 3] for place in range(len(events) - 36, len(events), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert sorted(order[0] for order in rounds) == sorted("abc" * 4)


def test_times_are_of_the_call_and_not_of_its_preparation() -> None:
    slow = Candidate("slow", run=lambda: time.sleep(0.005))
    quick = Candidate("quick", run=lambda: None, prepare=lambda: time.sleep(0.005))
    first, second = measure([slow, quick], rounds=7, warmup_rounds=1)
    assert first.seconds.low >= 0.005
    assert second.seconds.median < 0.001
    assert first.calls_per_sample == 1
    assert second.calls_per_sample > 1


def test_the_clock_may_be_the_threads_own() -> None:
    sleeper = Candidate("sleeper", run=lambda: time.sleep(0.01))
    (measured,) = measure([sleeper], rounds=5, warmup_rounds=0, clock_ns=time.thread_time_ns, most_calls=3)
    assert measured.seconds.median < 0.005


def test_finish_is_timed() -> None:
    (measured,) = measure(
        [Candidate("asynchronous", run=lambda: None, finish=lambda: time.sleep(0.004))],
        rounds=5,
        sample_seconds=1e-9,
    )
    assert measured.seconds.low >= 0.004


def test_a_wrong_result_stops_the_measurement() -> None:
    def wrong() -> None:
        raise AssertionError("nonsense")

    with pytest.raises(AssertionError, match="nonsense"):
        measure([Candidate("broken", run=lambda: None, verify=wrong)])


def uneven(context: RankContext) -> list[float]:
    dist = context.start("gloo", module="torch.distributed")
    pause = 0.002 * (context.rank + 1)
    candidate = Candidate("uneven", run=lambda: time.sleep(pause))
    (measured,) = measure([candidate], Ranks(dist.group.WORLD), rounds=5, warmup_rounds=1)
    return list(measured.samples)


def test_the_slowest_rank_counts_and_all_ranks_agree(pool: RankPool) -> None:
    first, second = pool.run(uneven, world_size=2)
    assert first == second
    assert median(first) >= 0.004


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde"])
def test_each_candidate_follows_each_other_one_equally_often(names: str) -> None:
    events: list[str] = []
    candidates = [Candidate(name, run=lambda: None, prepare=lambda name=name: events.append(name)) for name in names]
    rounds = 2 * len(names)
    measure(candidates, rounds=rounds, warmup_rounds=0)
    timed = events[-rounds * len(names) :]
    orders = [timed[place : place + len(names)] for place in range(0, len(timed), len(names))]
    pairs = [pair for order in orders for pair in pairwise(order)]
    assert {pairs.count((a, b)) for a in names for b in names if a != b} == {2}


def test_a_short_call_is_made_once_before_the_clock_starts() -> None:
    """What only the first call of a sample costs (synchronization, caches) is not spread over the others."""
    calls: list[float] = []

    def run() -> None:
        calls.append(time.perf_counter())
        if after_preparation.pop():
            time.sleep(0.02)
        after_preparation.append(False)

    after_preparation = [False]
    candidate = Candidate("warming", run=run, prepare=lambda: after_preparation.__setitem__(0, True))
    (measured,) = measure([candidate], rounds=5, warmup_rounds=0)
    assert measured.calls_per_sample > 10
    assert measured.seconds.median < 0.001


def test_the_first_calls_of_a_sample_do_not_make_it_short() -> None:
    """After other candidates had their turn, caches are cold. Many calls must follow, or these few decide."""
    now = calls = 0

    def clock() -> int:
        return now

    def prepare() -> None:
        nonlocal calls
        calls = 0

    def run() -> None:
        nonlocal now, calls
        calls += 1
        now += 50_000 if calls <= 5 else 1_000

    (measured,) = measure([Candidate("cold", run, prepare)], rounds=3, sample_seconds=0.002, clock_ns=clock)
    assert measured.calls_per_sample == 1000
    assert measured.seconds.median == pytest.approx(1.2e-6, rel=0.01)


def test_candidates_may_share_their_memory() -> None:
    place = Place(0, 1, 64)
    case = CASES["all_reduce"]
    buffers = case.buffers(place)
    seen: list[int] = []

    class Module:
        @staticmethod
        def all_reduce(tensor: torch.Tensor, group: object = None) -> None:
            seen.append(tensor.data_ptr())

    measure([case.candidate(name, Module, place, buffers=buffers) for name in "ab"], rounds=3)
    assert len(set(seen)) == 1
