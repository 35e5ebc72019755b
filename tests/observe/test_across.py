"""Ranks of different hosts that call different things: `check` = always, sample, stall, on two hosts of two ranks
each, made of network namespaces."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringway.testing import RankPool

sys.path.insert(0, str(Path(__file__).parent.parent / "backends"))
from slow_link import Host, needed, run_ranks, two_hosts

PROGRAM = Path(__file__).with_name("across_ranks.py")
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
    """What each rank found, scenario by scenario."""
    monkeypatch.setenv("RINGWAY_CHECK", check)
    printed = run_ranks(pool, hosts, 2, PROGRAM, scenario)
    return list(map(list, zip(*(json.loads(out.splitlines()[-1]) for out in printed), strict=True)))


def assert_told(facts: list[Any], sequence: int, odd: str, usual: str) -> None:
    """Every rank knows the first call where ranks part, and both call sites."""
    for told in facts:
        assert told["kind"] == "CollectiveMismatch", told
        assert told["sequence"] == sequence
        assert told["seconds"] < SOON
        assert len(told["sides"]) == 2
        assert any(odd in side for side in told["sides"].values()), told
        assert any(usual in side for side in told["sides"].values()), told
        assert told["text"].count("across_ranks.py:") == 2


@pytest.mark.timeout(300)
def test_always_tells_every_rank_before_anything_is_sent(
    pool: RankPool, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    *parted, in_ddp, monitored, sub_group = launched(pool, hosts, monkeypatch, "always", "always")
    for facts in parted:
        assert_told(
            facts, 3, "all_reduce #3 (float32, 32 bytes, SUM, group ", "all_reduce #3 (float32, 16 bytes, SUM, group "
        )
        assert {told["again"] for told in facts} == {"CollectiveMismatch"}
    for told in in_ddp:
        assert "called different things" in told["text"]
        assert told["seconds"] < SOON
    assert_told(monitored, 1, "barrier #1 (group ", "all_reduce #1 (float32, 16 bytes, SUM, group ")
    for told in (sub_group[1], sub_group[3]):
        assert set(told["sides"]) == {"1", "3"}, told  # keys of JSON
        assert "reduce #0 (float32, 16 bytes, SUM, root 1, group " in told["sides"]["1"]
        assert "reduce #0 (float32, 16 bytes, SUM, root 3, group " in told["sides"]["3"]


@pytest.mark.timeout(300)
def test_sample_sees_the_first_calls_and_later_what_it_missed(
    pool: RankPool, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = launched(pool, hosts, monkeypatch, "sample", "sample")
    assert_told(
        first, 3, "all_reduce #3 (float32, 32 bytes, SUM, group ", "all_reduce #3 (float32, 16 bytes, SUM, group "
    )
    assert_told(
        later, 40, "all_reduce #40 (int32, 16 bytes, SUM, group ", "all_reduce #40 (float32, 16 bytes, SUM, group "
    )


@pytest.mark.timeout(300)
def test_stall_compares_neighbours_at_once_and_hosts_at_the_timeout(
    pool: RankPool, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGWAY_STALL_AFTER", "1")
    neighbours, verdict = launched(pool, hosts, monkeypatch, "stall", "stall")
    assert_told(
        neighbours, 3, "all_reduce #3 (float32, 32 bytes, SUM, group ", "all_reduce #3 (float32, 16 bytes, SUM, group "
    )
    for told in verdict:
        assert told["kind"] == "CollectiveMismatch", told
        assert told["sequence"] == 2
        assert "called different things" in told["text"]
