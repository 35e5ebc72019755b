"""Ranks of different hosts that call different things, with `check` = always, sample and stall. The two hosts of two
ranks each are network namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringway.testing import RankPool
from slow_link import Host, needed, run_ranks, two_hosts

PROGRAM = Path(__file__).with_name("across_hosts_ranks.py")
SOON = 30
"""Seconds: the groups' timeout is 60."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    needed()
    with two_hosts() as made:
        yield made


def launched(
    pool: RankPool, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch, check: str, scenario: str
) -> list[list[Any]]:
    """The result of each rank, by scenario."""
    monkeypatch.setenv("RINGWAY_CHECK", check)
    printed = run_ranks(pool, hosts, 2, PROGRAM, scenario)
    return list(map(list, zip(*(json.loads(out.splitlines()[-1]) for out in printed), strict=True)))


def assert_mismatch(facts: list[Any], sequence: int, odd: str, usual: str) -> None:
    """Every rank knows the first call that differs, and both call sites."""
    for reported in facts:
        assert reported["kind"] == "CollectiveMismatch", reported
        assert reported["sequence"] == sequence
        assert reported["seconds"] < SOON
        assert len(reported["sides"]) == 2
        assert any(odd in side for side in reported["sides"].values()), reported
        assert any(usual in side for side in reported["sides"].values()), reported
        assert reported["text"].count("across_hosts_ranks.py:") == 2


@pytest.mark.timeout(300)
def test_always_raises_on_every_rank_before_anything_is_sent(
    pool: RankPool, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    *mismatches, in_ddp, monitored, sub_group = launched(pool, hosts, monkeypatch, "always", "always")
    for facts in mismatches:
        assert_mismatch(
            facts, 3, "all_reduce #3 (float32, 32 bytes, SUM, group ", "all_reduce #3 (float32, 16 bytes, SUM, group "
        )
        assert {reported["again"] for reported in facts} == {"CollectiveMismatch"}
    for reported in in_ddp:
        assert "called different things" in reported["text"]
        assert reported["seconds"] < SOON
    assert_mismatch(monitored, 1, "barrier #1 (group ", "all_reduce #1 (float32, 16 bytes, SUM, group ")
    for reported in (sub_group[1], sub_group[3]):
        assert set(reported["sides"]) == {"1", "3"}, reported  # keys of JSON
        assert "reduce #0 (float32, 16 bytes, SUM, root 1, group " in reported["sides"]["1"]
        assert "reduce #0 (float32, 16 bytes, SUM, root 3, group " in reported["sides"]["3"]


@pytest.mark.timeout(300)
def test_sample_compares_the_first_calls_and_finds_later_differences(
    pool: RankPool, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = launched(pool, hosts, monkeypatch, "sample", "sample")
    assert_mismatch(
        first, 3, "all_reduce #3 (float32, 32 bytes, SUM, group ", "all_reduce #3 (float32, 16 bytes, SUM, group "
    )
    assert_mismatch(
        later, 40, "all_reduce #40 (int32, 16 bytes, SUM, group ", "all_reduce #40 (float32, 16 bytes, SUM, group "
    )


@pytest.mark.timeout(300)
def test_stall_compares_neighbours_at_once_and_hosts_at_the_timeout(
    pool: RankPool, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGWAY_STALL_AFTER", "1")
    neighbours, verdict = launched(pool, hosts, monkeypatch, "stall", "stall")
    assert_mismatch(
        neighbours, 3, "all_reduce #3 (float32, 32 bytes, SUM, group ", "all_reduce #3 (float32, 16 bytes, SUM, group "
    )
    for reported in verdict:
        assert reported["kind"] == "CollectiveMismatch", reported
        assert reported["sequence"] == 2
        assert "called different things" in reported["text"]
