"""The page that `ringway report` makes: what it holds, and what Chromium draws of it."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, find_chromium
from ringway.call import OP_BY_NAME
from ringway.errors import RingwayError, UsageError
from ringway.observe.report import figures, report
from ringway.observe.report.events import Events, TracedCall, read
from ringway.observe.report.page import as_data, page
from ringway.observe.report.reading import reading
from ringway.observe.trace.writer import HEAD, Part, encoded

TENTHS = range(10)
EACH = 100_000


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium on this machine: apt install chromium, or set RINGWAY_TEST_BROWSER")
    opened = Browser(program, tmp_path / "profile")
    try:
        yield opened
    finally:
        opened.close()


def _row(number: int, start_ns: int, took_ns: int, op: str = "all_reduce", **more: Any) -> tuple[Any, ...]:
    """A row of the recorder: 4 KiB on two ranks."""
    facts = {"nbytes": 4096, "group": "0", "label": None, "site": None, "state": 1, "stream": 0, **more}
    nbytes, group, label, site, state, stream = facts.values()
    shown = (number, OP_BY_NAME[op].code, nbytes, 0, 0, -1, group, label, site)
    return (*shown, start_ns, start_ns + took_ns, state, 2, start_ns if stream else 0, stream, stream > 1)


def _trace(path: Path, *rows: Sequence[tuple[Any, ...]], dropped: int = 0) -> Path:
    """A trace with the rows of each rank."""
    path.write_bytes(b"".join(encoded([Part(rank, "host", 1, 0, dropped, own) for rank, own in enumerate(rows)])))
    return path


def _drawn(data: dict[str, Any]) -> dict[int, list[tuple[float, float]]]:
    """The start and the duration of each rank's calls in a timeline, in microseconds."""
    drawn, first = {}, 0
    for each in data["ranks"]:
        last = first + each["calls"]
        starts = (start / 1e3 for start in accumulate(data["start"][first:last]))
        drawn[each["rank"]] = list(zip(starts, (took / 1e3 for took in data["took"][first:last]), strict=True))
        first = last
    return drawn


def _by_tenth(starts: Sequence[tuple[float, float]], end: float) -> list[int]:
    found = Counter(int(start / end * 10) for start, _ in starts)
    return [found[tenth] for tenth in TENTHS]


def _calls(*starts: tuple[int, float, float, str]) -> list[TracedCall]:
    """Calls of one group, as (rank, start, took, site); those of one rank are numbered."""
    numbers: Counter[int] = Counter()
    calls = []
    for rank, start, took, site in starts:
        facts = (rank, 0, start, took, "gradients", "all_reduce", numbers[rank], "0", 4 << 20, site, "completed")
        calls.append(TracedCall(*facts, True, 1.0, 1.0))
        numbers[rank] += 1
    return calls


def _equal_calls() -> list[TracedCall]:
    """100,000 calls on each of two ranks, one every 100 µs."""
    facts = ("/home/me/train.py:41", "completed", True, 1.0, 1.0)
    return [
        TracedCall(rank, 0, 100.0 * n + rank, 60.125, "loss", "all_reduce", n, "0", 4096, *facts)
        for n in range(EACH)
        for rank in (0, 1)
    ]


def test_every_call_of_a_long_trace_is_in_the_timeline() -> None:
    data = figures.timeline(_equal_calls())
    drawn = _drawn(data)
    assert set(drawn) == {0, 1}
    for found in drawn.values():
        assert _by_tenth(found, data["end"]) == [EACH // 10] * 10
    assert drawn[1][:2] == [(1.0, 60.125), (101.0, 60.125)]
    assert list(accumulate(data["sequence"][:3])) == [0, 1, 2]
    texts = [data["words"][word] for word in data["kinds"][0][:5]]
    assert texts == ["loss", "all_reduce", "0", "/home/me/train.py:41", "completed"]
    assert len(as_data(data)) < 4 << 20


def test_a_rank_has_as_many_lanes_as_tracks() -> None:
    """Other programs give tracks numbers of their own."""
    calls = [call._replace(track=track) for call, track in zip(_calls(*[(0, 1, 1, "")] * 3), (9**9, 5, 5), strict=True)]
    data = figures.timeline(calls)
    assert (data["ranks"][0]["lanes"], data["lane"]) == (2, [1, 0, 0])


def test_of_too_many_calls_the_longest_are_drawn_for_every_rank_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is late, so its calls are the short ones."""
    monkeypatch.setattr(figures, "_MAX_CALLS", 1000)
    calls = _calls(*((rank, 100.0 * n, 9.0 - 8 * rank, "") for n in range(10_000) for rank in (0, 1)))
    longest, failed = {4000, 9999}, 7000
    calls = [call._replace(took=50.0) if call.sequence in longest else call for call in calls]
    calls = [call._replace(took=0.5, state="failed") if call.sequence == failed else call for call in calls]
    data = figures.timeline(calls)
    assert 900 < data["shown"] <= 1000 + 2 * 16
    assert data["of"] == 20_000
    for rank, drawn in _drawn(data).items():
        assert drawn == sorted(drawn)
        assert min(_by_tenth(drawn, data["end"])) >= 40, rank
        assert {start / 100 for start, took in drawn if took == 50.0} == longest
        assert (100.0 * failed, 0.5) in drawn


# A copy is read: reading a canvas often makes it slow, and the browser warns.
BRUSH = """(() => {
    const canvas = document.querySelector('#timeline canvas')
    const copy = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height })
    const brush = copy.getContext('2d', { willReadFrequently: true })
    brush.drawImage(canvas, 0, 0)
    const isPaint = (part, place) => place % 4 === 3 && part > 0
    const painted = (...box) => brush.getImageData(...box).data.filter(isPaint).length
    return CODE
})()"""
PAINTED = BRUSH.replace(
    "CODE",
    """[...document.querySelectorAll('#timeline svg > text')].map(label => [...Array(10).keys()].map(tenth => {
        const wide = Math.floor(canvas.width / 10)
        return painted(tenth * wide, label.getAttribute('y') - 10, wide, 9) / (9 * wide)
    }))""",
)
"""For each rank, how much of each tenth of its first lane is painted."""

IN_VIEW = "parseInt(document.querySelector('#timeline svg').getAttribute('aria-label'))"
TIP = "document.getElementById('tip').textContent"


def _place(browser: Browser, rank: int, share: float) -> dict[str, float]:
    """Where on the screen a rank has a share of the time that is shown."""
    x, y, wide = browser.evaluate(f"""(() => {{
        document.getElementById('timeline').scrollIntoView()
        const box = document.querySelector('#timeline canvas').getBoundingClientRect()
        const text = document.querySelectorAll('#timeline svg > text')[{rank}].getBoundingClientRect()
        return [box.left, (text.top + text.bottom) / 2, box.width]
    }})()""")
    return {"x": x + share * wide, "y": y}


@pytest.mark.browser
def test_two_hundred_thousand_calls_are_drawn_and_zoomed(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(Events(_equal_calls(), 0), "two ranks"))
    browser.screen("light", 1440)
    browser.open(file.as_uri())
    assert browser.evaluate(IN_VIEW) == 2 * EACH
    shares = browser.evaluate(PAINTED)
    assert len(shares) == 2
    assert min(map(min, shares)) > 0.9, "thinner than a pixel, and next to each other"
    for rank, share in ((0, 0.03), (1, 0.5), (1, 0.98)):
        where = _place(browser, rank, share)
        browser.mouse("mouseMoved", **where)
        assert "calls here" in browser.evaluate(TIP)
        for calls in (2 * EACH // 100, 2 * EACH // 10_000):
            for _ in range(21):  # 0.8 ** 21 is 1 / 108
                browser.mouse("mouseWheel", **where, deltaX=0, deltaY=-100, modifiers=2)
            assert 0.5 * calls < browser.evaluate(IN_VIEW) < calls + 4, (rank, share)
            assert min(map(min, browser.evaluate(PAINTED))) > 0.1, "ten calls of each rank, or a thousand"
        tips = []
        for step in range(-20, 21):  # the wheel zooms into one place: look for a call next to it
            browser.mouse("mouseMoved", where["x"] + 5 * step, where["y"])
            tips.append(browser.evaluate(TIP))
        first = next(tip for tip in tips if tip)
        facts = rf"loss \(all_reduce #\d+, completed\)\nrank {rank}, group 0, 4 KB\n60.1 µs from "
        assert re.match(facts, first), first
        assert first.endswith("\ntrain.py:41")
        number = int(first.split("#")[1].split(",")[0])
        assert abs(number / EACH - share) < 0.01
        assert "" in tips, "between two calls"
        browser.evaluate("document.querySelector('#timeline svg').dispatchEvent(new MouseEvent('dblclick'))")
        assert browser.evaluate(IN_VIEW) == 2 * EACH
    assert browser.complaints() == []


@pytest.mark.browser
def test_the_report_can_be_read_on_any_screen(browser: Browser, tmp_path: Path) -> None:
    """Two generations of an elastic job, calls on a device's streams, a failed call, and a line of code with a long
    name."""
    sites = [
        ("/home/me/" + "a_package_with_a_long_name/" * 4 + "train.py", 41, "step"),
        ("/home/me/eval.py", 7, "main"),
    ]
    ops = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all_single", "send", "barrier", "gather")
    rows = []
    for rank in (0, 1):
        calls = [
            _row(n, n * 10**6 + rank * 300_000, 700_000, ops[n % len(ops)], nbytes=8 << n % 20, site=sites[n % 2])
            for n in range(80)
        ]
        calls += [_row(n, n * 10**6, 900_000, group=f"generation {n - 80}", site=sites[0]) for n in (80, 81)]
        calls += [_row(n, n * 10**6, 900_000, stream=n - 81, site=sites[0]) for n in (82, 83)]
        rows.append([*calls, _row(84, 84 * 10**6, 900_000, state=2, site=sites[0], label="a name " * 30)])
    file = tmp_path / "report.html"
    report(_trace(tmp_path / "trace.json", *rows), file)
    back = {}
    for scheme in ("light", "dark"):
        for width in (390, 1440):
            browser.screen(scheme, width)
            browser.open(file.as_uri())
            assert browser.requests() == [file.as_uri()]
            assert browser.evaluate(IN_VIEW) == 170
            found = browser.readability()
            assert found["sideways"] == 0
            assert found["size"] > 9, "pixels"
            assert found["text"] > 4.5, "what the guidelines for accessibility ask of text"
            assert found["curves"] > 3
            back[scheme] = found["back"]
            assert [max(shares) > 0 for shares in browser.evaluate(PAINTED)] == [True, True]
            browser.mouse("mouseMoved", **_place(browser, 1, 84.5 / 84.9))
            tip = browser.evaluate(TIP)
            assert "failed" in tip
            assert tip.endswith("train.py:41")
            edges = "(box => [box.left, box.right, box.top, box.bottom])"
            box = browser.evaluate(f"{edges}(document.getElementById('tip').getBoundingClientRect())")
            assert 8 <= box[0] < box[1] <= width - 8
            assert 0 <= box[2] < box[3] <= 892
    assert back["light"] > 0.8 > 0.1 > back["dark"]
    # Who changes the scheme while the page is open gets other colors, also in what is painted.
    pixel = BRUSH.replace("CODE", "brush.getImageData(3, 10, 1, 1).data.join()")
    dark = browser.evaluate(pixel)
    browser.screen("light", 1440)
    deadline = time.monotonic() + 60
    while browser.evaluate(pixel) == dark:
        assert time.monotonic() < deadline, "the colors stayed"
        time.sleep(0.05)
    assert browser.complaints() == []


def test_a_trace_with_many_names_and_sizes_is_bounded(tmp_path: Path) -> None:
    rows = [_row(n, 1000 * n, 400, nbytes=4 * n, label=f"step {n}") for n in range(20_000)]
    file = tmp_path / "report.html"
    report(_trace(tmp_path / "trace.json", rows, dropped=3), file)
    assert file.stat().st_size < 3 << 20
    data = json.loads(re.findall('id="figures">(.*?)</script>', file.read_text(), re.DOTALL)[0])
    assert data["timeline"]["shown"] == 20_000
    assert max(len(each["points"]) for each in data["bandwidth"]) <= 100
    assert (len(data["table"]["rows"]), data["table"]["of"]) == (500, 20_000)


@pytest.mark.browser
def test_the_page_says_what_it_leaves_out(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_MAX_CALLS", 1000)
    rows = [_row(n, 1000 * n, 400, nbytes=4 * n, label=f"step {n}") for n in range(2000)]
    file = tmp_path / "report.html"
    report(_trace(tmp_path / "trace.json", rows, dropped=3), file)
    browser.open(file.as_uri())
    text = lambda name: browser.evaluate(f"document.querySelector('#{name}').textContent")  # noqa: E731
    count = lambda selector: browser.evaluate(f"document.querySelectorAll({selector!r}).length")  # noqa: E731
    assert browser.evaluate(IN_VIEW) == 1008
    assert "1008 of 2000 calls, from issue to completion: the longest" in text("timeline-note")
    assert 10 < count("#bandwidth circle.point") <= 100
    assert count("#table tr") == 501
    assert "No call was seen by two ranks" in text("lateness")
    assert "500 of 2000 names" in text("table-note")
    assert "3 more were dropped" in text("about")
    assert browser.complaints() == []


@pytest.mark.browser
def test_many_ranks_are_drawn_as_far_as_the_screen_shows_them(browser: Browser, tmp_path: Path) -> None:
    """400 ranks are taller than a canvas may be."""
    file = tmp_path / "report.html"
    report(_trace(tmp_path / "trace.json", *([_row(0, 0, 1000)] for _ in range(400))), file)
    browser.open(file.as_uri())
    for rank in (30, 200, 399):
        label = f"document.querySelectorAll('#timeline svg > text')[{rank}]"
        browser.evaluate(f"{label}.scrollIntoView({{block: 'center'}})")
        browser.evaluate("dispatchEvent(new Event('scroll'))")  # the browser's own comes with the next frame
        y = browser.evaluate(f"(box => (box.top + box.bottom) / 2)({label}.getBoundingClientRect())")
        painted = f"painted(50, {y} - canvas.getBoundingClientRect().top - 3, 1, 6)"
        assert browser.evaluate(BRUSH.replace("CODE", painted)) == 6, rank
        browser.mouse("mouseMoved", 300, y)
        assert f"rank {rank}, " in browser.evaluate(TIP)
    assert browser.evaluate("document.querySelector('#timeline canvas').height") <= 4000
    assert browser.complaints() == []


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
