"""The conformance suite itself: it passes what is right and catches what is wrong, dead or hung."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import ringway
from ringway.call import OPS, Reduce
from ringway.testing import CASES, Case, ConformanceFailed, Probe, RankPool, check_backend
from ringway.testing import conformance as suite
from ringway.testing.reference import any_bits, reduced, relative_tolerance, small_values


def on_plain_gloo(pool: RankPool, *cases: str, sizes: tuple[int, ...] = (2,)) -> suite.Report:
    return check_backend(
        "gloo",
        sizes,
        cases=cases,
        pool=pool,
        started_by="torch.distributed",
        called_through="torch.distributed",
    )


def test_plain_gloo_passes_what_it_can(pool: RankPool) -> None:
    report = on_plain_gloo(pool, "all_reduce_large", "many_in_flight", "both_send_first")
    assert len(report.seconds) == 3
    assert str(report) == "3 of 3 conformance cases passed"


def test_wrong_results_of_plain_gloo_are_caught(pool: RankPool) -> None:
    with pytest.raises(ConformanceFailed) as caught:
        on_plain_gloo(pool, "strided_broadcast", "barrier_waits_for_the_last")
    findings = [finding for _, finding in caught.value.report.findings]
    assert {finding.case for finding in findings} == {"strided_broadcast"}
    assert any("layout=every second row" in finding.parameters for finding in findings)
    assert "1 of 2 conformance cases passed" in str(caught.value)
    assert "expected" in str(caught.value)


def test_an_error_of_plain_gloo_is_a_finding_with_its_traceback(pool: RankPool) -> None:
    with pytest.raises(ConformanceFailed, match="Invalid scalar type") as caught:
        on_plain_gloo(pool, "gather")
    assert "gather was at: dtype=torch.int16" in str(caught.value)


def test_settings_cover_each_size_and_a_subgroup() -> None:
    settings = suite.settings("gloo", (1, 2, 4))
    assert [(s.world_size, s.members) for s in settings] == [(1, None), (2, None), (4, None), (4, (1, 2, 3))]


def test_every_public_collective_has_a_case() -> None:
    own = set(suite.all_cases())
    assert {op.name for op in OPS} - own - {"barrier", "send", "recv"} == set()
    assert {"barrier_waits_for_the_last", "send_and_recv_of_every_dtype", "inference_all_reduce"} <= own
    objects = {name for name in ringway.__all__ if "_object" in name}
    assert objects - own - {"send_object_list", "recv_object_list"} == set()
    assert "send_and_recv_object_list" in own


def dies(probe: Probe) -> None:
    if probe.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(probe: Probe) -> None:
    while probe.rank == 1:
        time.sleep(0.1)


def test_dead_and_hung_cases_are_named_and_the_next_case_runs(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.all_cases()
    for function in (dies, hangs):
        monkeypatch.setitem(CASES, function.__name__, Case(function.__name__, function, min_size=2))
    monkeypatch.setattr(suite, "_CASE_SECONDS", 20.0)
    with pytest.raises(ConformanceFailed) as caught:
        on_plain_gloo(pool, "dies", "hangs", "synchronous_returns_none")
    text = str(caught.value)
    assert "1 of 3 conformance cases passed" in text
    assert "killed by SIGKILL" in text
    assert "in hangs" in text


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (Reduce.SUM, [4, -9]),
        (Reduce.AVG, [2, -4]),
        (Reduce.PRODUCT, [3, 20]),
        (Reduce.MIN, [1, -5]),
        (Reduce.MAX, [3, -4]),
        (Reduce.BAND, [1, -8]),
        (Reduce.BOR, [3, -1]),
        (Reduce.BXOR, [2, 7]),
    ],
)
def test_reference_on_integers(reduce: Reduce, expected: list[int]) -> None:
    given = [torch.tensor([1, -4], dtype=torch.int16), torch.tensor([3, -5], dtype=torch.int16)]
    assert reduced(given, reduce).tolist() == expected


def test_reference_on_bools_and_floats() -> None:
    flags = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    assert reduced(flags, Reduce.SUM).tolist() == [True, True, False]
    assert reduced(flags, Reduce.PRODUCT).tolist() == [True, False, False]
    assert reduced(flags, Reduce.BXOR).tolist() == [False, True, False]
    halves = [torch.tensor([1.0]).half(), torch.tensor([2.0]).half()]
    assert reduced(halves, Reduce.AVG).tolist() == [1.5]
    assert reduced(halves, Reduce.PREMUL_SUM, factor=3.0).tolist() == [9.0]


def test_reference_values_are_exact_for_eight_ranks() -> None:
    for dtype in (torch.int8, torch.uint8, torch.bfloat16, torch.float16):
        for reduce in (Reduce.SUM, Reduce.PRODUCT):
            values = [small_values(200, dtype, rank, reduce) for rank in range(8)]
            exact = torch.stack([value.to(torch.float64) for value in values])
            total = exact.sum(0) if reduce is Reduce.SUM else exact.prod(0)
            assert torch.equal(reduced(values, reduce).to(torch.float64), total)
    assert relative_tolerance(torch.float32, Reduce.AVG, 4) == 0
    assert relative_tolerance(torch.float32, Reduce.AVG, 3) > 0


def test_arbitrary_bits_differ_by_key_and_repeat() -> None:
    assert torch.equal(any_bits(100, torch.int32, 1, 2), any_bits(100, torch.int32, 1, 2))
    assert not torch.equal(any_bits(100, torch.int32, 1, 2), any_bits(100, torch.int32, 2, 1))
