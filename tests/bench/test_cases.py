"""The cases: each op computes what it should, and a wrong one is caught."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from ringway.bench import CASES, Measured, Place, Ranks, WrongResult, measure, print_table, rows, to_json
from ringway.bench.table import in_bytes, in_time, rounded
from ringway.call import OPS
from ringway.testing import RankContext, RankPool


def test_every_op_has_a_row() -> None:
    assert {op.name for op in OPS} - set(CASES) == {"recv"}
    assert all(name == case.op.name for name, case in CASES.items())


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_message_has_the_size_asked_for(size: int) -> None:
    place = Place(0, size, 4096 * size)
    assert place.whole * 4 == 4096 * size
    assert place.part * size == place.whole
    for case in CASES.values():
        buffers = case.buffers(place)
        assert len(buffers.taken) == len(case.expected(place))


def measured(context: RankContext, module: str, names: list[str], nbytes: int) -> str:
    dist = context.start("gloo", module=module)
    control = c10d.new_group(backend="gloo")
    table = []
    for name in names:
        case = CASES[name]
        if context.world_size < case.min_size:
            continue
        place = Place(context.rank, context.world_size, nbytes)
        candidates = [case.candidate(title, dist, place) for title in ("one", "same again")]
        results = measure(candidates, Ranks(control), rounds=3, warmup_rounds=1, sample_seconds=1e-9)
        table += rows(case, place, results)
    return to_json(table)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_case_runs_and_verifies(pool: RankPool, size: int) -> None:
    text, *_ = pool.run(measured, "ringway", list(CASES), 4096, world_size=size)
    report = json.loads(text)
    assert report["machine"]["torch"] == torch.__version__
    assert {row["op"] for row in report["rows"]} == {n for n, case in CASES.items() if size >= case.min_size}
    for row in report["rows"]:
        assert row["verified"]
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        assert (row["ratio"] is None) == (row["candidate"] == "one")


class Broken:
    """A module whose all_reduce forgets one element."""

    @staticmethod
    def all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
        tensor[1:].zero_()


def test_a_wrong_result_is_caught() -> None:
    candidate = CASES["all_reduce"].candidate("broken", Broken, Place(0, 1, 64))
    with pytest.raises(WrongResult, match="broken: all_reduce of 64 bytes on rank 0 of 1: 15 of 16 elements"):
        measure([candidate])


def test_a_table_for_people() -> None:
    from rich.console import Console

    case, place = CASES["all_reduce"], Place(0, 1, 64)

    class Nothing:
        @staticmethod
        def all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
            return None

    candidates = [case.candidate(name, Nothing, place) for name in ("first", "second")]
    table = rows(case, place, measure(candidates, rounds=5))
    out = io.StringIO()
    print_table(table, "Title", Console(file=out, width=140))
    shown = out.getvalue()
    assert "Title" in shown
    assert shown.count("all_reduce") == 2
    assert "64 B" in shown


BUS_GB_PER_SECOND = {
    # of 1 MiB in 1 ms among 4 ranks, by nccl-tests' PERFORMANCE.md: 1.048576 GB/s times 2 (n - 1) / n
    "all_reduce": 1.572864,
    "all_reduce_coalesced": 1.572864,
    "inference_all_reduce": 1.572864,
    # times (n - 1) / n
    "all_gather": 0.786432,
    "all_gather_into_tensor": 0.786432,
    "all_gather_coalesced": 0.786432,
    "reduce_scatter": 0.786432,
    "reduce_scatter_tensor": 0.786432,
    "reduce_scatter_coalesced": 0.786432,
    "all_to_all": 0.786432,
    "all_to_all_single": 0.786432,
    "gather": 0.786432,
    "scatter": 0.786432,
    # times 1
    "broadcast": 1.048576,
    "reduce": 1.048576,
    "send": 1.048576,
    # no bytes
    "barrier": 0.0,
}


@pytest.mark.parametrize("op", CASES)
def test_bandwidths_are_those_of_nccl_tests(op: str) -> None:
    measured = Measured("one", [1e-3] * 5, 1, True)
    (row,) = rows(CASES[op], Place(0, 4, 1 << 20), [measured])
    assert row.bus_bandwidth / 1e9 == pytest.approx(BUS_GB_PER_SECOND[op], rel=1e-9)
    assert row.algorithm_bandwidth / 1e9 == pytest.approx(0.0 if op == "barrier" else 1.048576, rel=1e-9)


def test_units() -> None:
    assert [in_time(value) for value in (2.0, 0.0125, 3.1e-6, 1.5e-7)] == ["2 s", "12.5 ms", "3.1 µs", "150 ns"]
    assert in_time(0.0009996) == "1000 µs"
    assert [rounded(value, 2) for value in (1.5, 41.6, 413.7, 4137.0, 0.0)] == ["1.5", "42", "410", "4100", "0"]
    assert [in_bytes(value) for value in (8, 2048, 3 << 20, 1 << 30)] == ["8 B", "2 KiB", "3 MiB", "1 GiB"]
