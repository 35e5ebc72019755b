"""Messages and `CollectiveMismatch.sides` use global ranks, even in a group that numbers its members differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringway.errors import CollectiveMismatch
from ringway.observe.flight import flight_record
from ringway.testing import RankContext, RankPool

MEMBERS = [1, 3]
"""Global ranks. In the group they are 0 and 1."""


def caught(*actions: Callable[[], Any]) -> tuple[str, dict[int, str]]:
    try:
        for action in actions:
            action()
    except CollectiveMismatch as error:
        return str(error), error.sides
    return "nothing raised", {}


def different_roots(dist: Any, rank: int, group: Any) -> tuple[str, dict[int, str]]:
    """Each member names itself as the root. A root may be done before the other has arrived, so a barrier follows."""
    return caught(lambda: dist.broadcast(torch.ones(4), rank, group=group), lambda: dist.barrier(group=group))


def sizes_of_a_message(dist: Any, rank: int, group: Any) -> tuple[str, dict[int, str]]:
    if rank == 1:
        return caught(lambda: dist.send(torch.ones(4), 3, group=group), lambda: dist.barrier(group=group))
    return caught(lambda: dist.recv(torch.ones(5), 1, group=group))


def sparse_shapes(dist: Any, rank: int, group: Any) -> tuple[str, dict[int, str]]:
    return caught(lambda: dist.all_reduce(torch.zeros(2 + rank).to_sparse(), group=group))


def in_sub_groups(context: RankContext) -> dict[str, Any]:
    dist = context.start("shm")
    found: dict[str, Any] = {}
    for name, backend, scenario in (
        ("shm collective", "shm", different_roots),
        ("shm message", "shm", sizes_of_a_message),
        ("board", "gloo", different_roots),
        ("sparse", "gloo", sparse_shapes),
    ):
        group = dist.new_group(MEMBERS, backend=backend)
        if context.rank in MEMBERS:
            found[name] = scenario(dist, context.rank, group)
    group = dist.new_group(MEMBERS, backend="gloo")
    if context.rank in MEMBERS:
        if context.rank == 1:
            dist.send(torch.ones(4), 3, group=group)
        else:
            dist.recv(torch.ones(4), 1, group=group)
        found["peer"] = dist.recent_calls(1)[0].peer
        found["flight"] = flight_record()["entries"][-1]["profiling_name"]
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def members(pool: RankPool) -> list[dict[str, Any]]:
    found = pool.run(in_sub_groups, world_size=4, timeout=120)
    pool.replace()
    return [found[rank] for rank in MEMBERS]


@pytest.mark.parametrize("name", ["shm collective", "board"])
def test_roots_and_sides_are_global(members: list[dict[str, Any]], name: str) -> None:
    for text, sides in (found[name] for found in members):
        assert set(sides) == {1, 3}, text
        assert "broadcast #0 (float32" in sides[1]
        assert "root 1, group " in sides[1]
        assert "root 3, group " in sides[3]
        assert f"rank 1: {sides[1]}" in text
        assert f"rank 3: {sides[3]}" in text


def test_both_ends_of_a_message_are_global(members: list[dict[str, Any]]) -> None:
    for text, sides in (found["shm message"] for found in members):
        assert set(sides) == {1, 3}, text
        assert "send #0 (float32[4], peer 3, group " in sides[1]
        assert "recv #0 (float32[5], peer 1, group " in sides[3]
        assert "rank 1 sends 16 bytes to rank 3, which expects 20" in text


def test_sides_of_a_sparse_sum_are_global(members: list[dict[str, Any]]) -> None:
    for text, sides in (found["sparse"] for found in members):
        assert sides == {1: "shape [3], 1 sparse dimensions", 3: "shape [5], 1 sparse dimensions"}, text


def test_recorded_peers_are_global_and_the_flight_records_are_the_groups(members: list[dict[str, Any]]) -> None:
    assert [found["peer"] for found in members] == [3, 1]
    assert [found["flight"] for found in members] == ["gloo:send 0->1", "gloo:recv 1<-0"]
