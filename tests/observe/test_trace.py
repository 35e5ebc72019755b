"""The trace and the page made from it: real ranks, and a real browser."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ringway
from browser import Browser, find_chromium
from ringway.errors import RingwayError, UsageError
from ringway.groups.world import world
from ringway.observe.log import straggler
from ringway.observe.report import figures, report
from ringway.observe.report.events import Events, TracedCall, read
from ringway.observe.report.page import as_data
from ringway.observe.report.reading import reading
from ringway.observe.trace.writer import HEAD, Part, encoded
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
        assert count("#timeline rect.bar") == 44
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
        browser.evaluate(
            "document.querySelector('#timeline rect.bar').dispatchEvent(new MouseEvent('mousemove', {clientX: 5}))"
        )
        assert "rank" in browser.evaluate("document.getElementById('tip').textContent")
        # The page begins with what matters: rank 1 slept before its calls.
        assert "Rank 1 is late at " in browser.evaluate("document.querySelector('#reading').textContent")
        assert count("#places tr") >= 2
        assert f"The files are in {Path(__file__).parent}." in browser.evaluate("document.body.textContent")
        # On a phone, the pictures are as wide as the screen.
        wide = "Math.max(...[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().right))"
        phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        browser.command("Emulation.setDeviceMetricsOverride", session=True, **phone)
        browser.open(page.as_uri())
        assert browser.evaluate(wide) <= browser.evaluate("document.documentElement.scrollWidth") == 390
        browser.command("Emulation.clearDeviceMetricsOverride", session=True)
        browser.open(page.as_uri())
        widest = (
            "Math.max(...[...document.querySelectorAll('#timeline rect.bar')].map(bar => +bar.getAttribute('width')))"
        )
        before = browser.evaluate(widest)
        timeline = "document.querySelector('#timeline svg')"
        for first, control, zooms in (("blur", "false", False), ("blur", "true", True), ("focus", "false", True)):
            wheel = f"new WheelEvent('wheel', {{deltaY: -100, clientX: 600, ctrlKey: {control}, cancelable: true}})"
            browser.evaluate(f"{timeline}.{first}()")
            # Without Ctrl and without a click before, the wheel scrolls the page.
            assert browser.evaluate(f"{timeline}.dispatchEvent({wheel})") is not zooms
            browser.evaluate(f"for (let i = 0; i < 4; i++) {timeline}.dispatchEvent({wheel})")
            assert (browser.evaluate(widest) > 2 * before) is zooms
            browser.evaluate(f"{timeline}.dispatchEvent(new MouseEvent('dblclick'))")
            assert browser.evaluate(widest) == before
        assert browser.complaints() == []
    finally:
        browser.close()


def test_a_long_trace_with_many_names_and_sizes_is_drawn(tmp_path: Path) -> None:
    rows = [
        (
            number,
            1,
            4 * number,
            0,
            0,
            -1,
            "0",
            f"step {number}",
            None,
            1000 * number,
            1000 * number + 400,
            1,
            2,
            0,
            0,
            False,
        )
        for number in range(20_000)
    ]
    path, page = tmp_path / "trace.json", tmp_path / "report.html"
    path.write_bytes(b"".join(encoded([Part(0, "host", 1, 0, 3, rows)])))
    report(path, page)
    assert page.stat().st_size < 3 << 20
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium on this machine: apt install chromium, or set RINGWAY_TEST_BROWSER")
    browser = Browser(program, tmp_path / "profile")
    try:
        browser.open(page.as_uri())
        count = lambda selector: browser.evaluate(f"document.querySelectorAll({selector!r}).length")  # noqa: E731
        assert count("#timeline rect.bar") == 6000
        assert 10 < count("#bandwidth circle.point") <= 100
        assert count("#table tr") == 501
        assert "No call was seen by two ranks" in browser.evaluate("document.querySelector('#lateness').textContent")
        assert "500 of 20000 names" in browser.evaluate("document.querySelector('#table-note').textContent")
        assert "3 more were dropped" in browser.evaluate("document.querySelector('#about').textContent")
        assert browser.complaints() == []
    finally:
        browser.close()


def _calls(*starts: tuple[int, float, float, str]) -> list[TracedCall]:
    """Calls of one group, as (rank, start, took, site); those of one rank are numbered."""
    numbers: Counter[int] = Counter()
    calls = []
    for rank, start, took, site in starts:
        facts = (rank, 0, start, took, "gradients", "all_reduce", numbers[rank], "0", 4 << 20, site, "completed")
        calls.append(TracedCall(*facts, True, 1.0, 1.0))
        numbers[rank] += 1
    return calls


def test_the_reading_names_the_late_rank_its_line_and_what_failed() -> None:
    calls = _calls((0, 0, 100e3, "train.py:41"), (1, 60e3, 40e3, "train.py:41"), (0, 100e3, 80e3, "eval.py:7"))
    lines = reading(calls)
    assert "Rank 1 is late at train.py:41: 60 ms of the 60 ms of waiting were for it." in lines
    assert any("gradients of 4.0 MB at train.py:41 takes 64% of the time in calls." in line for line in lines), lines
    failed = [calls[0], calls[1]._replace(state="failed")]
    assert "1 calls did not complete; the first is gradients on rank 1 at train.py:41." in reading(failed)
    assert figures.places(calls) == [
        ["train.py:41", "0", 2, "8.0 MB", 140.0],
        ["eval.py:7", "0", 1, "4.0 MB", 80.0],
    ]


def test_lines_are_shown_without_the_folder_that_all_are_in() -> None:
    calls = _calls((0, 0, 1, "/home/me/train.py:41"), (1, 0, 1, "/home/me/lib/step.py:7"), (0, 1, 1, ""))
    events, folder = Events(calls, 3).in_one_folder()
    assert (folder, [call.site for call in events.calls]) == ("/home/me", ["train.py:41", "lib/step.py:7", ""])
    assert events.dropped == 3
    for elsewhere in ("/usr/lib/step.py:7", "<stdin>:1"):
        mixed = Events([*calls, calls[0]._replace(site=elsewhere)], 0)
        assert mixed.in_one_folder() == (mixed, "")


def test_calls_on_a_device_are_drawn_by_its_streams_and_times(tmp_path: Path) -> None:
    """A rank's calls on two streams of its device. Those on a stream of their own overlap by half."""
    kind = (1, 4096, 0, 0, -1, "0", "", None)
    rows = [
        (0, *kind, 1_000, 50_000, 1, 2, 20_000, 1, False),
        (1, *kind, 2_000, 90_000, 1, 2, 60_000, 2, True),
        (2, *kind, 3_000, 105_000, 1, 2, 75_000, 2, True),
        (3, *kind, 4_000, 9_000, 1, 2, 0, 0, False),
    ]
    path = tmp_path / "trace.json"
    path.write_bytes(b"".join(encoded([Part(0, "host", 1, 0, 0, rows)])))
    calls = read(path).calls
    assert [(call.sequence, round(call.start, 3), round(call.took, 3), call.stream, call.beside) for call in calls] == [
        (3, 0.0, 5.0, 0, False),
        (0, 16.0, 30.0, 1, False),
        (1, 56.0, 30.0, 2, True),
        (2, 71.0, 30.0, 2, True),
    ]
    assert figures.streams(calls) == [[0, 1, 1, 0.03, False], [0, 2, 2, 0.045, True]]
    report(path, tmp_path / "report.html")


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


def test_data_cannot_end_its_script_element() -> None:
    text = as_data({"a": "</script><!-- & \u2028"})
    assert "<" not in text
    assert ">" not in text
    assert json.loads(text) == {"a": "</script><!-- & \u2028"}


CALL = '{"ph": "X", "pid": 0, "tid": 0, "ts": NaN, "dur": 1, "name": "n", "cat": "collective", "args": %s}'
ARGS = '{"op": "o", "sequence": 1, "group": "0", "bytes": 1, "site": "", "state": "", "algbw_GBps": 1, "busbw_GBps": 1}'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"traceEvents": 3}',
        '{"traceEvents": []}',
        '{"traceEvents": [3, {"ph": "X", "args": {"sequence": 1}}]}',
        HEAD.decode() + CALL % ARGS,
        '{"traceEvents": [' + CALL % ARGS + "]}",
        "[" * 100_000,
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(UsageError):
        report(path, tmp_path / "out.html")
    with pytest.raises(RingwayError, match="cannot read"):
        report(tmp_path / "absent", tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_an_unwritable_page_is_an_error_with_the_reason(trace_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*No such file"):
        report(trace_file, tmp_path / "no" / "report.html")
