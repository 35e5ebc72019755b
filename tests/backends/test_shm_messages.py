"""Messages in flight on shm: which thread moves them, in every order of calls, and how they end."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ringway as dist
from ringway.backends.shm.fast_path import MessageWork
from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost, RingwayError
from ringway.testing import RankContext, RankPool

LARGE = 2_000_000  # floats: several rings


def _numbers(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * rank


# Which thread moves them


def _cpu_seconds_of_others() -> float:
    """CPU time of this process's threads except this one."""
    own, total = threading.get_native_id(), 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != own:
            with suppress(OSError):  # it has ended
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _moved_by_callers(context: RankContext) -> bool:
    """Whether the caller's own thread moved nearly everything. The background thread takes over from a caller that
    loses its CPU for long enough between two calls, so one attempt without that is enough."""
    context.start("shm")
    other = 1 - context.rank
    sent, received = _numbers(context.rank, LARGE), torch.empty(LARGE)
    quiet = torch.zeros(1, dtype=torch.int32)
    for _ in range(100):
        everywhere = quiet.clone()
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        if everywhere:
            break
        others, own = _cpu_seconds_of_others(), time.thread_time()
        for _ in range(3):
            works = [dist.irecv(received, other), dist.isend(sent, other)]
            for work in works:
                work.wait()
        others, own = _cpu_seconds_of_others() - others, time.thread_time() - own
        quiet |= others < own / 10
    assert torch.equal(received, _numbers(other, LARGE))
    return bool(quiet)


def test_the_callers_thread_moves_both_directions(pool: RankPool) -> None:
    assert pool.run(_moved_by_callers, world_size=2) == [True, True]


def _small_exchanges(context: RankContext) -> set[str]:
    """The threads that were started meanwhile. Those of earlier tests may end."""
    context.start("shm")
    other = 1 - context.rank
    dist.barrier()
    before = set(os.listdir("/proc/self/task"))
    for number in range(300):
        sent, received = torch.full((5,), float(number)), torch.zeros(5)
        work = dist.isend(sent, other)
        dist.recv(received, other)
        work.wait()
        assert torch.equal(received, sent)
    started = set(os.listdir("/proc/self/task")) - before
    dist.barrier()
    return started


def test_small_exchanges_start_no_thread(pool: RankPool) -> None:
    assert pool.run(_small_exchanges, world_size=2) == [set(), set()]


def _sender_is_away(context: RankContext) -> None:
    """The sender starts messages and makes no call afterwards. They arrive all the same, and its works notice."""
    context.start("shm")
    store = dist.communicator().info.store
    other = 1 - context.rank
    if context.rank == 0:
        works = [dist.isend(_numbers(tag, LARGE), other, tag=tag) for tag in (1, 2)]
        wanted = torch.empty(LARGE)
        works.append(dist.irecv(wanted, other))
        assert all(isinstance(work, MessageWork) for work in works)
        store.wait(["received"])  # no call of the group
        deadline = time.monotonic() + 100
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert torch.equal(wanted, _numbers(1, LARGE))
        assert [work.result() for work in works[:2]] == [[], []]
        assert works[2].result()[0] is wanted
        assert works[2].source_rank() == other
        assert works[2].get_future().wait()[0] is wanted
        return
    for tag in (2, 1):  # the first one is set aside
        received = torch.empty(LARGE)
        dist.recv(received, other, tag=tag)
        assert torch.equal(received, _numbers(tag, LARGE))
    dist.send(_numbers(1, LARGE), other)
    store.set("received", "yes")


def test_messages_move_while_the_sender_is_away(pool: RankPool) -> None:
    pool.run(_sender_is_away, world_size=2)


# Orders


def _exchange(order: str, sent: torch.Tensor, received: torch.Tensor, other: int) -> None:
    if order == "send, recv":  # the ring is full: what arrives is set aside
        dist.send(sent, other)
        dist.recv(received, other)
    elif order == "isend, recv, wait":
        work = dist.isend(sent, other)
        dist.recv(received, other)
        work.wait()
    elif order == "irecv, send, wait":
        work = dist.irecv(received, other)
        dist.send(sent, other)
        work.wait()
    elif order == "batch":
        pair = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
    else:
        works = {"s": dist.isend(sent, other), "r": dist.irecv(received, other)}
        for which in order:
            works[which].wait()


ORDERS = ("send, recv", "isend, recv, wait", "irecv, send, wait", "batch", "sr", "rs")


def _in_every_order(context: RankContext, sizes: list[int]) -> None:
    context.start("shm")
    other = 1 - context.rank
    for size in sizes:
        for number, orders in enumerate(itertools.product(ORDERS, repeat=2)):
            sent = _numbers(context.rank, size) + number
            received = torch.zeros(size)
            _exchange(orders[context.rank], sent, received, other)
            assert torch.equal(received, _numbers(other, size) + number), (size, orders)


def test_exchanges_in_every_order(pool: RankPool) -> None:
    """Sizes around those of a frame with data, a piece, a ring."""
    pool.run(_in_every_order, [0, 1, 8, 9, 16_384, 262_144, 1_000_000], world_size=2)


def _large_both_ways(context: RankContext) -> None:
    context.start("shm")
    other = 1 - context.rank
    size = 16 << 20
    sent, received = _numbers(context.rank, size), torch.zeros(size)
    for orders in (("send, recv", "send, recv"), ("isend, recv, wait", "batch"), ("rs", "sr")):
        received.zero_()
        _exchange(orders[context.rank], sent, received, other)
        assert torch.equal(received, _numbers(other, size)), orders


def test_64_mib_both_ways_at_once(pool: RankPool) -> None:
    pool.run(_large_both_ways, world_size=2)


# Ends


def _killed_in_the_middle(context: RankContext) -> tuple[list[int | None], str]:
    """The victim has sent a part of its message and received a part of the other's; on a busy machine it may have sent
    and received all of them before it dies. Nobody sends the message that the last wait is for."""
    context.start("shm")
    other = 1 - context.rank
    works = [dist.isend(torch.ones(LARGE), other), dist.irecv(torch.ones(LARGE), other)]
    works.append(dist.irecv(torch.ones(LARGE), other, tag=1))
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = []
    for work in works:
        try:
            work.wait()
        except PeerLost as error:
            lost.append(error.rank)
            assert work.exception() is not None
        assert work.is_completed()
    with pytest.raises(PeerLost):
        dist.isend(torch.ones(1), other)
    states = {call.op: call.state for call in dist.recent_calls() if call.op in ("send", "recv")}
    return lost, str(states)


def test_a_rank_killed_in_the_middle_ends_all_messages(pool: RankPool) -> None:
    ends = pool.try_run(_killed_in_the_middle, world_size=2)
    pool.replace()
    assert ends[0].kind == "returned", ends[0]
    lost, states = ends[0].value
    assert lost, "the message that nobody sends arrived"
    assert set(lost) == {1}
    assert "issued" not in states, states


def _different_sizes(context: RankContext) -> str:
    """The error names the line of the send that does not fit, whatever lines the messages before came from."""
    context.start("shm")
    other = 1 - context.rank

    def from_here(count: int) -> None:
        dist.isend(torch.ones(count), other)

    def from_there(count: int) -> None:
        dist.isend(torch.ones(count), other)

    if context.rank == 0:
        for send, count in ((from_here, 3), (from_there, 3), (from_there, 3), (from_here, 3), (from_here, 4)):
            send(count)
        with pytest.raises(CollectiveMismatch) as caught:
            dist.barrier()
        return str(caught.value)
    for _ in range(4):
        work = dist.irecv(torch.zeros(3), other)
        work.wait()
    work = dist.irecv(torch.zeros(3), other)
    with pytest.raises(CollectiveMismatch) as caught:
        work.wait()
    with pytest.raises(CollectiveMismatch):
        dist.irecv(torch.zeros(3), other)
    return str(caught.value)


def test_a_message_that_does_not_fit_names_both_lines(pool: RankPool) -> None:
    for text in pool.run(_different_sizes, world_size=2):
        assert "in from_here" in text, text
        assert "in from_there" not in text, text
        assert "in _different_sizes" in text, text
    pool.replace()


def _too_late(context: RankContext) -> None:
    context.start("shm")
    other = 1 - context.rank
    if context.rank == 1:
        dist.barrier()
        dist.send(torch.ones(3), other)
        return
    received = torch.zeros(3)
    work = dist.irecv(received, other)
    with pytest.raises(CommTimeout, match=r"recv #0 .*is not done after 0.01 s of waiting; it continues"):
        work.wait(0.01)
    assert not work.is_completed()
    dist.barrier()
    ended: list[Any] = []
    done = threading.Event()
    report: Callable[[Any], None] = lambda error: (ended.append(error), done.set())[1]  # noqa: E731
    work.on_complete(report)
    assert done.wait(100)
    assert ended == [None]
    assert work.wait()
    assert torch.equal(received, torch.ones(3))


def test_a_wait_that_times_out_leaves_the_message(pool: RankPool) -> None:
    pool.run(_too_late, world_size=2)


# After their group


def _after_their_group(context: RankContext) -> tuple[list[str], bool, str]:
    context.start("shm")
    other = 1 - context.rank
    told = []
    for whole in (False, True):
        group = None if whole else dist.new_group()
        work = dist.irecv(torch.empty(3), other, group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        try:
            work.wait()
        except RingwayError as error:
            told.append(str(error))
        assert work.is_completed()
        assert isinstance(work.exception(), RingwayError)
    context.start("shm")
    freed = _is_freed(context.rank, other)
    work = dist.irecv(torch.empty(3), other)
    dist.barrier()
    dist.communicator().health.end(RingwayError("the reason"))
    try:
        work.wait()
    except RingwayError as error:
        told.append(str(error))
    dist.destroy_process_group()
    return told, freed, told[-1]


def _is_freed(rank: int, other: int) -> bool:
    """A tensor that was sent is free once it has arrived, though the program makes no other message."""
    if rank == 1:
        dist.recv(torch.empty(LARGE), other)
        dist.barrier()
        return True
    tensor = torch.empty(LARGE)
    alive = weakref.ref(tensor)
    dist.isend(tensor, other)
    del tensor
    dist.barrier()
    deadline = time.monotonic() + 100
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive() is None


def test_messages_that_outlive_their_group_or_their_work(pool: RankPool) -> None:
    for told, freed, last in pool.run(_after_their_group, world_size=2):
        assert len(told) == 3
        assert all("closed" in text or "destroyed" in text for text in told[:2]), told
        assert freed
        assert last == "the reason"


def _waits_for_another(context: RankContext) -> None:
    context.start("shm")
    other = 1 - context.rank
    if context.rank == 1:
        time.sleep(0.2)
        dist.send(_numbers(1, LARGE), other)
        dist.barrier()
        return
    done = dist.isend(torch.ones(1), 1, tag=5)
    received = torch.empty(LARGE)
    work = dist.irecv(received, other)
    deadline = time.monotonic() + 100
    while not work.is_completed():
        done.wait()
        assert time.monotonic() < deadline
    assert torch.equal(received, _numbers(1, LARGE))
    dist.barrier()


def test_a_wait_for_what_is_done_does_not_stop_the_rest(pool: RankPool) -> None:
    pool.run(_waits_for_another, world_size=2)
