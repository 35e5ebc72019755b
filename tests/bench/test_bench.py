"""`ringway bench`: what it measures, what it says about it, and what it does when ranks die or the user stops it."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from browser import Browser, find_chromium
from ringway.bench.cases import CASES, BenchCase, Place, _wrong_elements
from ringway.bench.compare import compare, in_words
from ringway.bench.page import page
from ringway.bench.reading import reading
from ringway.bench.runner import Estimate
from ringway.bench.schedule import PAIRS, Schedule, in_units, make_items, parse_sizes
from ringway.bench.session import run_schedule
from ringway.bench.table import Row, from_json, print_tables, to_csv, to_json
from ringway.errors import UsageError
from ringway.testing import RankContext, RankPool
from ringway.testing.pool import RanksFailed


def _row(op: str, nbytes: int, candidate: str, seconds: float, noise: float = 0.02, mode: str = "sync") -> Row:
    estimate = Estimate(seconds, seconds * (1 - noise), seconds * (1 + noise), 21)
    return Row(op, nbytes, "float32", 2, candidate, estimate, nbytes / seconds, nbytes / seconds, True, None, mode)


def test_sizes_are_lists_and_ranges() -> None:
    assert parse_sizes("8,64K, 4M") == (8, 64 << 10, 4 << 20)
    assert parse_sizes("8:256M:x4")[:3] == (8, 32, 128)
    assert parse_sizes("1K:4K") == (1 << 10, 2 << 10, 4 << 10)
    assert parse_sizes("1kb,1KiB") == (1 << 10,)
    for wrong in ("", "eight", "-8", "8:4M:4", "8:4M:x1", "8:4M:x2:x2", "0", "1e9", "999999999G"):
        with pytest.raises(UsageError, match="--sizes"):
            parse_sizes(wrong)


@given(st.lists(st.integers(1, 1 << 40), min_size=1, unique=True))
def test_sizes_survive_being_written(sizes: list[int]) -> None:
    assert parse_sizes(",".join(map(in_units, sizes))) == tuple(sizes)


def test_wrong_names_are_refused() -> None:
    for arguments in ((["all_sum"], [8]), (["send"], [8], ["float33"]), (["send"], [8], ["float32"], ["later"])):
        with pytest.raises(UsageError, match="is none"):
            make_items(*arguments)  # type: ignore[arg-type]


def test_a_schedule_survives_being_written() -> None:
    schedule = Schedule(
        make_items(["all_reduce", PAIRS], [8, 4096], ["float32"], ["async", "sync"], ["int8"]),
        ("shm",),
        rounds=5,
        seconds=2.0,
    )
    assert [item.codecs for item in schedule.items] == [(), (), (), (), ("int8",)]
    assert Schedule.from_json(schedule.to_json()) == schedule


def _measured(context: RankContext, schedule: Schedule) -> list[dict[str, Any]]:
    context.start("gloo")
    events: list[dict[str, Any]] = []
    run_schedule(schedule, events.append)
    return events


def test_every_op_and_mode_is_measured(pool: RankPool) -> None:
    items = make_items([*CASES, PAIRS], [4096], modes=["sync", "async", "overlap"], codecs=["int8"])
    first, *others = pool.run(_measured, Schedule(items, ("shm", "gloo"), rounds=3), world_size=3, timeout=200)
    assert others == [[], []], "rank 0 tells"
    table = [Row.from_dict(event["row"]) for event in first if "row" in event]
    assert {row.op for row in table if row.mode == "sync"} == set(CASES)
    assert {row.op for row in table if row.mode == "pair"} == {"0-1", "0-2", "1-2"}
    assert {row.candidate for row in table if row.mode == "compressed"} == {"shm int8", "gloo int8"}
    assert {row.candidate for row in table if row.mode == "overlap"} == {
        f"{name} {how} compute" for name in ("shm", "gloo") for how in ("then", "under")
    }
    assert all(row.verified for row in table)
    again, facts = from_json(to_json(table, ["shm", "gloo"]))
    assert again == table
    assert facts["backends"] == ["shm", "gloo"]
    assert facts["cpu"]
    assert int(facts["memory"].removesuffix(" GiB")) > 0
    assert len(to_csv(table).splitlines()) == len(table) + 1
    assert reading(table)


def test_time_limits_end_a_run_between_two_items(pool: RankPool) -> None:
    schedule = Schedule(make_items(["broadcast"], [8, 16, 32]), ("gloo",), rounds=3, seconds=0.0)
    events, _ = pool.run(_measured, schedule, world_size=2)
    assert events[-1] == {"late": 3}


def _corrupted(context: RankContext) -> None:
    right = CASES["all_reduce"]

    def call(dist: Any, buffers: Any, place: Any) -> Any:
        rightly = right.call(dist, buffers, place)

        def wrongly() -> None:
            rightly()
            if context.rank == 1:
                buffers.taken[0][-1] += 1

        return wrongly

    CASES["all_reduce"] = BenchCase(right.op, right.buffers, call, right.expected)
    _measured(context, Schedule(make_items(["all_reduce"], [4096]), ("shm",), rounds=3))


def test_a_backend_that_computes_wrong_is_caught(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="1 of 1024 elements of output 0 are wrong"):
        pool.run(_corrupted, world_size=2, grace=1.0)
    pool.replace()


def _noisy(rows: list[Row], seed: int, factors: dict[str, float] | None = None) -> list[Row]:
    """The rows of another run: each differs by up to 6 %, and the whole machine by up to 4 %."""
    chance = random.Random(seed)
    drift = chance.uniform(0.96, 1.04)
    return [
        replace(row, seconds=row.seconds.scaled(drift * chance.uniform(0.94, 1.06) * (factors or {}).get(row.op, 1.0)))
        for row in rows
    ]


def test_compare_finds_a_change_of_20_percent_and_takes_a_rerun_for_the_same() -> None:
    old = [_row(op, 8 << 2 * power, "shm", 1e-6 * 2**power) for op in ("all_reduce", "send") for power in range(8)]
    same = sum(not any(change.changed for change in compare(old, _noisy(old, seed))) for seed in range(100))
    assert same >= 90
    for seed in range(100):
        changed = [change.op for change in compare(old, _noisy(old, seed, {"send": 1.2})) if change.changed]
        assert changed == ["send"]
    (line,) = in_words(compare(old, _noisy(old, 1, {"send": 1.2})))
    assert line.startswith("send on shm is 1.")
    assert "slower" in line
    assert "nothing changed" in in_words(compare(old, old))[0]
    assert "nothing in common" in in_words(compare(old, [_row("gather", 8, "shm", 1e-6)]))[0]


def test_the_reading_names_winners_latency_and_slow_links() -> None:
    times = {8: (1e-6, 40e-6), 1024: (1.2e-6, 41e-6), 1 << 20: (1e-3, 0.9e-3)}
    table = [
        _row("all_reduce", size, name, each[place])
        for size, each in times.items()
        for place, name in enumerate(("shm", "gloo"))
    ]
    (line,) = reading(table)
    assert "shm is fastest from 8 B to 1 KiB (40 × gloo at 8 B, 34 × at 1 KiB); gloo is fastest at 1 MiB" in line
    assert "Up to 1 KiB latency-bound (about 1 µs)" in line
    shares = {8: (413, 600), 1024: (221, 300), 64 << 10: (52, 90)}
    ahead = [
        _row("broadcast", size, name, 1e-6 * factor)
        for size, (gloo, mpi) in shares.items()
        for name, factor in (("shm", 1), ("gloo", gloo), ("mpi", mpi))
    ]
    assert "from 8 B to 64 KiB (410 × gloo at 8 B, 52 × at 64 KiB)." in reading(ahead)[0]
    assert "(600 × mpi at 8 B, 52 × gloo at 64 KiB)" in reading([row for row in ahead if row is not ahead[1]])[0]
    assert (
        "(2 × gloo)" in reading([_row("broadcast", s, n, t) for s in (8, 64) for n, t in (("shm", 1), ("gloo", 2))])[0]
    )
    pairs = [
        _row(f"{a}-{b}", 8, "shm", 1e-6 * (4 if (a, b) == (1, 2) else 1), mode="pair")
        for a in range(3)
        for b in range(a + 1, 3)
    ]
    assert reading(pairs) == ["messages of 8 B on shm: ranks 1-2 are 4.0 times slower than the usual 1 µs."]


def test_the_page_is_one_file_and_escapes_what_it_shows() -> None:
    evil = "<script>alert(1)</script>"
    table = [_row("all_reduce", size, evil, 1e-6) for size in (8, 1024)] + [_row("0-1", 8, "shm", 1e-6, mode="pair")]
    text = page(table, {"torch": evil})
    assert "<script" not in text
    assert "http" not in text
    assert text.count("<circle") == 2
    assert "Pairs of ranks on shm, 8 B, one way" in text
    assert "backends shm gloo" in page(table, {"backends": ["shm", "gloo"]})
    drawn = io.StringIO()
    print_tables(table, Console(file=drawn, width=140))
    assert "Pairs of ranks on shm, one way" in drawn.getvalue()


_CONTRAST = """(() => {
    const light = color => color.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0)
    const back = light(getComputedStyle(document.body).backgroundColor)
    const ratio = color => (Math.max(light(color), back) + 0.05) / (Math.min(light(color), back) + 0.05)
    const shown = [...document.querySelectorAll('p, li, td, th, figcaption')].map(each => getComputedStyle(each).color)
    const drawn = [...document.querySelectorAll('polyline')].map(each => getComputedStyle(each).stroke)
    const written = [...document.querySelectorAll('svg text')].map(each => getComputedStyle(each).fill)
    return [back, Math.min(...shown.map(ratio), ...written.map(ratio)), Math.min(...drawn.map(ratio))]
})()"""


@pytest.mark.browser
def test_the_page_can_be_read_on_any_screen(tmp_path: Path) -> None:
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium on this machine: apt install chromium, or set RINGWAY_TEST_BROWSER")
    candidates = ("shm", "gloo", "mpi4py", "shm onebit")
    table = [
        _row(op, size, name, (1 + place) * 1e-6 * size**0.5)
        for op in ("all_reduce", "broadcast", "all_to_all_single")
        for size in (8, 64 << 10, 256 << 20)
        for place, name in enumerate(candidates)
    ] + [_row(f"{a}-{b}", 8, "shm", 1e-6 * (1 + a), mode="pair") for a in range(8) for b in range(a + 1, 8)]
    file = tmp_path / "bench.html"
    file.write_text(page(table, {"torch": "2.13.0", "cpu": "a CPU with a long name " * 5}))
    browser = Browser(program, tmp_path / "profile")
    brightness = {}
    try:
        for scheme in ("light", "dark"):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.command("Emulation.setEmulatedMedia", session=True, features=media)
            for width in (390, 1440):
                screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 390}
                browser.command("Emulation.setDeviceMetricsOverride", session=True, **screen)
                browser.open(file.as_uri())
                assert browser.requests() == [file.as_uri()]
                count = lambda selector: browser.evaluate(f"document.querySelectorAll({selector!r}).length")  # noqa: E731
                assert (count("polyline"), count("circle")) == (12, 36)
                root = "document.documentElement"
                assert browser.evaluate(f"{root}.scrollWidth == {root}.clientWidth"), "it scrolls sideways"
                narrowest = browser.evaluate(
                    "Math.min(...[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().width))"
                )
                assert narrowest > min(width, 900) / 2 - 60
                smallest = browser.evaluate(
                    "Math.min(...[...document.querySelectorAll('svg text')].map(each => "
                    "parseFloat(getComputedStyle(each).fontSize) * each.getScreenCTM().a))"
                )
                assert smallest > 9, "pixels"
                brightness[scheme], text, curves = browser.evaluate(_CONTRAST)
                assert text > 4.5, "what the guidelines for accessibility ask of text"
                assert curves > 3
        assert browser.complaints() == []
    finally:
        browser.close()
    assert brightness["light"] > 0.8 > 0.1 > brightness["dark"]


def test_calls_that_an_op_refuses_are_noted_and_the_rest_goes_on(pool: RankPool) -> None:
    items = make_items(["all_reduce", "broadcast"], [64], ["float8_e4m3fn", "bool"], ["sync", "overlap"])
    events, _ = pool.run(_measured, Schedule(items, ("shm", "gloo"), rounds=3), world_size=2)
    refused = {event["refused"] for event in events if "refused" in event}
    assert refused == {
        f"all_reduce 64 float8_e4m3fn{mode} on {name}" for mode in ("", " overlap") for name in ("shm", "gloo")
    }
    rows = {(event["row"]["op"], event["row"]["dtype"]) for event in events if "row" in event}
    assert rows == {("broadcast", "float8_e4m3fn"), ("all_reduce", "bool"), ("broadcast", "bool")}
    for wrong in ("qint8", "Tensor"):
        with pytest.raises(UsageError, match="--dtypes"):
            make_items(["all_reduce"], [8], [wrong])


def test_no_backend_is_told(pool: RankPool) -> None:
    schedule = Schedule(make_items([PAIRS, "all_reduce"], [8]), ("nccl",), rounds=3)
    events, _ = pool.run(_measured, schedule, world_size=2)
    assert events[-1] == {"nothing": ["nccl"]}


def test_sums_of_many_ranks_in_a_narrow_dtype_may_be_rounded() -> None:
    for size, dtype in ((16, torch.bfloat16), (64, torch.bfloat16), (500, torch.bfloat16), (100, torch.float16)):
        place = Place(0, size, 4 * size * 7, dtype=dtype)
        wanted = place.total(0, 14)
        summed = place.blank(14)
        for rank in range(size):
            summed += place.values(rank, 0, 14)
        assert _wrong_elements(wanted, wanted, size) == 0
        assert size > 16 or _wrong_elements(summed, wanted, size) == 0
        if dtype == torch.float16 or size == 64:
            assert not torch.equal(summed, wanted)
            assert _wrong_elements(summed, wanted, size) == 0
        broken = wanted.clone()
        broken[3], broken[5] = 0, float("nan")
        assert _wrong_elements(broken, wanted, min(size, 100)) == 2
