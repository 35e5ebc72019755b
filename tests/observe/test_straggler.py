"""Which ranks others wait for: a deliberate straggler, uneven records, sub-groups."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stdout
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from ringway.observe.log import straggler
from ringway.observe.log.straggler import compare
from ringway.observe.trace import clock
from ringway.testing import RankContext, RankPool

DELAY = 0.2


def with_a_straggler(context: RankContext, backend: str) -> Any:
    dist = context.start(backend)
    dist.configure(enabled=True, prof_all=True, debug=False, verbose=False)
    pair = dist.new_group([0, 1])
    dist.barrier()
    dist.reset_log()
    for number in range(8):
        if context.rank == 2:
            context.store.wait([f"in {number}.0", f"in {number}.1"])
            time.sleep(DELAY)
            dist.all_reduce(torch.ones(256))
            continue
        work = dist.all_reduce(torch.ones(256), async_op=True)
        if number < 3:
            # A call that rank 2 does not make. Made here: however long one waits for the other, both wait longer
            # for rank 2.
            dist.all_reduce(torch.ones(4), group=pair)
        context.store.set(f"in {number}.{context.rank}", "")
        work.wait()
    printed = io.StringIO()
    with redirect_stdout(printed):
        result = dist.log_summary(show_straggler=True, return_dict=True)
    return result, printed.getvalue()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_deliberate_straggler_is_ranked_first(pool: RankPool, backend: str) -> None:
    results = pool.run(with_a_straggler, backend, world_size=3)
    for result, _ in results:
        first = result["straggler_ranking"][0]
        assert first["rank"] == 2
        assert (first["last"], first["calls"]) == (8, 8)
        assert first["mean_ms"] >= 0.99 * DELAY * 1e3
        assert __file__ in first["site"]
        assert result["straggler_analysis"]["all_reduce"][1024]["count"] == 8
    printed = results[0][1]
    assert "Breakdown with straggler effect" in printed
    assert "Ranks that others waited for, over 11 calls" in printed
    ranking = printed[printed.index("Rank  Came last") :].splitlines()
    assert ranking[1].split()[0] == "2"
    assert results[1][1] == ""


def one_report_more(context: RankContext) -> list[bool]:
    """Rank 0 asks for a report that rank 1 does not ask for. Returns whether each of its reports has a note."""
    dist = context.start("gloo", timeout=timedelta(seconds=6))  # a rank waits half of it for the others
    dist.all_reduce(torch.ones(4))
    notes = [bool(straggler.analyse().note)] if context.rank == 0 else []
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    return notes


def test_a_report_that_one_rank_misses_does_not_end_the_group(pool: RankPool) -> None:
    assert pool.run(one_report_more, world_size=2, timeout=60) == [[True], []]


def test_uneven_records_and_clocks_are_tolerated() -> None:
    def row(group: str, number: int, came: int, size: int = 3) -> Any:
        return (group, number, 1, 100, came, came + 10, ("a.py", number, "f"), "", size)

    arrivals = {
        0: [row("w", n, 1000 * n) for n in range(5)],
        1: [row("w", n, 1000 * n + 5_000_050) for n in range(3)],  # lost the last two, and its clock is ahead
        2: [row("other", 0, 77)],  # no other rank made this call
    }
    analysis = compare(arrivals, {1: -5_000_000}, rank=0)
    assert analysis.compared == 3
    assert [(late.rank, late.last, late.waited_ns) for late in analysis.ranking] == [(1, 3, 150), (0, 0, 0), (2, 0, 0)]
    assert analysis.ranking[0].worst.startswith("all_reduce #0 (group w) at a.py:0")
    assert analysis.breakdown["all_reduce"][100].count == 3


def test_a_latency_is_split_into_the_minimum_of_all_ranks_and_the_rest() -> None:
    def row(number: int, came: int, ended: int) -> Any:
        return ("w", number, 1, 100, came, ended, ("a.py", 1, "f"), "", 3)

    delay, took = 200_000_000, 1_000_000
    arrivals = {rank: [row(n, n * 10**9, n * 10**9 + delay + took) for n in range(8)] for rank in (0, 1)}
    arrivals[2] = [row(n, n * 10**9 + delay, n * 10**9 + delay + took) for n in range(8)]
    for rank in range(3):
        analysis = compare(arrivals, {}, rank)
        [late, *others] = analysis.ranking_dict()
        assert (late["rank"], late["last"], late["calls"]) == (2, 8, 8)
        assert (late["waited_ms"], late["mean_ms"], late["worst_ms"]) == (1600, 200, 200)
        assert [other["last"] for other in others] == [0, 0]
        parts = analysis.breakdown_dict()["all_reduce"][100]
        assert (parts["count"], parts["total_comm_lat_ms"], parts["avg_comm_lat_ms"]) == (8, 8, 1)
        # The straggler itself never waits.
        assert (parts["total_straggler_ms"], parts["avg_straggler_ms"]) == ((0, 0) if rank == 2 else (1600, 200))


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
