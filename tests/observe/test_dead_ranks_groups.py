"""A rank that died is a member of several groups: those with a call in flight are told and ended together."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ringway.backends.nccl.group import Aborts
from ringway.errors import PeerLost
from ringway.groups.world import world
from ringway.observe.stall import fault_board
from ringway.observe.stall import watch as stall
from ringway.observe.stall.watch import StallWatch


class Group:
    """A communicator, as far as the watch looks at it."""

    def __init__(self, name: str, ranks: list[int], seen: list[Any], fault: BaseException | None = None) -> None:
        self.name, self.ranks, self.fault = name, ranks, fault
        self.devices = SimpleNamespace(made=lambda: [SimpleNamespace(notices_deaths=False)])
        self.health = SimpleNamespace(end=lambda error: seen.append(("ended", name, error.rank)))


def test_the_other_groups_of_a_dead_rank_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    groups = [
        Group("row", [0, 3], seen),
        Group("world", [0, 1, 2, 3], seen),
        Group("column", [0, 1], seen),  # without the dead rank
        Group("idle", [0, 3], seen),  # without a call in flight
        Group("failed", [0, 3], seen, RuntimeError()),
    ]

    @contextmanager
    def together(self: Aborts) -> Any:
        seen.append("together")
        yield
        seen.append("aborted")

    watch = StallWatch()
    gone = SimpleNamespace(seems_gone=lambda: True)
    job: Any = SimpleNamespace(rank=0, addresses={3: gone})
    monkeypatch.setattr(watch, "job", job)
    monkeypatch.setattr(watch, "ask", lambda group: {})
    monkeypatch.setattr(watch, "with_farewells", lambda answers: answers)
    monkeypatch.setattr(watch, "_verdict", lambda *given: SimpleNamespace(gone=[3], text="rank 3 is gone"))
    monkeypatch.setattr(world, "communicators", lambda: groups)
    waiting = [
        (number, SimpleNamespace(group=group.name)) for number, group in enumerate(groups) if group.name != "idle"
    ]
    monkeypatch.setattr(world, "recorder", SimpleNamespace(under_way=lambda: waiting))
    monkeypatch.setattr(stall, "recorded", lambda row: row)
    monkeypatch.setattr(Aborts, "together", together)
    monkeypatch.setattr(
        fault_board, "write", lambda board, group, error: seen.append(("told", group.name, type(error)))
    )
    call: Any = SimpleNamespace(group="row")
    watch._end_for_the_dead(call, 1.0)
    assert seen == [
        ("told", "row", PeerLost),
        ("told", "world", PeerLost),
        "together",
        ("ended", "row", 3),
        ("ended", "world", 3),
        "aborted",
    ]
