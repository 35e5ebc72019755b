"""The trace and the page made from it: real ranks, and a real browser."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ringway
from browser import Browser, find_chromium
from ringway.errors import UsageError
from ringway.groups.world import world
from ringway.observe.log import straggler
from ringway.observe.report import report
from ringway.testing import RankContext, RankPool

NASTY = "</script><img src=x onerror=alert(1)> & 'loss' \"π\""


def one_comes_late(context: RankContext, dist: Any) -> None:
    """Rank 1 arrives 20 ms after the others, however slow they are."""
    if context.rank == 1:
        context.store.wait(["issued 0", "issued 2"])
        time.sleep(0.02)
        dist.all_reduce(torch.ones(256))
    else:
        work = dist.all_reduce(torch.ones(256), async_op=True)
        context.store.set(f"issued {context.rank}", "")
        work.wait()


def traced(context: RankContext, path: str) -> None:
    dist = context.start("gloo")
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    dist.barrier()
    with dist.trace(path):
        one_comes_late(context, dist)
        for number in range(1, 10):
            if context.rank == 1:
                time.sleep(0.02)
            dist.all_reduce(torch.ones(256 << number % 3), log_name=NASTY if number == 4 else None)
        if context.rank < 2:
            dist.broadcast(torch.ones(8), 0, group=halves[0])
        works = [dist.all_reduce(torch.ones(64), async_op=True) for _ in range(4)]
        for work in works:
            work.wait()
    dist.all_reduce(torch.ones(3))


@pytest.fixture(scope="module")
def trace_file(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    pool.run(traced, str(path), world_size=3)
    return path


def test_all_ranks_are_in_one_file_on_one_clock(trace_file: Path) -> None:
    trace = json.loads(trace_file.read_text())
    calls = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {call["pid"] for call in calls} == {0, 1, 2}
    by_rank = {rank: [call for call in calls if call["pid"] == rank] for rank in range(3)}
    assert [len(by_rank[rank]) for rank in range(3)] == [15, 15, 14]
    first = [next(call for call in by_rank[rank] if call["args"]["op"] == "all_reduce") for rank in range(3)]
    # One call: its ranks overlap in time, and rank 1 came 20 ms after the others.
    assert max(call["ts"] for call in first) < min(call["ts"] + call["dur"] for call in first)
    assert first[1]["ts"] - max(first[0]["ts"], first[2]["ts"]) > 19_000
    assert first[0]["args"]["site"].startswith(__file__)
    assert first[0]["args"]["group_size"] == 3
    assert {call["name"] for call in calls} >= {NASTY, "all_reduce", "broadcast"}
    for rank in range(3):
        for tid in {call["tid"] for call in by_rank[rank]}:
            track = sorted((c for c in by_rank[rank] if c["tid"] == tid), key=lambda c: c["ts"])
            assert all(a["ts"] + a["dur"] <= b["ts"] + 0.001 for a, b in itertools.pairwise(track))
    assert trace["otherData"] == {"made_by": "ringway", "ranks": 3, "dropped": 0}


def limited_and_broken(context: RankContext, path: str) -> Any:
    dist = context.start("gloo")
    with dist.trace(path, limit=5):
        for _ in range(9):
            dist.all_reduce(torch.ones(2))
    try:
        with dist.trace(path + ".second"):
            dist.all_reduce(torch.ones(2))
            raise LookupError("of the program's own")
    except LookupError as error:
        return str(error)


def test_a_trace_is_bounded_and_survives_an_error(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    assert pool.run(limited_and_broken, str(path), world_size=2) == ["of the program's own"] * 2
    trace = json.loads(path.read_text())
    assert trace["otherData"]["dropped"] == 8
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 10
    for rank in range(2):
        own = json.loads((tmp_path / f"t.json.second.rank{rank}").read_text())
        assert sum(event["ph"] == "X" for event in own["traceEvents"]) == 1
    assert len(list(tmp_path.iterdir())) == 3


def one_raises_or_misses_a_trace(context: RankContext, folder: str) -> None:
    """An error in one rank's block, then a rank without a trace: neither ends the group, and later traces are whole."""
    dist = context.start("gloo", timeout=timedelta(seconds=4))  # a rank waits half of it for the others
    store = world.communicator(None).info.store

    def raise_on_rank_1() -> None:
        with dist.trace(f"{folder}/raises.json"):
            if context.rank == 1:
                raise LookupError

    for _ in range(2):
        with warnings.catch_warnings(), suppress(LookupError):
            warnings.simplefilter("ignore")
            raise_on_rank_1()
        dist.all_reduce(torch.ones(1))
        with dist.trace(f"{folder}/after an error.json"):
            dist.all_reduce(torch.ones(1))
        assert not straggler.analyse().note
    if context.rank == 0:
        with pytest.warns(UserWarning, match="did not come"), dist.trace(f"{folder}/alone.json"):
            pass
    with dist.trace(f"{folder}/after a gap.json"):
        dist.all_reduce(torch.ones(1))
        if context.rank == 1:  # it comes second, and finds the other at the next meeting
            store.wait(["ringway/meet/trace/6/0"], timedelta(seconds=60))
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_a_rank_that_raises_or_misses_a_trace_does_not_end_the_group(pool: RankPool, tmp_path: Path) -> None:
    pool.run(one_raises_or_misses_a_trace, str(tmp_path), world_size=2, timeout=100)
    for name in ("after an error.json", "after a gap.json"):
        assert json.loads((tmp_path / name).read_text())["otherData"]["ranks"] == 2, name
    assert {path.name for path in tmp_path.iterdir()} == {
        "raises.json.rank0",
        "raises.json.rank1",
        "after an error.json",
        "alone.json.rank0",
        "after a gap.json",
    }


@pytest.mark.browser
def test_the_page_draws_everything_and_makes_no_request(trace_file: Path, tmp_path: Path) -> None:
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium on this machine: apt install chromium, or set RINGWAY_TEST_BROWSER")
    page = tmp_path / "report.html"
    report(trace_file, page)
    browser = Browser(program, tmp_path / "profile")
    try:
        browser.open(page.as_uri())
        assert browser.requests() == [page.as_uri()]
        count = lambda selector: browser.evaluate(f"document.querySelectorAll({selector!r}).length")  # noqa: E731
        in_view = "document.querySelector('#timeline svg').getAttribute('aria-label')"
        assert browser.evaluate(in_view) == "44 calls in view"
        assert count("#bandwidth polyline.series") == 2
        assert count("#bandwidth circle.point") >= 4
        # In columns of equal time: how many have a call in them depends on the machine.
        cells = browser.evaluate("figures.lateness.cells.flat().filter(cell => cell !== null).length")
        assert count("#lateness rect.cell") == cells >= 3
        assert count("#table tr") >= 6
        assert browser.evaluate("document.querySelector('#timeline svg').getBoundingClientRect().height") > 50
        # Text from users is shown, not interpreted.
        assert count("img") == 0
        assert NASTY in browser.evaluate("document.querySelector('#table').textContent")
        # Rank 1 slept, and is the reddest row of the heat map.
        assert "waited for" in browser.evaluate("document.querySelector('#lateness').textContent")
        # The page begins with what matters: rank 1 slept before its calls.
        assert "Rank 1 is late at " in browser.evaluate("document.querySelector('#reading').textContent")
        assert count("#places tr") >= 2
        assert f"The files are in {Path(__file__).parent}." in browser.evaluate("document.body.textContent")
        # On a phone, the pictures are as wide as the screen.
        wide = "Math.max(...[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().right))"
        browser.screen("light", 390)
        browser.open(page.as_uri())
        assert browser.evaluate(wide) <= browser.evaluate("document.documentElement.scrollWidth") == 390
        browser.screen("light", 1440)
        browser.open(page.as_uri())
        times = "document.querySelector('#timeline svg g').textContent"
        before = browser.evaluate(times)
        timeline = "document.querySelector('#timeline svg')"
        for first, control, zooms in (("blur", "false", False), ("blur", "true", True), ("focus", "false", True)):
            wheel = f"new WheelEvent('wheel', {{deltaY: -100, clientX: 600, ctrlKey: {control}, cancelable: true}})"
            browser.evaluate(f"{timeline}.{first}()")
            # Without Ctrl and without a click before, the wheel scrolls the page.
            assert browser.evaluate(f"{timeline}.dispatchEvent({wheel})") is not zooms
            assert (browser.evaluate(times) != before) is zooms
            browser.evaluate(f"{timeline}.dispatchEvent(new MouseEvent('dblclick'))")
            assert browser.evaluate(times) == before
        assert browser.complaints() == []
    finally:
        browser.close()


def test_a_trace_that_another_program_rewrote_can_be_read(trace_file: Path, tmp_path: Path) -> None:
    trace = json.loads(trace_file.read_text())
    trace["traceEvents"] += [{"ph": "X", "name": "cudaLaunch", "ts": 1, "dur": 2}, {"ph": "i"}, 3]
    (tmp_path / "merged.json").write_text(json.dumps(trace, indent=1))
    report(trace_file, tmp_path / "one.html")
    report(tmp_path / "merged.json", tmp_path / "two.html")
    one, two = ((tmp_path / name).read_text() for name in ("one.html", "two.html"))
    assert one.replace("trace.json", "merged.json") == two


def test_only_one_trace_runs_at_a_time_and_its_calls_are_limited(tmp_path: Path) -> None:
    with ringway.trace(tmp_path / "outer.json"):
        inner = ringway.trace(tmp_path / "inner.json")
        with pytest.raises(UsageError, match="one at a time"):
            inner.__enter__()
    assert json.loads((tmp_path / "outer.json").read_text())["traceEvents"]
    for limit in (0, -1, 1.5):
        with pytest.raises(UsageError, match="number of calls"), ringway.trace(tmp_path / "x", limit=limit):
            pass
    with pytest.warns(UserWarning, match="could not write"), ringway.trace(tmp_path / "no" / "trace.json"):
        pass


def test_an_unwritable_page_is_an_error_with_the_reason(trace_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*No such file"):
        report(trace_file, tmp_path / "no" / "report.html")
