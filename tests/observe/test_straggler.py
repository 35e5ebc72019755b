"""Who is waited for: a deliberate straggler, uneven records, sub-groups."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from ringway.observe import clock
from ringway.observe.straggler import compare
from ringway.testing import RankContext, RankPool

DELAY = 0.2


def with_a_straggler(context: RankContext, backend: str) -> Any:
    dist = context.start(backend)
    dist.configure(enabled=True, prof_all=True, debug=False, verbose=False)
    pair = dist.new_group([0, 1])
    dist.barrier()
    dist.reset_log()
    for _ in range(8):
        if context.rank == 2:
            time.sleep(DELAY)
        dist.all_reduce(torch.ones(256))
    if context.rank < 2:  # calls that rank 2 knows nothing of
        for _ in range(3):
            dist.all_reduce(torch.ones(4), group=pair)
    printed = io.StringIO()
    with redirect_stdout(printed):
        result = dist.log_summary(show_straggler=True, return_dict=True)
    return result, printed.getvalue()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_deliberate_straggler_is_ranked_first(pool: RankPool, backend: str) -> None:
    results = pool.run(with_a_straggler, backend, world_size=3)
    for rank, (result, _) in enumerate(results):
        first = result["straggler_ranking"][0]
        assert first["rank"] == 2
        assert first["last"] >= 7
        assert first["calls"] == 8
        assert DELAY * 1e3 * 0.8 < first["mean_ms"] < DELAY * 1e3 * 10
        assert __file__ in first["site"]
        parts = result["straggler_analysis"]["all_reduce"][1024]
        assert parts["count"] == 8
        if rank == 2:  # it never waits itself
            assert parts["total_straggler_ms"] < 0.5 * 8 * DELAY * 1e3
        else:
            assert parts["total_straggler_ms"] > 0.5 * 8 * DELAY * 1e3
    printed = results[0][1]
    assert "Breakdown with straggler effect" in printed
    assert "Ranks that were waited for, over 11 calls" in printed
    ranking = printed[printed.index("Rank  Came last") :].splitlines()
    assert ranking[1].split()[0] == "2"
    assert results[1][1] == ""


def test_uneven_records_and_clocks_are_tolerated() -> None:
    def row(group: str, number: int, came: int, size: int = 3) -> Any:
        return (group, number, 1, 100, came, came + 10, ("a.py", number, "f"), "", size)

    arrivals = {
        0: [row("w", n, 1000 * n) for n in range(5)],
        1: [row("w", n, 1000 * n + 5_000_050) for n in range(3)],  # lost the last two, and its clock is ahead
        2: [row("other", 0, 77)],  # nobody else was there
    }
    analysis = compare(arrivals, {1: -5_000_000}, rank=0)
    assert analysis.compared == 3
    assert [(late.rank, late.last, late.waited_ns) for late in analysis.ranking] == [(1, 3, 150), (0, 0, 0), (2, 0, 0)]
    assert analysis.ranking[0].worst.startswith("all_reduce #0 (group w) at a.py:0")
    assert analysis.breakdown["all_reduce"][100].count == 3


def clock_offset(context: RankContext) -> int:
    if context.rank == 2:  # a rank of another host, whose clock is an hour ahead
        clock.clock_id = lambda: "another host"
        real = clock._core.monotonic_ns
        clock._core = type("Ahead", (), {"monotonic_ns": staticmethod(lambda: real() + 3_600_000_000_000)})
    store = c10d.PrefixStore("clocks", context.store)
    return clock.offset_from_rank_0(store, context.rank, context.world_size, "test")


def test_the_clock_of_another_host_is_measured_through_the_store(pool: RankPool) -> None:
    offsets = pool.run(clock_offset, world_size=3)
    pool.replace()
    assert offsets[:2] == [0, 0]
    assert offsets[2] == pytest.approx(-3_600_000_000_000, abs=1_000_000_000)
