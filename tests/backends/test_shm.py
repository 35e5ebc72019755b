"""shm from the user's side: order, waiting, the fast path, and how ranks find each other."""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch.distributed import distributed_c10d

import ringway as dist
import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.backends.shm import join as shm_meeting
from ringway.backends.shm.backend import ShmBackend
from ringway.call import (
    ALL_GATHER,
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    BROADCAST,
    DTYPE_CODE,
    DTYPES,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_SINGLE,
    SCATTER,
    SEND,
    Op,
    Reduce,
    reduces,
)
from ringway.errors import CollectiveMismatch, UsageError
from ringway.groups.world import world
from ringway.store import Deadline, key_of, read
from ringway.testing import RankContext, RankPool

GROUPS = 1000 if os.environ.get("RINGWAY_SOAK") else 20


def test_the_engine_supports_the_reductions_that_call_py_lists() -> None:
    for dtype in DTYPES:
        for reduce in Reduce:
            assert _core.shm_can_reduce(DTYPE_CODE[dtype], reduce) == reduces(dtype, reduce), (dtype, reduce)


def _fast_calls(context: RankContext) -> dict[str, Any]:
    context.start("shm")
    communicator = dist.communicator()
    backend = communicator.backend
    assert isinstance(backend, ShmBackend)
    record = _core.GroupRecord(_core.Recorder(64), "short")
    (path,) = backend.fast_paths(record, communicator.health)

    def run(op: Op, outputs: Any, inputs: Any, peer: int = -1) -> bool:
        return path.run(op.code, outputs, inputs, peer, False, 0, 0) is True

    rank, size = context.rank, context.world_size
    tensor = torch.full((5,), float(rank + 1))
    assert run(ALL_REDUCE, tensor, tensor)
    reported = torch.full((3,), float(rank))
    assert run(BROADCAST, reported, reported, 1)
    gathered, scattered = torch.zeros(size * 2), torch.zeros(2)
    assert run(ALL_GATHER_SINGLE, gathered, torch.full((2,), float(rank)))
    assert run(REDUCE_SCATTER_SINGLE, scattered, torch.arange(2.0 * size) * (rank == 0))
    swapped = torch.zeros(size)
    assert run(ALL_TO_ALL_SINGLE, swapped, torch.arange(float(size)) + 10 * rank)
    assert run(BARRIER, (), ())
    total, own = torch.full((4,), float(rank)), torch.full((2,), float(rank))
    assert run(REDUCE, total, total, 2)
    every, listed, dealt = ([torch.zeros(2) for _ in range(size)] for _ in range(3))
    assert run(ALL_GATHER, every, own)
    assert run(REDUCE_SCATTER, torch.zeros(2), every)
    assert run(GATHER, listed if rank == 1 else None, own, 1)
    assert run(SCATTER, dealt[0], every if rank == 0 else None, 0)
    counted = record.collectives
    # Calls that are not plain are neither recorded nor sent here.
    for strange in (torch.ones(4, 2)[:, 0], torch.ones(4, dtype=torch.complex64), None, "no tensor"):
        assert not run(ALL_REDUCE, strange, strange)
    assert not run(ALL_GATHER_SINGLE, torch.ones(3), torch.ones(2))
    assert not run(ALL_GATHER, every[:-1], own)
    assert not run(ALL_GATHER, [*every[:-1], torch.zeros(3)], own)
    assert not run(ALL_GATHER, tuple(every), own)
    assert not run(GATHER, None if rank == 1 else listed, own, 1)
    assert not run(SCATTER, own, [None] * size if rank == 0 else every, 0)
    assert not run(REDUCE, total, total, size)
    assert not run(ALL_TO_ALL_SINGLE, torch.zeros(2, size), torch.zeros(2, size)), "rows that do not divide"
    path.hold(1)
    assert not run(ALL_REDUCE, tensor, tensor)
    path.hold(-1)
    path.serve(ALL_REDUCE.code, [(0, 4), (40, 80)])
    assert not run(ALL_REDUCE, tensor, tensor)
    assert record.collectives == counted == record.completed == 11
    return {
        "all_reduce": tensor.tolist(),
        "broadcast": reported.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "swapped": swapped.tolist(),
        "reduced": total.tolist() if rank == 2 else [3.0] * 4,
        "every": torch.cat(every).tolist(),
        "listed": torch.cat(listed).tolist() if rank == 1 else torch.cat(every).tolist(),
        "dealt": dealt[0].tolist(),
    }


def test_fast_calls_give_the_same_results_as_general_calls(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(_fast_calls, world_size=3)):
        assert found == {
            "all_reduce": [6.0] * 5,
            "broadcast": [1.0] * 3,
            "gathered": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
            "scattered": [2.0 * rank, 2.0 * rank + 1],
            "swapped": [float(rank), float(rank + 10), float(rank + 20)],
            "reduced": [3.0] * 4,
            "every": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
            "listed": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
            "dealt": [float(rank)] * 2,
        }


def _python_functions(context: RankContext) -> list[str]:
    context.start("shm")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    called: list[Any] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code) if event == "call" else None)
    try:
        dist.all_reduce(tensor)
    finally:
        sys.setprofile(None)
    return [code.co_name for code in called if "ringway" in code.co_filename]


def test_a_small_all_reduce_is_one_python_function(pool: RankPool) -> None:
    for called in pool.run(_python_functions, world_size=2):
        assert called == ["all_reduce"]


class _CountedRecord(_core.GroupRecord):
    """Keeps the names of the methods that are called."""

    def __getattribute__(self, name: str) -> Any:
        _record_uses.append(name)
        return super().__getattribute__(name)


_record_uses: list[str] = []


def _uses_of_the_record(context: RankContext) -> list[str]:
    group = context.start("shm").communicator()
    group.calls._record = _CountedRecord(world.recorder, group.name, group.size, group.ranks)
    _record_uses.clear()
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX)
    return list(_record_uses)


def test_a_synchronous_call_on_the_general_path_uses_the_record_twice(pool: RankPool) -> None:
    """Before the backend and after it: each use is a step into native code."""
    for uses in pool.run(_uses_of_the_record, world_size=2):
        assert uses == ["begin_call", "started"]


def _default_group_changes(context: RankContext) -> list[float]:
    """The fast path of the default group follows torch's default group, and raises what the group's own path raises."""
    sums = []
    for _ in range(2):
        context.start("shm")
        tensor = torch.ones(2)
        for _ in range(2):  # the first call finds the group, the second takes its path
            dist.all_reduce(tensor)
        sums.append(tensor[0].item())
        before = dist.communicator().record.collectives
        assert world.fast.run(ALL_REDUCE.code, tensor, tensor) is True
        assert dist.communicator().record.collectives == before + 1
        dist.destroy_process_group()
        assert world.fast.run(ALL_REDUCE.code, tensor, tensor) is False
        with pytest.raises(UsageError, match="no group yet"):
            dist.all_reduce(tensor)
    context.start("shm")
    dist.barrier()
    other = 1 - context.rank
    with pytest.raises(UsageError, match="itself"):
        dist.send(tensor, context.rank)
    with pytest.raises(UsageError, match="not a rank of the group"):
        dist.broadcast(tensor, 7)
    with pytest.raises(TypeError, match="op, outputs, inputs"):
        world.fast.run(ALL_REDUCE.code)
    with pytest.raises(IndexError):
        world.fast.run(99, tensor, tensor)
    replaced = distributed_c10d._world
    try:
        distributed_c10d._world = type(replaced)()  # as torch's own tests do
        assert world.fast.run(BARRIER.code, (), ()) is False
    finally:
        distributed_c10d._world = replaced
    assert dist.recv(tensor, other) == other if context.rank else dist.send(tensor, other) is None
    with pytest.raises(CollectiveMismatch) as caught:
        dist.all_reduce(torch.ones(2 + context.rank))
    with pytest.raises(CollectiveMismatch) as again:
        dist.all_reduce(torch.ones(2))
    assert str(again.value) == str(caught.value)
    return sums


def test_the_default_groups_fast_path(pool: RankPool) -> None:
    assert pool.run(_default_group_changes, world_size=2) == [[4.0, 4.0]] * 2
    pool.replace()


def _other_groups(context: RankContext) -> tuple[float, int]:
    """The fast paths of a group that the program names."""
    context.start("shm")
    group = dist.new_group([0, 1])
    tensor, calls = torch.ones(2), dist.communicator(group).record
    for other in (object(), dist.GroupMember.NON_GROUP_MEMBER, tensor):
        assert world.fast.run_on(other, ALL_REDUCE.code, tensor, tensor) is False
    with pytest.raises(TypeError, match="missing"):
        world.fast.run_on()  # type: ignore[call-arg]
    before = calls.collectives
    assert world.fast.run_on(group, ALL_REDUCE.code, tensor, tensor) is True
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, group=group, group_src=1)
    dist.barrier(group=group)
    assert calls.collectives == before + 4
    with pytest.raises(UsageError, match="outside the group"):
        dist.broadcast(tensor, group=group, group_src=2)
    with pytest.raises(CollectiveMismatch) as caught:
        dist.all_reduce(torch.ones(2 + context.rank), group=group)
    with pytest.raises(CollectiveMismatch) as again:
        dist.all_reduce(torch.ones(2), group=group)
    assert str(again.value) == str(caught.value)
    assert world.fast.run_on(group, ALL_REDUCE.code, tensor, tensor) is False
    dist.all_reduce(tensor)  # the default group is sound
    return tensor[0].item(), calls.collectives - before


def test_the_fast_paths_of_other_groups(pool: RankPool) -> None:
    first, second = pool.run(_other_groups, world_size=2)
    pool.replace()
    assert first == second
    assert first[0] == 8.0


def _beside_busy_processes(context: RankContext) -> tuple[bool, float]:
    """Ranks that start on one CPU, beside processes that want all CPUs. They may move, but keep their affinity."""
    context.start("shm")
    allowed = os.sched_getaffinity(0)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in allowed]
    try:
        os.sched_setaffinity(0, {min(allowed)})
        os.sched_setaffinity(0, allowed)
        tensor = torch.ones(1)
        for _ in range(2000):
            dist.all_reduce(tensor.fill_(1))
        other = 1 - context.rank
        for _ in range(200):
            work = dist.isend(tensor, other)
            dist.recv(torch.empty(1), other)
            work.wait()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return os.sched_getaffinity(0) == allowed, tensor.item()


def test_ranks_beside_busy_processes(pool: RankPool) -> None:
    assert pool.run(_beside_busy_processes, world_size=2, timeout=200) == [(True, 2.0)] * 2


def _fast_messages(context: RankContext) -> None:
    """Sends that complete at once keep their order among those that wait because the ring is full."""
    context.start("shm")
    record = _core.GroupRecord(_core.Recorder(64), "short")
    (path,) = dist.communicator().backend.fast_paths(record, dist.communicator().health)
    chunk, count = torch.zeros(50_000), torch.zeros(1)  # a fifth of a ring
    if context.rank == 0:
        works: list[Any] = []
        while not works or works[-1].is_completed():
            works.append(path.run(SEND.code, (), torch.full_like(chunk, len(works)), 1, True, 7, 0))
        sent = len(works)
        assert 2 < sent < 11
        assert (record.messages, record.completed) == (sent, sent - 1)
        works += [dist.isend(torch.full_like(chunk, sent + more), 1, tag=7) for more in range(3)]
        assert not any(work.is_completed() for work in works[sent - 1 :])
        dist.broadcast(count.fill_(sent + 3), 0)
        for work in works:
            work.wait()
        first, second = (dist.isend(count, 1, tag=tag) for tag in (-8, 2**31 - 1))
        assert first is not second
        reported: list[BaseException | None] = []
        first.on_complete(reported.append)
        assert (first.wait(), first.is_completed(), first.exception(), first.result(), reported) == (
            True,
            True,
            None,
            [],
            [None],
        )
        assert first.get_future().wait() == []
        with pytest.raises(dist.errors.UsageError, match="tag=2147483648 is not between"):
            dist.isend(count, 1, tag=2**31)
        assert path.run(SEND.code, (), chunk, 0, False, 0, 0) is False, "to itself"
        assert path.run(RECV.code, torch.zeros(4, 2)[:, 0], (), 1, False, 0, 0) is False
        assert record.messages == sent
        return
    dist.broadcast(count, 0)
    for expected in range(int(count)):
        assert path.run(RECV.code, chunk, (), 0, False, 7, 0) is True
        assert torch.equal(chunk, torch.full_like(chunk, expected))
    for tag in (2**31 - 1, -8):
        dist.recv(count.zero_(), 0, tag=tag)
        assert count == expected + 1


def test_fast_messages_keep_their_order(pool: RankPool) -> None:
    pool.run(_fast_messages, world_size=2)


def _list_that_is_cleared(context: RankContext) -> None:
    """The program may change its list while the call waits: the call keeps the tensors until it ends."""
    context.start("shm")
    outputs = [torch.zeros(1 << 16) for _ in range(context.world_size)]
    kept = [weakref.ref(output) for output in outputs]
    alive: list[bool] = []

    def clear_meanwhile() -> None:
        while (dist.recent_calls(1)[0].op, dist.recent_calls(1)[0].state) != ("all_gather", "issued"):
            time.sleep(0.01)
        outputs.clear()
        alive.extend(output() is not None for output in kept)
        context.store.set("cleared", "yes")

    dist.barrier()
    if context.rank == 0:
        clearing = threading.Thread(target=clear_meanwhile)
        clearing.start()
    else:
        context.store.wait(["cleared"])
    dist.all_gather(outputs, torch.ones(1 << 16))
    if context.rank == 0:
        clearing.join()
        assert outputs == []
        assert alive == [True] * context.world_size


def test_a_list_may_be_cleared_while_its_call_waits(pool: RankPool) -> None:
    pool.run(_list_that_is_cleared, world_size=2)


def _same_bits(context: RankContext) -> list[bytes]:
    """Small and large sums whose result depends on the order of the terms, twice."""
    context.start("shm")
    generator = torch.Generator().manual_seed(context.rank)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (7, 3000, 300_000):
            values = (torch.randn(count, generator=generator) * 1000).to(dtype)
            twice = [values.clone(), values.clone()]
            for tensor in twice:
                dist.all_reduce(tensor)
            assert torch.equal(*twice)
            every = [torch.empty_like(values) for _ in range(context.world_size)]
            dist.all_gather(every, values)
            total = every[0].float()
            for other in every[1:]:  # in rank order, rounded once
                total = total + other.float()
            assert torch.equal(twice[0], total.to(dtype))
            found.append(twice[0].view(torch.uint8).numpy().tobytes()[:4000])
    return found


def test_the_same_bits_on_every_rank_in_rank_order(pool: RankPool) -> None:
    for size in (2, 5):
        found = pool.run(_same_bits, world_size=size)
        assert all(other == found[0] for other in found)


def _from_a_callback(context: RankContext) -> list[float]:
    """A collective issued by a completion callback runs before those that are already queued."""
    context.start("shm")
    inner = torch.full((1000,), float(context.rank + 1))
    first, second = torch.ones(500_000), torch.ones(500_000)
    ran = threading.Event()

    def follow(_: Any) -> torch.Tensor:
        dist.all_reduce(inner)
        ran.set()
        return inner

    work = dist.all_reduce(first, async_op=True)
    assert work is not None
    future = work.get_future().then(follow)
    queued = dist.all_reduce(second, async_op=True)
    assert queued is not None
    future.wait()
    queued.wait()
    assert ran.is_set()
    last = torch.ones(2)
    dist.all_reduce(last)
    return [inner[0].item(), first[0].item(), second[0].item(), last[0].item()]


def test_a_callback_may_call_collectives(pool: RankPool) -> None:
    for found in pool.run(_from_a_callback, world_size=3):
        assert found == [6.0, 3.0, 3.0, 3.0]


def _from_anyone(context: RankContext) -> list[int]:
    context.start("shm")
    if context.rank:
        time.sleep(0.05 * context.rank)
        dist.send(torch.full((100_000,), float(context.rank)), 0, tag=7)
        return []
    sources = []
    for _ in range(context.world_size - 1):
        tensor = torch.zeros(100_000)
        source = dist.recv(tensor, tag=7)
        assert tensor.eq(float(source)).all()
        sources.append(source)
    return sources


def test_messages_from_anyone(pool: RankPool) -> None:
    assert sorted(pool.run(_from_anyone, world_size=4)[0]) == [1, 2, 3]


def _both_send_first(context: RankContext) -> bool:
    """Blocking sends much larger than a ring, on both sides at once."""
    context.start("shm")
    other = 1 - context.rank
    sent, got = torch.full((2_000_000,), float(context.rank)), torch.zeros(2_000_000)
    dist.send(sent, other)
    dist.recv(got, other)
    return bool(got.eq(float(other)).all())


def test_two_ranks_that_both_send_first_do_not_deadlock(pool: RankPool) -> None:
    assert pool.run(_both_send_first, world_size=2) == [True, True]


def _both_send_and_nobody_waits(context: RankContext) -> tuple[bool, int]:
    """Sends that are received at once and need no buffer; then two that only a future waits for."""
    context.start("shm")
    other = 1 - context.rank
    sent, got = torch.full((8_000_000,), float(context.rank)), torch.zeros(8_000_000)
    before = _peak_kilobytes()
    for _ in range(5):
        work = dist.isend(sent, other)
        dist.recv(got, other)
        assert work is not None
        work.wait()
    more = _peak_kilobytes() - before
    work = dist.isend(sent, other)
    assert work is not None
    work.get_future().wait()
    got.zero_()
    dist.recv(got, other)
    return bool(got.eq(float(other)).all()), more


def _peak_kilobytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_two_ranks_that_send_first_and_only_poll_do_not_deadlock(pool: RankPool) -> None:
    for exchanged, more in pool.run(_both_send_and_nobody_waits, world_size=2):
        assert exchanged
        assert more < 16 << 10  # a message has 32 MB


def _cpu_while_waiting(context: RankContext, seconds: float) -> float:
    context.start("shm")
    dist.barrier()
    if context.rank == 0:
        time.sleep(seconds)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    dist.barrier()
    after = resource.getrusage(resource.RUSAGE_THREAD)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds


def test_waiting_uses_almost_no_cpu_time(pool: RankPool) -> None:
    """Seven ranks that wait for a sleeping one use less than 2 % of a core each."""
    shares = pool.run(_cpu_while_waiting, 2.0, world_size=8, timeout=100)
    assert statistics.median(shares[1:]) < 0.02, shares


# Joining


class TwoRanks:
    """Two ranks of one process that meet to share memory. Rank 0 waits for rank 1, and strangers may come."""

    def __init__(self) -> None:
        self.store = c10d.HashStore()
        self._segments: dict[int, shm_meeting.SharedSegment] = {}
        self._host = threading.Thread(target=self._arrive, args=(0,))
        self._host.start()
        self.meeting = json.loads(Deadline(60).poll(lambda: read(self.store, shm_meeting._KEY)) or b"")

    def _arrive(self, rank: int) -> None:
        info = GroupInfo(rank=rank, size=2, ranks=[0, 1], store=self.store, name="both", timeout=60)
        self._segments[rank] = shm_meeting.share_segment(info, replace)

    def met(self) -> dict[int, shm_meeting.SharedSegment]:
        """Rank 1 comes. Returns what each rank got."""
        self._arrive(1)
        self._host.join(60)
        assert sorted(self._segments) == [0, 1]
        return self._segments


def test_a_connection_without_the_token_is_refused() -> None:
    """A process without the group's token gets nothing, and does not keep the ranks from joining."""
    two = TwoRanks()
    meeting = two.meeting
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(30)
        stranger.connect("\0" + meeting["name"])
        hello = {"token": secrets.token_hex(32), "rank": 1, "name": "stranger", "pid": os.getpid(), "cpus": [0]}
        shm_meeting.send(stranger, hello)
        assert stranger.recv(1000) == b""
    segments = two.met()
    assert os.fstat(segments[0].fd).st_ino == os.fstat(segments[1].fd).st_ino
    for segment in segments.values():
        assert [peer.pid for peer in segment.peers] == [os.getpid()] * 2
        # A program that this process starts does not inherit it.
        assert not any(
            os.get_inheritable(fd) for fd in (segment.fd, *(peer.pidfd for peer in segment.peers)) if fd >= 0
        )
        os.close(segment.fd)


def _hellos(token: str) -> list[tuple[bytes, int]]:
    """What a process of the same user may send instead of a hello, and how many descriptors with it."""
    whole = {"token": token, "rank": 1, "name": "stranger", "pid": 1, "cpus": [0], "quota": None}
    wrong = [{**whole, "token": "0" * 64}, {**whole, "token": "\u00e9\ud800"}, {**whole, "rank": 7}]
    parts = [{key: whole[key] for key in whole if key != left_out} for left_out in whole]
    texts = [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"[" * 60_000,
        b"\xff\xfe",
        *(json.dumps(part).encode() for part in wrong + parts),
    ]
    return [(text, count) for text in texts for count in (1, 3)] + [(json.dumps(wrong[0]).encode(), 253)]


def _least_open_files() -> int:
    """Other threads of this process open and close files, too."""
    counts = []
    for _ in range(20):
        counts.append(_open_files())
        time.sleep(0.01)
    return min(counts)


@pytest.mark.timeout(100)
def test_malformed_hellos_leave_no_descriptors_behind() -> None:
    two = TwoRanks()
    meeting = two.meeting
    token = key_of(two.store).reveal(meeting["name"], meeting["token"])
    before = _least_open_files()
    for text, count in _hellos(token):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(30)
            stranger.connect("\0" + meeting["name"])
            socket.send_fds(stranger, [text], [0] * count)
            with suppress(ConnectionResetError):
                assert stranger.recv(1000) == b"", (text[:80], count)
        assert Deadline(20).poll(lambda: _open_files() <= before or None), (text[:80], count)
    segments = two.met()
    for segment in segments.values():
        os.close(segment.fd)


def _without_pidfds(context: RankContext) -> str:
    """On kernels without pidfds, the lock on the memfd shows that a rank is gone."""
    shm_meeting.own_pidfd = lambda: -1
    context.start("shm")
    dist.all_reduce(torch.ones(3))
    if context.rank == 1:
        os._exit(3)
    try:
        dist.all_reduce(torch.ones(3))
    except dist.errors.PeerLost as error:
        return str(error.rank)
    return "not raised"


def test_a_death_is_seen_without_pidfds(pool: RankPool) -> None:
    ended = pool.try_run(_without_pidfds, world_size=3, timeout=60)
    assert ended[1].kind == "died"
    assert [ended[0].value, ended[2].value] == ["1", "1"]


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _groups_come_and_go(context: RankContext) -> tuple[int, int, int, int]:
    context.start("shm")
    for _ in range(3):
        dist.destroy_process_group(dist.new_group())
    files, threads = _open_files(), threading.active_count()
    for _ in range(GROUPS):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.destroy_process_group(group)
        del work, group
    return files, _open_files(), threads, threading.active_count()


def test_closed_groups_leave_no_descriptors_behind(pool: RankPool) -> None:
    for files, later, threads, later_threads in pool.run(_groups_come_and_go, world_size=2, timeout=60 + GROUPS):
        assert later <= files + 3
        assert later_threads <= threads


def _far_ranks(context: RankContext) -> None:
    dist = context.start("shm")
    for far in (2**32, -(2**32), 2**70):  # a fast path that cut them to 32 bits would take the first two for rank 0
        with pytest.raises(UsageError):
            dist.broadcast(torch.ones(1), far)
        with pytest.raises(UsageError):
            dist.send(torch.ones(1), far + 1)
    dist.barrier()


def test_ranks_beyond_32_bits_are_refused(pool: RankPool) -> None:
    pool.run(_far_ranks, world_size=2)
