"""shm with many ranks and many groups: memory, descriptors, and ranks that die while a group forms."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

import ringway as dist
import ringway._core as _core
from exits import in_child
from few_files import leave_descriptors
from ringway.backends.base import GroupInfo
from ringway.backends.process import Process
from ringway.backends.several.hosts import host_identity
from ringway.backends.shm import join
from ringway.backends.shm import link as links
from ringway.backends.shm.backend import ShmBackend
from ringway.backends.shm.peers import KnownPeers
from ringway.call import ALL_GATHER_SINGLE, ALL_REDUCE, ALL_TO_ALL_SINGLE, RECV, REDUCE_SCATTER_SINGLE, SEND, Call
from ringway.errors import BackendUnavailable, RendezvousError
from ringway.groups.world import world
from ringway.launch.processes import pid_namespace
from ringway.store import Deadline, key_of, read
from ringway.testing import RankContext, RankPool

SOAK = bool(os.environ.get("RINGWAY_SOAK"))
RANKS = 256 if SOAK else 128
SMALL, LARGE = 8, 3000


def _group(store: c10d.Store, rank: int, size: int, timeout: float = 60.0, process: Process | None = None) -> GroupInfo:
    place = {"rank": rank, "size": size, "ranks": list(range(size))}
    return GroupInfo(**place, store=store, name="many", timeout=timeout, process=process or Process())


def _on_threads(work: Callable[[int], None], size: int) -> None:
    """Ranks as threads: processes with torch would be too many for a test."""
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failed, failed[0]
    assert not any(thread.is_alive() for thread in threads)


def _reserved() -> int:
    """The bytes of this process's only segment."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd:ringway " in os.readlink(f"/proc/self/fd/{fd}"):
                return os.stat(f"/proc/self/fd/{fd}").st_blocks * 512
        except OSError:
            continue  # another thread closed it
    raise AssertionError("there is no segment")


def _own_memory() -> int:
    """The bytes of this process's heap and stacks: without the segment, which all ranks share."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("Anonymous:"))


def _every_message(backend: ShmBackend, size: int) -> None:
    """To the next rank, and to the rank half way round: rings and announcements of several pairs."""
    rank, count = backend.rank, 3000
    for step in (1, size // 2):
        sent, got = torch.full((count,), float(rank)), torch.empty(count)
        to, source = (rank + step) % size, (rank - step) % size
        sending = backend.send(Call(SEND, [sent], [], peer=to, size=size, async_op=True))
        backend.recv(Call(RECV, [], [got], peer=source, size=size))
        sending.wait()
        assert got.eq(float(source)).all()


def _every_kind_of_call(backend: ShmBackend, size: int, count: int) -> None:
    rank = float(backend.rank)
    total = size * (size - 1) / 2
    one, all_blocks = torch.full((count,), rank), torch.full((count * size,), rank)
    gathered = torch.empty(count * size)
    backend.all_reduce(Call(ALL_REDUCE, [one], [one]))
    assert one.eq(total).all()
    backend.reduce_scatter_tensor(Call(REDUCE_SCATTER_SINGLE, [all_blocks], [one]))
    assert one.eq(total).all()
    backend.all_gather_into_tensor(Call(ALL_GATHER_SINGLE, [one.fill_(rank)], [gathered]))
    expected = torch.arange(float(size)).repeat_interleave(count)
    assert gathered.equal(expected)
    backend.all_to_all_single(Call(ALL_TO_ALL_SINGLE, [all_blocks], [gathered.zero_()]))
    assert gathered.equal(expected)


def test_a_large_group_takes_little_memory_and_small_calls_take_no_more() -> None:
    store, process, step = c10d.HashStore(), Process(), threading.Barrier(RANKS, timeout=100)
    reserved: list[int] = []
    own: list[int] = []
    files: list[int] = []

    def look(number: int, into: list[int], what: Callable[[], int]) -> None:
        step.wait()
        if number == 0:
            into.append(what())
        step.wait()

    def rank(number: int) -> None:
        torch.full((LARGE,), 1.0).sum()  # the thread's first allocations are not the group's
        look(number, own, _own_memory)
        look(number, files, _files)
        backend = ShmBackend(_group(store, number, RANKS, process=process))
        look(number, reserved, _reserved)
        _every_kind_of_call(backend, RANKS, SMALL)
        look(number, reserved, _reserved)
        _every_message(backend, RANKS)
        look(number, own, _own_memory)
        look(number, files, _files)
        _every_kind_of_call(backend, RANKS, LARGE)
        look(number, reserved, _reserved)
        backend.close()

    _on_threads(rank, RANKS)
    joined, small, large = reserved
    assert small == joined  # eight floats stay in the entries
    assert joined < 25 << 20
    assert joined < large < 60 << 20
    # All that the group costs: the segment, in which the rings of messages are, and the ranks' own memory and threads.
    # A rank has a descriptor of the segment, and one of every process, of which there is one here.
    assert large + own[1] - own[0] < 100 << 20
    assert files[1] - files[0] <= RANKS + 1


def test_what_a_group_reserves_is_bounded() -> None:
    for size, most in ((2, 1 << 20), (8, 2 << 20), (64, 10 << 20), (256, 20 << 20), (512, 70 << 20)):
        fd = _core.shm_create_segment(size)
        assert os.fstat(fd).st_blocks * 512 < most, size
        os.close(fd)


# Descriptors


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _many_groups(context: RankContext, count: int) -> tuple[int, int, int]:
    context.start("shm")
    dist.all_reduce(torch.ones(8), group=dist.new_group())
    files, threads = _files(), len(os.listdir("/proc/self/task"))
    halves = [range(0, context.world_size, 2), range(1, context.world_size, 2)]
    for number in range(count):
        ranks = None if number % 2 else list(halves[context.rank % 2])
        group = dist.new_group(ranks, use_local_synchronization=ranks is not None)
        one = torch.ones(8)
        dist.all_reduce(one, group=group)
        assert one[0] == dist.get_world_size(group)
    return files, _files() - files, len(os.listdir("/proc/self/task")) - threads


def test_a_group_takes_one_descriptor_however_many_ranks_it_has(pool: RankPool) -> None:
    count = 8
    for _, files, threads in pool.run(_many_groups, count, world_size=8, timeout=100):
        assert files <= count
        assert threads <= count


def _within_1024(context: RankContext, count: int) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    _many_groups(context, count)
    return _files()


@pytest.mark.skipif(not SOAK, reason="256 processes; RINGWAY_SOAK=1 runs it")
@pytest.mark.timeout(3600)
def test_256_ranks_hold_64_groups_within_1024_descriptors() -> None:
    with RankPool(256) as ranks:
        assert max(ranks.run(_within_1024, 64, timeout=3500)) < 1024


def _short_of_files(context: RankContext, short: int, spare: int, late: bool) -> tuple[str, str | None]:
    if context.rank == short:
        leave_descriptors(spare)
    elif context.rank == 0 and late:  # the others look meanwhile whether it is alive
        gather = join._Host._gather

        def gather_late(host: join._Host) -> None:
            time.sleep(1)
            gather(host)

        join._Host._gather = gather_late  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailable) as caught:
        ShmBackend(_group(context.store, context.rank, context.world_size))
    return caught.value.reason, caught.value.remedy


@pytest.mark.timeout(50)  # less than the group's timeout: the others must be told
def test_too_few_descriptors_are_named_on_every_rank(pool: RankPool) -> None:
    """Whether rank 0 has too few for itself or for the connections, or another rank for itself, for its connection, or
    for what it is sent (MSG_CTRUNC)."""
    cases = ((0, 0, False), (0, 1, False), (0, 6, False), (3, 0, False), (3, 1, False), (3, 1, True), (3, 4, False))
    for short, spare, late in cases:
        for reason, remedy in pool.run(_short_of_files, short, spare, late, world_size=4, timeout=40):
            assert "files open" in reason, (short, spare, reason)
            assert remedy is not None, reason
            assert "ulimit -n" in remedy
        pool.replace()


def _send_fds(link: socket.socket, count: int) -> None:
    for _ in range(count):
        socket.send_fds(link, [b"."], [0])


def _crowded() -> None:
    """In a process without privileges, which may have no more descriptors in flight than it may have open."""
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.setresuid(65534, 65534, 65534)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    full, drain = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(OSError, match="Too many references"):
        _send_fds(full, 50)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(BackendUnavailable, match=r"in flight.*ulimit -n"):
        links.send(ours, {}, [0], Deadline(0.05))
    threading.Timer(0.1, drain.close).start()
    links.send(ours, {"late": 1}, [0], Deadline(30))
    assert links.receive(theirs, Deadline(30), None)[0] == {"late": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user of a process")
def test_a_rank_waits_while_too_many_descriptors_are_in_flight() -> None:
    assert in_child(_crowded) == 0


# Ranks that die, and stores that are used again


def _dies_before_it_joins(context: RankContext, lost: int) -> tuple[list[int], str]:
    context.start("shm")
    dist.barrier()
    if context.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RendezvousError) as caught:
        ShmBackend(_group(context.store, context.rank, context.world_size, 50, world.process))
    return caught.value.missing, str(caught.value)


@pytest.mark.timeout(45)  # less than the group's timeout: the others must see the death
def test_a_rank_that_dies_before_it_joins_a_second_group_is_named(pool: RankPool) -> None:
    for lost in (0, 2):
        ended = pool.try_run(_dies_before_it_joins, lost, world_size=4, timeout=40)
        assert [outcome.kind for outcome in ended].count("returned") == 3, [str(outcome) for outcome in ended]
        for outcome in ended:
            if outcome.rank != lost:
                missing, text = outcome.value
                assert missing == [lost]
                assert f"rank {lost} (pid " in text


def _ended_process() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def _join_both(store: c10d.Store) -> None:
    _on_threads(lambda rank: ShmBackend(_group(store, rank, 2)).close(), 2)


@pytest.mark.timeout(45)
def test_a_rank_that_dies_on_its_way_to_the_first_group_is_named() -> None:
    """Rank 1 posts its pid and dies. Rank 2 comes after rank 0 has given up, and learns the same."""
    store, pid = c10d.HashStore(), _ended_process()
    store.set("shm/pid/1", json.dumps([pid, pid_namespace()]))
    for rank in (0, 2):
        with pytest.raises(
            RendezvousError, match=rf"rank 1 \(pid {pid}\) ended before the group many had met"
        ) as caught:
            ShmBackend(_group(store, rank, 3))
        assert caught.value.missing == [1]
    _join_both(store)  # what that meeting left behind does not disturb the next one


@pytest.mark.timeout(45)
def test_a_rank_that_dies_between_its_first_message_and_the_segment_is_named() -> None:
    store = c10d.HashStore()
    errors: dict[int, RendezvousError] = {}

    def run(rank: int) -> None:
        try:
            ShmBackend(_group(store, rank, 3)).close()
        except RendezvousError as error:
            errors[rank] = error

    host = threading.Thread(target=run, args=(0,), daemon=True)
    host.start()
    meeting = json.loads(Deadline(30.0).poll(lambda: read(store, join._KEY)) or "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dying:
        dying.connect("\0" + meeting["name"])
        token = key_of(store).reveal(meeting["name"], meeting["token"])
        hello = {"rank": 1, "pid": os.getpid(), "name": "dying", "cpus": [0], "quota": None, "token": token}
        links.send(dying, hello)
    run(2)
    host.join(30)
    assert errors.keys() == {0, 2}
    assert all("rank 1 ended while the group met" in str(error) for error in errors.values()), errors
    assert all(error.missing == [1] for error in errors.values()), errors


@pytest.mark.timeout(45)
def test_a_member_that_dies_while_another_is_late_is_named() -> None:
    store, pid = c10d.HashStore(), _ended_process()
    meeting = join._Host(_group(store, 0, 3))
    meeting._add(1, meeting.hello(), -1)  # it has come, and died since
    store.set("shm/pid/1", json.dumps([pid, pid_namespace()]))
    with pytest.raises(RendezvousError, match=rf"rank 1 \(pid {pid}\) ended") as caught:
        meeting.share(lambda segment: segment)
    assert caught.value.missing == [1]


@pytest.mark.timeout(45)
def test_ranks_that_have_not_introduced_themselves_learn_why_rank_0_gave_up() -> None:
    """Rank 1 is dead. Rank 2 has connected, and rank 0 has not read its first message when it gives up."""
    store, pid = c10d.HashStore(), _ended_process()
    meeting = join._Host(_group(store, 0, 3))
    store.set("shm/pid/1", json.dumps([pid, pid_namespace()]))
    caught: list[BaseException] = []

    def give_up(listener: socket.socket, token: str) -> None:
        late.start()
        while not select.select([listener], [], [], 1)[0]:
            pass
        meeting.check_alive([1])

    def join_late() -> None:
        with pytest.raises(RendezvousError) as raised:
            ShmBackend(_group(store, 2, 3))
        caught.append(raised.value)

    late = threading.Thread(target=join_late, daemon=True)
    meeting._accept_all = give_up  # type: ignore[method-assign]
    with pytest.raises(RendezvousError):
        meeting.share(lambda segment: segment)
    late.join(30)
    assert f"rank 1 (pid {pid}) ended" in str(caught[0])
    assert read(store, join._given_up(2)) is None


@pytest.mark.timeout(45)
def test_a_store_can_be_used_for_a_second_group_of_the_same_name() -> None:
    store = c10d.HashStore()
    _join_both(store)
    assert read(store, join._KEY) is None
    _join_both(store)
    # Rank 0 of an earlier group was killed: the socket that the store names is gone.
    store.set(join._KEY, json.dumps({"name": "ringway-gone", "token": "", "host": host_identity()}))
    late = threading.Thread(target=lambda: ShmBackend(_group(store, 1, 2)).close(), daemon=True)
    late.start()
    time.sleep(0.1)
    ShmBackend(_group(store, 0, 2)).close()
    late.join(30)
    assert not late.is_alive()


def test_a_process_is_known_by_one_descriptor() -> None:
    known, count = KnownPeers(), _files()
    first = known.add("a process", os.getpid(), os.pidfd_open(os.getpid()))
    assert known.add("a process", os.getpid(), os.pidfd_open(os.getpid())) is first
    assert _files() == count + 1
    del first
    assert known.get("a process") is None
    assert _files() == count
