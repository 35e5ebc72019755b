"""codec="auto": one decision for all ranks, from measurements, logged in one line."""

from __future__ import annotations

import pytest
import rank_training

from ringway.compress.auto import LARGE_BYTES, SMALL_BYTES, Forecast, Line
from ringway.testing import RankPool


def line(start: float, bytes_per_second: float) -> Line:
    times = [start + nbytes / bytes_per_second for nbytes in (SMALL_BYTES, LARGE_BYTES)]
    return Line.through(*times)


def test_a_line_through_two_times_predicts_others() -> None:
    assert line(1e-4, 1e9).at(1 << 26) == pytest.approx(1e-4 + (1 << 26) / 1e9, rel=1e-6)
    assert Line.through(1e-3, 1e-4).slope == 0.0, "noise never makes larger messages cheaper"


def test_it_helps_on_a_slow_link_from_some_size_on() -> None:
    forecast = Forecast(plain_line=line(2e-4, 0.12e9), compressed_line=line(1e-3, 3e9))
    assert not forecast.helps(1 << 14)
    assert forecast.helps(1 << 24)
    threshold = forecast.threshold
    assert threshold is not None
    assert forecast.helps(threshold + 1000)
    assert not forecast.helps(threshold - 1000)


def test_it_never_helps_on_a_fast_one() -> None:
    forecast = Forecast(plain_line=line(1e-6, 8e9), compressed_line=line(1e-4, 2e9))
    assert forecast.threshold is None
    assert not forecast.helps(1 << 34)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_all_ranks_decide_alike_and_say_so_once(pool: RankPool, backend: str) -> None:
    reported = []
    for attempt in range(5):  # it depends on measurements, and the machine may be busy
        results = pool.run(rank_training.auto, backend, attempt, world_size=2)
        lines, report = results[0]
        assert len(lines) == 1
        assert "compression onebit:1024" in lines[0]
        assert results[1][0] == []
        assert report["calls"] + report["plain_calls"] == 3
        assert results[1][1]["calls"] == report["calls"]
        if backend != "shm" or report["plain_calls"] == 3:
            return
        reported += lines
    raise AssertionError(f"compressed over shm: {reported}")
