"""The end of a job is bounded, idempotent and silent. Forks, Ctrl-C and forgotten groups do no harm."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway as dist
from exits import run_alone, run_together
from interrupts import interrupt_inside
from programs import ended_with
from ringway.errors import CommTimeout, PeerLost, RingwayError, UsageError
from ringway.groups.world import world
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

BACKENDS = ["gloo", "shm"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks with few modules: these run to the end of the interpreter, which frees all of them."""
    with RankPool(3, preload=("pytest",)) as ranks:
        yield ranks


def test_exiting_without_destroying_is_silent(pool: RankPool) -> None:
    done = run_alone(pool, "dist.all_reduce(torch.ones(3)); dist.all_reduce(torch.ones(3), async_op=True)")
    assert ended_with(done), done
    assert done.output == ""


def test_exiting_with_a_subgroup_and_adopted_groups_is_silent(pool: RankPool) -> None:
    done = run_alone(
        pool,
        "g = dist.new_group([0]); dist.all_reduce(torch.ones(3), group=g)\n"
        "import torch.distributed as c10d; p = c10d.new_group([0], backend='gloo')\n"
        "dist.all_reduce(torch.ones(2), group=p)\n"
        "w = dist.init_device_mesh('cpu', (1,))",
    )
    assert ended_with(done), done
    assert "Traceback" not in done.output


UNANSWERED = {
    "message": "work = dist.irecv(torch.zeros(5), src=(dist.get_rank() + 1) % 3)\nwork.is_completed(); dist.barrier()",
    "message of a group that is no more": (
        "work = dist.irecv(torch.zeros(5), src=(dist.get_rank() + 1) % 3)\n"
        "work.is_completed(); dist.barrier(); dist.destroy_process_group()"
    ),
    "collective": "work = dist.all_reduce(torch.ones(5), async_op=True) if dist.get_rank() == 0 else None",
    "collectives of all ranks": (
        "import time\n"
        "class Slow:\n"  # deleted while the interpreter is finalized: lower ranks exit at that time
        "    def __del__(self, sleep=time.sleep, rank=dist.get_rank()): sleep(0.4 * rank)\n"
        "slow, rank, groups = Slow(), dist.get_rank(), [dist.new_group() for _ in range(3)]\n"
        "work = dist.broadcast(torch.ones(5), src=(rank + 1) % 3, group=groups[rank], async_op=True); dist.barrier()"
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", UNANSWERED)
def test_exiting_with_unanswered_calls_is_silent(pool: RankPool, backend: str, what: str) -> None:
    """Threads inside torch wake up when the other ranks exit, perhaps while this interpreter is being finalized.

    The last case forces the crash: without `leave_threads_behind` two ranks of three failed in it.
    """
    for ended in run_together(pool, UNANSWERED[what], backend, 3):
        assert ended_with(ended), ended
        assert "terminate" not in ended.output


def test_exiting_with_unanswered_calls_keeps_the_exit_status(pool: RankPool) -> None:
    first, second = run_together(pool, f"{UNANSWERED['collective']}\nraise SystemExit(3 - dist.get_rank())", "gloo", 2)
    assert ended_with(first, 3), first
    assert ended_with(second, 2), second
    assert "terminate" not in first.output + second.output


def test_forked_child_is_refused_and_disturbs_nothing(pool: RankPool) -> None:
    done = run_alone(
        pool,
        "import torch.utils.data as data\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: dist.all_reduce(torch.ones(3))\n"
        "    except dist.errors.UsageError as error: print('refused:', error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "loader = data.DataLoader(torch.arange(8.0), num_workers=2)\n"
        "print(sum(float(x) for x in loader))\n"
        "t = torch.ones(3); dist.all_reduce(t); print('alive', t.tolist())\n"
        "dist.destroy_process_group()\n",
    )
    assert ended_with(done), done
    assert "refused: this process was forked from a rank" in done.output
    assert "28.0" in done.output
    assert "alive [1.0, 1.0, 1.0]" in done.output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", [False, True])
def test_a_forked_child_may_exit_in_any_way(pool: RankPool, backend: str, own: bool) -> None:
    """Its exit joins none of its parent's threads. It may have made its own groups."""
    groups_of_its_own = (
        "    c10d = torch.distributed.distributed_c10d; c10d._world.pg_map.clear(); c10d._update_default_pg(None)\n"
        f"    dist.init_process_group({backend!r}, store=HashStore(), rank=0, world_size=1, group_name='own')\n"
        "    t = torch.ones(3); dist.all_reduce(t); print('own', t.tolist(), flush=True)\n"
    )
    done = run_alone(
        pool,
        "import gc\n"
        "work = dist.all_reduce(torch.ones(3), async_op=True)\n"
        "cycle = [dist.communicator(dist.new_group([0]))]; cycle.append(cycle)\n"
        "dist.all_reduce(torch.ones(3), async_op=True, group=dist.new_group([0])).wait()\n"
        "gc.disable(); ended = [dist.new_group([0])]; dist.destroy_process_group(ended[0])\n"
        "ended.append(ended); del ended\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    del cycle, work; gc.collect()\n"
        f"{groups_of_its_own if own else ''}"
        "    sys.exit(7)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "t = torch.ones(3); dist.all_reduce(t); print('alive', t.tolist())\n",
        backend=backend,
    )
    assert ended_with(done), done
    assert "child 7" in done.output
    assert ("own [1.0, 1.0, 1.0]" in done.output) is own
    assert "alive [1.0, 1.0, 1.0]" in done.output


def test_destroy_may_be_called_again(pool: RankPool) -> None:
    done = run_alone(
        pool,
        "group = dist.new_group([0]); held = dist.communicator(group)\n"
        "dist.destroy_process_group(group); dist.destroy_process_group(group)\n"
        "try: held.all_reduce(torch.ones(1))\n"
        "except dist.errors.RingwayError as error: print(error)\n"
        "dist.destroy_process_group(); dist.destroy_process_group()\n"
        "try: dist.all_reduce(torch.ones(1))\n"
        "except dist.errors.UsageError as error: print(error)\n",
    )
    assert ended_with(done), done
    assert "was destroyed" in done.output
    assert "there is no group yet" in done.output


def _one_is_late(context: RankContext, backend: str, elsewhere: bool) -> str:
    """Rank 0 is interrupted while it waits in a collective for which rank 1 is late."""
    context.start(backend)
    if dist.get_rank() == 1:
        context.store.wait(["interrupted"])
        try:
            dist.all_reduce(torch.ones(1))
        except PeerLost:
            return "reported that rank 0 has left"  # shm knows; gloo carries the call on
        return "came"
    interrupt_inside("all_reduce", elsewhere=elsewhere)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(1))
    context.store.set("interrupted", "")
    return "interrupted"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_ctrl_c_ends_a_wait(pool: RankPool, backend: str, elsewhere: bool) -> None:
    waiting, late = pool.run(_one_is_late, backend, elsewhere, world_size=2)
    assert waiting == "interrupted"
    assert late == ("came" if backend == "gloo" else "reported that rank 0 has left")
    pool.replace()


def _recv_interrupted(context: RankContext, backend: str, elsewhere: bool) -> str:
    context.start(backend)
    if dist.get_rank() == 1:
        context.store.wait(["interrupted"])
        dist.send(torch.ones(1), 0)
        return "sent"
    interrupt_inside("recv", elsewhere=elsewhere)
    with pytest.raises(KeyboardInterrupt):
        dist.recv(torch.ones(1), 1)
    context.store.set("interrupted", "")
    return "interrupted"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_ctrl_c_ends_a_receive(pool: RankPool, backend: str, elsewhere: bool) -> None:
    """Even if the signal does not interrupt the sleep, because it went to another thread or came just before it."""
    assert pool.run(_recv_interrupted, backend, elsewhere, world_size=2) == ["interrupted", "sent"]
    pool.replace()


def _survivor(context: RankContext, backend: str) -> str:
    context.start(backend)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(torch.ones(4))
    except (PeerLost, CommTimeout) as error:
        first = error
    try:
        dist.all_reduce(torch.ones(4))
    except RingwayError as again:
        return f"{type(first).__name__} {again is first or str(again) == str(first)}"
    return "not poisoned"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_peer_poisons_the_group_only(pool: RankPool, backend: str) -> None:
    outcome = pool.try_run(_survivor, backend, world_size=2, timeout=60)[0]
    assert outcome.ok, outcome
    assert outcome.value == "PeerLost True"


def _pending(context: RankContext, backend: str) -> list[str]:
    """A group is destroyed while rank 0 has unanswered calls in flight on it."""
    context.start(backend)
    group = dist.new_group()
    found = []
    if context.rank == 0:
        works = [
            dist.all_reduce(torch.ones(3), group=group, async_op=True),
            dist.all_reduce(torch.ones(4, 4).t(), group=group, async_op=True),
            dist.irecv(torch.ones(3), 1, group=group),
        ]
        failures: list[BaseException] = []

        def wait_meanwhile() -> None:
            try:
                works[0].wait()
            except RingwayError as error:
                failures.append(error)

        waiter = threading.Thread(target=wait_meanwhile)
        waiter.start()
        time.sleep(0.5)
        dist.destroy_process_group(group)
        waiter.join(60)
        assert not waiter.is_alive(), "a thread that was already waiting gets the error too"
        for work in works:
            with pytest.raises(RingwayError) as caught:
                work.wait()
            assert work.is_completed()
            failures.append(caught.value)
        found = [str(failure) for failure in failures]
    dist.barrier()  # rank 1 stays in the group until rank 0 has left it
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_destroying_ends_calls_in_flight(pool: RankPool, backend: str) -> None:
    reported, _ = pool.run(_pending, backend, world_size=2, timeout=90)
    assert len(reported) == 4
    pool.replace()


def _forked_before_adoption(context: RankContext) -> str:
    """The child is the first to use a group that torch made: it must not count as a member."""
    leave()
    c10d.init_process_group("gloo", store=context.store, rank=0, world_size=1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(2))
            os.write(writer, b"computed")
        except UsageError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as reported:
        text = reported.read()
    os.waitpid(child, 0)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    return text


def test_a_forked_child_adopts_nothing(pool: RankPool) -> None:
    assert "forked from a rank" in pool.run(_forked_before_adoption, world_size=1)[0]
    pool.replace()


def _adoption(context: RankContext) -> None:
    """Groups that torch made: adopted without communication, held weakly, with the timeout that torch was given."""
    leave()  # an earlier test's group, if this rank has one
    limit = timedelta(seconds=77)
    c10d.init_process_group(
        "gloo", store=context.store, rank=context.rank, world_size=context.world_size, timeout=limit
    )
    if context.rank == 0:
        # Only here: if adoption communicated, the next call would not match.
        assert dist.communicator().info.timeout == limit.total_seconds()
    total = torch.tensor([float(context.rank)])
    dist.all_reduce(total)
    assert total == sum(range(context.world_size))
    strided = torch.arange(12.0).view(3, 4).t()
    dist.all_reduce(strided)
    assert torch.equal(strided, torch.arange(12.0).view(3, 4).t() * context.world_size)
    assert dist.get_backend() == "gloo"
    group = c10d.new_group()
    dist.all_reduce(total, group=group)
    communicator = weakref.ref(dist.communicator(group))
    assert communicator() in world.communicators()
    c10d.destroy_process_group(group)
    del group
    deadline = time.monotonic() + 30
    while communicator() is not None and time.monotonic() < deadline:  # a thread may be looking at it
        gc.collect()
        time.sleep(0.01)
    assert communicator() is None, "the map holds adopted groups weakly"
    dist.destroy_process_group()


def test_adopted_groups(pool: RankPool) -> None:
    pool.run(_adoption, world_size=2)
    pool.replace()


def test_wrong_use_before_there_is_a_group() -> None:
    tensor: Any = torch.ones(1)
    for use in (lambda: dist.all_reduce(tensor), dist.barrier, dist.communicator, lambda: dist.allgather_object(1)):
        with pytest.raises(UsageError, match="there is no group yet"):
            use()
    with pytest.raises(UsageError, match="there is no backend 'glop'; did you mean 'gloo'"):
        dist.init_process_group("glop")
    with pytest.raises(ValueError, match="takes a ProcessGroup, not str"):
        dist.all_reduce(tensor, group="world")  # type: ignore[arg-type]
