"""Listeners follow every group: its creation, its calls, its failure."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from ringway.call import ALL_REDUCE, Call
from ringway.errors import CollectiveMismatch, PeerLost, mismatch_error
from ringway.groups.listener import Group, Listener
from ringway.groups.world import world
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave


class Diary(Listener):
    """Records every event."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def created(self, group: Group) -> None:
        self.entries.append(f"created {group.name} of {group.size}")

    def issued(self, call: Call) -> None:
        self.entries.append(f"issued {call.op.name}")

    def completed(self, call: Call, error: BaseException | None) -> None:
        self.entries.append(f"completed {call.op.name} {type(error).__name__}")

    def failed(self, group: Group, error: BaseException) -> BaseException:
        self.entries.append(f"failed {group.fault is None} {type(error).__name__}")
        return PeerLost(f"{group.name} explained", rank=7)


class CallDiary(Diary):
    sees_calls = True


def _broken(*_: Any) -> None:
    raise PeerLost("the backend's words")


def _heard(context: RankContext, kind: type[Diary]) -> tuple[list[str], bool, str]:
    leave()
    diary = kind()
    world.listen(diary)
    world.listen(diary)  # installing it again changes nothing
    try:
        dist = context.start("shm", group_name="heard")
        dist.all_reduce(torch.ones(2))
        group = dist.communicator()
        quick = group.calls._paths.has(ALL_REDUCE.code)
        group.devices.routes_on("cpu").runners["broadcast"] = _broken
        with pytest.raises(PeerLost) as caught:
            group.broadcast(torch.ones(2), 0, log_name="not on the fast path")
    finally:
        world.unlisten(diary)
    world.unlisten(diary)
    return diary.entries, quick, str(caught.value)


def test_a_listener_hears_of_groups_and_failures_and_explains(pool: RankPool) -> None:
    ((entries, quick, text),) = pool.run(_heard, Diary, world_size=1)
    assert entries[0].startswith("created ")
    assert entries[0].endswith(" of 1")
    assert entries[1:] == ["failed True PeerLost"]
    assert quick, "a listener that does not see calls leaves them on the fast path"
    assert text.endswith(" explained")
    pool.replace()


def test_a_listener_that_sees_calls_sees_them_all(pool: RankPool) -> None:
    ((entries, quick, _),) = pool.run(_heard, CallDiary, world_size=1)
    assert entries[1:] == [
        "issued all_reduce",
        "completed all_reduce NoneType",
        "issued broadcast",
        "failed True PeerLost",
        "completed broadcast PeerLost",
    ]
    assert not quick
    pool.replace()


@pytest.mark.processes
def test_the_first_group_installs_everything_that_torchs_init_process_group_needs() -> None:
    program = (
        "import ringway, torch, torch.distributed as c10d\n"
        "from ringway.groups.world import world\n"
        "from ringway.observe.stall.watch import StallWatch\n"
        "print(world.listeners)\n"
        "c10d.init_process_group('shm', store=c10d.HashStore(), rank=0, world_size=1)\n"
        "print([type(listener).__name__ for listener in world.listeners])\n"
        "print(type(c10d.group.WORLD).__name__, world.listener(StallWatch).responder is not None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["[]", "['StallWatch', 'FailureExplainer', 'ErrorDumps']", "Bridge True"]


def _told_of_an_abort_first(context: RankContext) -> None:
    dist = context.start("shm")
    health = world.communicator(None).health
    health.poison(PeerLost("rank 1 aborted the group", rank=1))
    mismatch = mismatch_error("0", {0: "one call", 1: "another call"})
    assert health.fail(mismatch) is mismatch
    with pytest.raises(CollectiveMismatch):
        dist.barrier()


def test_a_difference_between_calls_says_more_than_the_abort_that_follows_it(pool: RankPool) -> None:
    pool.run(_told_of_an_abort_first, world_size=1)
    pool.replace()
