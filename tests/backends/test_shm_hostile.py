"""shm under stress: stopped peers, programs that deadlock, interrupts, threads, no memory, no threads."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway as dist
import ringway._core as _core
from exits import in_child
from interrupts import interrupt_inside
from ringway.call import DTYPE_CODE, SEND, Call
from ringway.errors import BackendUnavailable, CollectiveMismatch, CommTimeout, PeerLost, RingwayError
from ringway.testing import RankContext, RankPool


def _give_up_after(seconds: float, group: Any = None) -> None:
    c10d.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


# Stopped peers


def _stand_still(until: Path, after: float) -> None:
    """Stops this process at an arbitrary instruction, until the file exists."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(after)
        os.kill(parent, signal.SIGSTOP)
        while not until.exists():
            time.sleep(0.01)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)


def _stopped(context: RankContext, folder: str, count: int, after: float) -> tuple[list[int], str]:
    context.start("shm")
    _give_up_after(6.0)
    dist.barrier()
    if context.rank == 2:
        _stand_still(Path(folder) / "seen", after)
    with pytest.raises(CommTimeout) as caught:
        _sum_for_ever(count)
    (Path(folder) / "seen").touch()
    return caught.value.missing, str(caught.value)


def _sum_for_ever(count: int) -> None:
    while True:
        dist.all_reduce(torch.ones(count))


def test_a_stopped_rank_is_named_by_all_others(pool: RankPool, tmp_path: Path) -> None:
    """Also if it stops in the middle of a call and the others wait for it in a chain."""
    for count in (4, 3_000_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        reported = pool.run(_stopped, str(folder), count, random.uniform(0.05, 0.2), world_size=4, timeout=100)
        pool.replace()
        for missing, text in reported:
            assert missing == [2], text


def _crossed(context: RankContext) -> tuple[str, list[int], str]:
    """Two groups that the ranks use in different orders."""
    context.start("shm")
    first, second = dist.new_group(), dist.new_group()
    for group in (first, second):
        _give_up_after(1.0, group)
    with pytest.raises(CommTimeout) as caught:
        dist.all_reduce(torch.ones(3), group=first if context.rank == 0 else second)
    error = caught.value
    dist.all_reduce(torch.ones(3))  # the world stays usable
    return str(error.op), error.missing, str(error)


def test_groups_used_in_a_different_order_time_out_with_names(pool: RankPool) -> None:
    reported = pool.run(_crossed, world_size=2, timeout=60)
    assert [missing for _, missing, _ in reported] == [[1], [0]]
    assert all("test_shm_hostile.py" in text and op == "all_reduce" for op, _, text in reported)


# Interrupts


def _interrupted(context: RankContext, what: str) -> str:
    context.start("shm")
    dist.barrier()
    if context.rank == 1:
        context.store.wait(["interrupted"])
        with pytest.raises(PeerLost) as lost:
            dist.barrier()
        return str(lost.value)
    calls: dict[str, Callable[[], Any]] = {
        "barrier": dist.barrier,
        "queued": lambda: (dist.all_reduce(torch.ones(3), async_op=True), dist.barrier()),
        "send": lambda: dist.send(torch.ones(3_000_000), 1),  # more than the ring holds, so a part of it has gone
    }
    interrupt_inside("send" if what == "send" else "barrier")
    with pytest.raises(KeyboardInterrupt):
        calls[what]()
    context.store.set("interrupted", "")
    with pytest.raises(RingwayError) as ended:
        dist.barrier()
    return str(ended.value)


@pytest.mark.parametrize("what", ["barrier", "queued", "send"])
def test_an_interrupt_ends_the_call_and_the_group(pool: RankPool, what: str) -> None:
    reported = pool.run(_interrupted, what, world_size=2, timeout=60)
    pool.replace()
    for text in reported:
        assert "rank 0 was interrupted in the middle of a call" in text


def _interrupted_receive(context: RankContext) -> list[float]:
    context.start("shm")
    dist.barrier()
    first, second = torch.zeros(3), torch.zeros(3)
    if context.rank == 0:
        interrupt_inside("recv")
        with pytest.raises(KeyboardInterrupt):
            dist.recv(first, 1)
        context.store.set("taken back", "")
        dist.recv(second, 1)
    else:
        context.store.wait(["taken back"])
        dist.send(torch.ones(3), 0)
    dist.barrier()
    return [*first.tolist(), *second.tolist()]


def test_an_interrupted_receive_does_not_take_the_next_message(pool: RankPool) -> None:
    assert pool.run(_interrupted_receive, world_size=2, timeout=60)[0] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


# Threads


def _many_threads(context: RankContext) -> list[str]:
    context.start("shm")
    size, other = context.world_size, 1 - context.rank
    wrong: list[str] = []

    def sums() -> None:
        for number in range(40):  # all of one size, because calls of different threads may match in any order
            tensor = torch.ones(1000)
            dist.all_reduce(tensor)
            if not tensor.eq(size).all():
                wrong.append(f"sum {number}: {tensor[:3].tolist()}")

    def messages(tag: int) -> None:
        for number in range(40):
            count = 50_000 if number % 5 == 0 else 10
            got = torch.zeros(count)
            sent = dist.isend(torch.full((count,), float(100 * tag + number)), other, tag=tag)
            dist.recv(got, other, tag=tag)
            assert sent is not None
            sent.wait()
            if not got.eq(100 * tag + number).all():
                wrong.append(f"message {number} of tag {tag}: {got[:3].tolist()}")

    threads = [threading.Thread(target=sums) for _ in range(3)]
    threads += [threading.Thread(target=messages, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    return wrong


def test_threads_share_a_group(pool: RankPool) -> None:
    assert pool.run(_many_threads, world_size=2, timeout=120) == [[], []]


# Closing


def _end_under_way(context: RankContext, how: str) -> list[str]:
    context.start("shm")
    group = dist.new_group()
    dist.barrier(group=group)
    if context.rank == 1:
        context.store.wait(["ended"])
        with pytest.raises(PeerLost) as lost:
            dist.all_reduce(torch.ones(100_000), group=group)
        return [str(lost.value)]
    works = [dist.all_reduce(torch.ones(100_000), group=group, async_op=True) for _ in range(3)]
    works.append(dist.irecv(torch.ones(3), 1, group=group))
    began = time.monotonic()
    if how == "destroy":
        dist.destroy_process_group(group)
    else:
        c10d.distributed_c10d._abort_process_group(group)
    texts = []
    for work in works:
        assert work is not None
        with pytest.raises(RingwayError) as ended:
            work.wait()
        assert work.is_completed()
        texts.append(str(ended.value))
    assert time.monotonic() - began < 20
    context.store.set("ended", "")
    dist.destroy_process_group(group)  # again, which does nothing
    return texts


@pytest.mark.parametrize("how", ["destroy", "abort"])
def test_a_group_can_be_closed_with_calls_in_flight(pool: RankPool, how: str) -> None:
    ours, theirs = pool.run(_end_under_way, how, world_size=2, timeout=60)
    assert len(ours) == 4
    assert "rank 0" in theirs[0]
    assert ("aborted" if how == "abort" else "closed") in theirs[0]


# No memory, no threads


@contextmanager
def _little_memory() -> Iterator[None]:
    """Less than 8 MB of address space is left: too little for a segment or a thread's stack."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), before[1]))
    taken: list[mmap.mmap] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(mmap.mmap(-1, 8 << 20))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _cannot_map(context: RankContext) -> str:
    importlib.import_module("ringway.backends.shm.backend")  # needs memory itself
    try:
        with _little_memory() if context.rank == 1 else nullcontext():
            context.start("shm")
    except BackendUnavailable as error:
        return str(error)
    return "no error"


def test_a_rank_that_cannot_map_the_segment_is_an_error_on_all(pool: RankPool) -> None:
    pool.replace()  # ranks keep their group, and this test needs a new one
    reported = pool.run(_cannot_map, world_size=3, timeout=60)
    pool.replace()
    for rank, text in enumerate(reported):
        assert "could not map a shared segment of" in text
        assert text.count("Raise the memory limit") == 1
        assert ("rank 1: " in text) == (rank != 1)


def _no_thread(context: RankContext, message: bool) -> str | None:
    """What the rank is told. None if another thread of this process ended meanwhile and left its stack to a new one."""
    context.start("shm")
    dist.barrier()
    asleep, tensor = threading.Event(), torch.ones(2)
    threads: set[str] = set()
    try:
        with _little_memory() if context.rank == 0 else nullcontext():
            if context.rank == 0:
                _use_up_old_stacks(asleep)
                threads = set(os.listdir("/proc/self/task"))
            if message and context.rank == 0:
                dist.irecv(tensor, 1).wait()
            else:
                dist.all_reduce(tensor, async_op=True).wait()
    except RingwayError as error:
        return str(error)
    else:
        return "no error" if threads <= set(os.listdir("/proc/self/task")) else None
    finally:
        asleep.set()


def _use_up_old_stacks(asleep: threading.Event) -> None:
    """The C library reuses the stacks of ended threads."""
    try:
        while True:
            threading.Thread(target=asleep.wait, daemon=True).start()
    except RuntimeError:
        pass


@pytest.mark.parametrize("message", [False, True])
def test_no_thread_for_asynchronous_calls_is_an_error_everywhere(pool: RankPool, message: bool) -> None:
    for _ in range(5):
        reported = pool.run(_no_thread, message, world_size=2, timeout=60)
        pool.replace()
        if reported[0] is not None:
            break
    for text in reported:
        assert "rank 0 could not start the thread" in str(text)


def _few_threads(context: RankContext) -> list[float]:
    """One more thread can be started, on the stack of one that has ended; then none."""
    values, measured = torch.arange(1 << 20, dtype=torch.float32), []
    array, none = (values.data_ptr(), DTYPE_CODE[torch.float32]), (0, DTYPE_CODE[torch.float32])
    asleep, last = threading.Event(), threading.Event()
    with _little_memory():
        ending = threading.Thread(target=last.wait, daemon=True)
        with suppress(RuntimeError):
            ending.start()
        _use_up_old_stacks(asleep)
        last.set()
        measured.append(_core.pack_measure((0, 0, 0), array, none, values.numel(), 4))
    asleep.set()
    measured.append(_core.pack_measure((0, 0, 0), array, none, values.numel(), 1))
    return measured


def test_threads_that_cannot_be_started_are_done_without(pool: RankPool) -> None:
    pool.replace()
    measured = pool.run(_few_threads, world_size=1, timeout=60)[0]
    pool.replace()
    assert measured[0] == measured[1]


def _one_helper() -> None:
    """In a process without privileges, which may start one thread more."""
    values = torch.arange(1 << 20, dtype=torch.float32)
    array, none = (values.data_ptr(), DTYPE_CODE[torch.float32]), (0, DTYPE_CODE[torch.float32])
    expected = _core.pack_measure((0, 0, 0), array, none, values.numel(), 1)
    unused = 1_999_999_999  # a user without other processes, which would count
    os.setresuid(unused, unused, unused)
    threads = len(os.listdir("/proc/self/task")) + 1
    resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
    assert _core.pack_measure((0, 0, 0), array, none, values.numel(), 4) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user of a process")
def test_the_first_of_several_threads_ends_if_the_second_cannot_be_started() -> None:
    assert in_child(_one_helper) == 0


def _no_responder(context: RankContext) -> tuple[str, set[int]]:
    asleep, refused, recorder = threading.Event(), "", _core.Recorder(16)
    with _little_memory():
        _use_up_old_stacks(asleep)
        try:
            _core.Responder(recorder, "127.0.0.1", "x" * 32, "{}")
        except RuntimeError as error:
            refused = str(error)
    asleep.set()
    return refused, signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_responder_without_a_thread_blocks_no_signals(pool: RankPool) -> None:
    pool.replace()
    refused, blocked = pool.run(_no_responder, world_size=1, timeout=60)[0]
    pool.replace()
    assert blocked == set()
    assert "the responder cannot start its thread" in refused


def _tiny_dev_shm(context: RankContext) -> float:
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x20000, 0x44000
    mine = libc.unshare(new_mounts) == 0 and libc.mount(b"none", b"/", None, private, None) == 0
    if not mine or libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=64k") != 0:
        return -1.0
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 10
    context.start("shm")
    tensor = torch.ones(4_000_000)
    dist.all_reduce(tensor)
    return float(tensor.sum())


def test_dev_shm_may_be_tiny(pool: RankPool) -> None:
    """A container has 64 MB in /dev/shm; these ranks have 64 KB."""
    pool.replace()
    reported = pool.run(_tiny_dev_shm, world_size=2, timeout=60)
    pool.replace()
    if -1.0 in reported:
        pytest.skip("mounting needs a privilege that is not here")
    assert reported == [8_000_000.0] * 2


# Messages


def _long_names(context: RankContext, name: str) -> str:
    context.start("shm")
    program = compile(f"dist.all_reduce(torch.ones({3 + context.rank}))", name, "exec")
    with pytest.raises(CollectiveMismatch) as caught:
        exec(program, {"dist": dist, "torch": torch})
    return str(caught.value)


def test_names_can_be_truncated_in_the_middle_of_a_character(pool: RankPool) -> None:
    for extra in range(3):
        name = "/data/" + "x" * extra + "日本語" * 30 + "/train.py"
        for text in pool.run(_long_names, name, world_size=2):
            assert text.count("語/train.py:1") == 2
        pool.replace()


def test_a_message_to_the_sender_itself_is_refused(pool: RankPool) -> None:
    for texts in pool.run(_to_oneself, world_size=2):
        assert texts == ["ValueError", "UsageError", "UsageError"]


def _to_oneself(context: RankContext) -> list[str]:
    context.start("shm")
    found = []
    for call in (c10d.send, dist.send, dist.recv):
        try:
            call(torch.ones(2), context.rank)
        except ValueError as error:
            found.append(type(error).__name__)
    dist.barrier()
    return found


def _refers_to_nothing(context: RankContext) -> str:
    """A message by reference, which only a receive of device memory takes."""
    context.start("shm", group_name="refers to nothing")
    if context.rank == 0:
        call = Call(SEND, inputs=[torch.ones(40)], peer=1, size=2, ranks=[0, 1])
        dist.communicator().backend._native.message(call, 5.0, bytes(128))
        return ""
    with pytest.raises(RingwayError) as caught:
        dist.recv(torch.ones(40), 0)
    return str(caught.value)


def test_a_message_by_reference_is_refused_on_the_cpu(pool: RankPool) -> None:
    _, said = pool.run(_refers_to_nothing, world_size=2)
    assert "rank 0 corrupted the shared memory" in said
