"""The doctor on several ranks of a host: every rank is examined, and what they share is compared with their number."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import pytest
from findings import called

from programs import torchrun_variables
from ringway.doctor import Finding, examine
from ringway.doctor.place import NotUnderstood, Place, findings_as_text, read_findings, read_place
from ringway.doctor.ranks import merge, sharing
from ringway.testing import RankContext, RankPool

_PLACE = Place(0, "node7", "here", "10.0.0.1", 2000, cpus=[0, 1], quota=None, gpus=[], versions={"torch": "2.13.0"})


def _cpus(*affinities: list[int], quotas: tuple[list[float] | None, ...] = ()) -> Finding:
    """What is said about ranks with these affinities."""
    places = []
    for rank, cpus in enumerate(affinities):
        quota = quotas[rank] if quotas else None
        places.append(Place(rank, "node7", "here", "", 0, cpus=cpus, quota=quota, gpus=[], versions={}))
    return called(sharing(places, {}), "CPUs")


def test_cpus_are_compared_with_all_ranks_of_the_host() -> None:
    assert _cpus([0], [1]).level == "ok", "each rank has its own, as ringway run --bind core gives it"
    assert _cpus([0, 1], [0, 1]).level == "ok"
    assert _cpus([3]).says == f"1 of {os.cpu_count()}"
    few = _cpus([0, 1], [0, 1], [0, 1])
    assert few.level == "warning"
    assert "for 3 ranks: ranks take turns" in few.says
    same = _cpus([5], [5], [6, 7], [7, 8])
    assert same.level == "warning"
    assert "ranks 0, 1 may use CPU 5 only" in same.says


def test_a_quota_is_compared_with_the_ranks_that_share_it() -> None:
    one, other = [11.0, 1.5], [12.0, 1.0]
    assert _cpus([0, 1], quotas=([11.0, 0.5],)).level == "ok", "a single rank takes turns with nobody"
    assert _cpus([0, 1], [0, 1], quotas=(one, one)).level == "warning"
    assert _cpus([0, 1], [0, 1], quotas=(one, other)).level == "ok", "two containers have 2.5 CPUs"
    assert _cpus([0, 1], [0, 1], quotas=(one, None)).level == "ok"


def test_findings_of_ranks_are_merged() -> None:
    same, memory = Finding("ok", "gloo", "fine"), Finding("ok", "memory", "9 GB left")
    wrong = Finding("error", "gloo", "wrong")
    found = {
        2: [memory, same],
        3: [Finding("ok", "memory", "8 GB left"), same],
        5: [wrong],
        7: [wrong, same],
    }
    assert merge(found, 2) == [
        memory,
        Finding("ok", "gloo", "ranks 2, 3, 7: fine"),
        Finding("error", "gloo", "ranks 5, 7: wrong"),
    ]
    assert merge({rank: [same] for rank in range(4)}, 0) == [same]
    many = {rank: [wrong] for rank in range(1, 20)} | {0: [same]}
    assert merge(many, 0)[1].says == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more: wrong"


def test_what_other_ranks_send_is_checked() -> None:
    assert read_place(_PLACE.as_text().encode(), 0) == _PLACE
    place = json.loads(_PLACE.as_text())
    wrong: list[Any] = [
        *({**place, name: value} for name in place for value in (["x", {}], "\x1b[2J" * 2000, 1 << 70)),
        *({**place, "quota": value} for value in ([1], [1, "2"], [1, -1.0])),
        {name: value for name, value in place.items() if name != "cpus"},
        {**place, "more": 1},
        {**place, "gpus": ["GPU-1"] * 10_000},
        [],
        "[" * 5000,
    ]
    for entry in wrong:
        with pytest.raises(NotUnderstood, match="rank 0 sent"):
            read_place(json.dumps(entry).encode(), 0)
    with pytest.raises(NotUnderstood):
        read_place(_PLACE.as_text().encode(), 1)
    for text in (b"", b"{", b"[" * 100_000, b"\xff", b" " * (2 << 20)):
        with pytest.raises(NotUnderstood):
            read_place(text, 0)
        with pytest.raises(NotUnderstood):
            read_findings(text, 0)
    for entry in ({}, [{}], [1], [{"level": "dire", "subject": "a", "says": "b"}], [{"level": ["ok"]}]):
        with pytest.raises(NotUnderstood):
            read_findings(json.dumps(entry).encode(), 0)
    escape = Finding("ok", "gloo", "\x1b[2J" + "x" * 9000)
    (read,) = read_findings(findings_as_text([escape]).encode(), 0)
    assert read.says.startswith("?[2Jxxx")
    assert len(read.says) < 9000


def _examined(context: RankContext, variables: list[dict[str, str]], cpus: list[int]) -> list[Finding] | None:
    os.environ.update(variables[context.rank])
    os.sched_setaffinity(0, {cpus[context.rank]})
    if context.rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nope9"
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        place = sys.modules["ringway.doctor.place"]
        true_versions: Callable[..., dict[str, str]] = place._versions
        place._versions = lambda cards: true_versions(cards) | {"Python": "3.9", "NCCL": "2.1", "NVIDIA driver": "9"}
    return examine(60.0)


@pytest.mark.ranks
def test_every_rank_is_examined(pool: RankPool) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cpus = [allowed[0], allowed[-1]]
    variables = [each | {"RINGWAY_JOB_SECRET": "ab" * 32} for each in torchrun_variables(2)]
    pool.replace()  # ranks that are in no group yet
    try:
        findings, nothing = pool.run(_examined, variables, cpus, world_size=2, timeout=100)
    finally:
        pool.replace()
    assert nothing is None, "rank 0 shows all"
    gloo = [each for each in findings if each.subject == "gloo"]
    assert [(each.level, each.says[:7]) for each in gloo] == [("ok", "rank 0:"), ("error", "rank 1:")], gloo
    assert "nope9" in gloo[1].says
    (few,) = [each for each in findings if each.subject == "descriptors" and each.level == "warning"]
    assert few.says.startswith("rank 1: open files: at most 512"), few
    assert called(findings, "locked memory").says[:4] != "rank", "the ranks agree"
    assert called(findings, "memory").host == ""
    bound = called(findings, "CPUs")
    assert bound.level == ("ok" if len(allowed) > 1 else "warning"), bound
    assert f"for {len(cpus)} ranks" in bound.says
    versions = {each.says.split()[0]: each.level for each in findings if each.subject == "versions"}
    assert versions == {"NCCL": "error", "Python": "warning", "NVIDIA": "warning"}, findings
