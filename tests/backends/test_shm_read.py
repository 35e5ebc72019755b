"""Large data that ranks read in each other's memory: results, deaths, and kernels that do not allow it."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from shm_programs import run_programs

import ringway as dist
import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.backends.shm.errors import Faults
from ringway.errors import PeerLost
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

PROGRAMS = 500 if os.environ.get("RINGWAY_SOAK") else 8
COUNT = 1 << 19


@contextmanager
def _reading() -> Iterator[None]:
    """Groups that are made inside read every block that is too large for an entry."""
    leave(dist)
    _core.shm_set_read_once_from(1)
    try:
        yield
    finally:
        _core.shm_set_read_once_from(-1)


def _programs(context: RankContext, first: int, count: int) -> None:
    with _reading():
        run_programs(context, first, count)
    leave(dist)


@pytest.mark.timeout(60 + 10 * PROGRAMS)
@pytest.mark.parametrize("size", [2, 4])
def test_random_programs(pool: RankPool, size: int) -> None:
    first = random.randrange(1 << 30)
    print(f"seeds {first} to {first + PROGRAMS - 1}")
    pool.run(_programs, first, PROGRAMS, world_size=size, timeout=50 + 10 * PROGRAMS)


def _all_gather(rank: int, size: int) -> None:
    found = torch.empty(size * COUNT)
    dist.all_gather_into_tensor(found, torch.full((COUNT,), float(rank)))
    assert found.view(size, COUNT).mean(1).tolist() == list(range(size))


def _all_to_all(rank: int, size: int) -> None:
    found = torch.empty(size * COUNT)
    dist.all_to_all_single(found, torch.full((size * COUNT,), float(rank)))
    assert found.view(size, COUNT).mean(1).tolist() == list(range(size))


def _gather(rank: int, size: int) -> None:
    found = [torch.empty(COUNT) for _ in range(size)] if rank == 1 else None
    dist.gather(torch.full((COUNT,), float(rank)), found, 1)
    assert found is None or [each.mean().item() for each in found] == list(range(size))


def _exchange(rank: int, size: int) -> None:
    found = torch.empty(COUNT)
    sent = dist.isend(torch.full((COUNT,), float(rank)), (rank + 1) % size)
    assert dist.recv(found, (rank - 1) % size) == (rank - 1) % size
    assert sent is not None
    sent.wait()
    assert found.mean().item() == (rank - 1) % size


def _all_reduce(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.full((COUNT + 5,), float(rank + 1), dtype=dtype)
        found[-1] = 10 * (rank + 1)
        dist.all_reduce(found)
        total = size * (size + 1) / 2
        assert found[-1].item() == 10 * total
        assert bool((found[:-1] == total).all())


CALLS = [_all_gather, _all_to_all, _gather, _exchange, _all_reduce]


def _in_another_block(context: RankContext) -> None:
    """The input is where the other rank's block goes, or overlaps both."""
    with _reading():
        context.start("shm")
    rank, size = context.rank, context.world_size
    for shift in (COUNT * ((rank + 1) % size), COUNT // 2):
        for _ in range(5):
            out = torch.full((size * COUNT,), float(rank))
            dist.all_gather_into_tensor(out, out[shift : shift + COUNT])
            assert out.view(size, COUNT).mean(1).tolist() == list(range(size))
    leave(dist)


def test_an_input_that_is_another_ranks_block_is_read_before_it_is_written(pool: RankPool) -> None:
    for size in (2, 3):
        pool.run(_in_another_block, world_size=size, timeout=60)


def _uneven(context: RankContext) -> None:
    """Blocks of any size, some empty, some small enough for an entry."""
    with _reading():
        context.start("shm")
    rank, size = context.rank, context.world_size
    for salt in range(12):
        counts = [[((a * 7 + b * 3 + salt) % 4) ** 4 * 1500 for b in range(size)] for a in range(size)]
        sent = torch.cat([torch.full((counts[rank][to],), float(10 * rank + to)) for to in range(size)])
        found = torch.empty(sum(counts[source][rank] for source in range(size)))
        dist.all_to_all_single(found, sent, [counts[source][rank] for source in range(size)], counts[rank])
        right = [torch.full((counts[source][rank],), float(10 * source + rank)) for source in range(size)]
        assert torch.equal(found, torch.cat(right))
    leave(dist)


def test_blocks_of_different_sizes(pool: RankPool) -> None:
    for size in (2, 3, 4):
        pool.run(_uneven, world_size=size, timeout=60)


def _one_rank_reads(context: RankContext) -> int:
    """How many bytes were read in place, though the rank with the number 1 does not read."""
    leave(dist)
    _core.shm_set_read_once_from(1 if context.rank == 0 else 1 << 60)
    context.start("shm")
    _core.shm_set_read_once_from(-1)
    before = _core.shm_bytes_read_once()
    for call in CALLS:
        for _ in range(6):
            call(context.rank, context.world_size)
    leave(dist)
    return _core.shm_bytes_read_once() - before


def test_ranks_read_in_place_only_if_all_do(pool: RankPool) -> None:
    assert pool.run(_one_rank_reads, world_size=2, timeout=60) == [0, 0]


# Messages


def _exchange_of(context: RankContext, count: int) -> None:
    other = 1 - context.rank
    found = torch.empty(count)
    sent = dist.isend(torch.full((count,), float(context.rank)), other)
    dist.recv(found, other)
    assert sent is not None
    sent.wait()
    assert torch.equal(found, torch.full((count,), float(other)))


def _crossing(context: RankContext) -> float:
    """How much of the messages was read in place."""
    with _reading():
        context.start("shm")
    before = _core.shm_bytes_read_once()
    for count in SIZES * 10:
        _exchange_of(context, count)
    read = _core.shm_bytes_read_once() - before
    leave(dist)
    return read / (4 * sum(SIZES) * 10)


SIZES = [20, 30_000, COUNT]  # of messages: one that is small, one that fits the ring, one that does not


def test_messages_that_cross_are_read_in_place(pool: RankPool) -> None:
    """A rank that loses its CPU for long is not waited for, so one attempt is enough."""
    assert any(min(pool.run(_crossing, world_size=2, timeout=60)) > 0.5 for _ in range(50))


def _one_way_after_crossing(context: RankContext) -> None:
    """The receiver comes long after the sender has waited for its message, or has seen that it left."""
    with _reading():
        context.start("shm")
    for number, polls in enumerate([False, True] * 3):
        for _ in range(5):
            _exchange_of(context, 30_000)
        if context.rank == 0:
            sent = [dist.isend(torch.full((each,), float(number)), 1) for each in (30_000, 20, 40_000)]
            for work in sent:
                assert work is not None
                while polls and not work.is_completed():
                    time.sleep(0.001)
                if not polls:
                    work.wait()
            context.store.set(f"sent {number}", "1")
        else:
            context.store.wait([f"sent {number}"])
            for each in (30_000, 20, 40_000):
                found = torch.empty(each)
                dist.recv(found, 0)
                assert torch.equal(found, torch.full((each,), float(number)))
    leave(dist)


def test_a_message_that_fits_the_ring_never_needs_its_receiver(pool: RankPool) -> None:
    pool.run(_one_way_after_crossing, world_size=2, timeout=60)


def _sends_before_receives(context: RankContext) -> None:
    """Both wait for their sends first."""
    with _reading():
        context.start("shm")
    other = 1 - context.rank
    for count in SIZES * 5:
        _exchange_of(context, count)
        sent = [dist.isend(torch.full((count,), float(context.rank + tag)), other, tag=tag) for tag in range(3)]
        for work in sent:
            assert work is not None
            work.wait()
        for tag in (2, 0, 1):
            found = torch.empty(count)
            dist.recv(found, other, tag=tag)
            assert torch.equal(found, torch.full((count,), float(other + tag)))
    leave(dist)


def test_ranks_that_both_wait_for_their_sends(pool: RankPool) -> None:
    pool.run(_sends_before_receives, world_size=2, timeout=60)


def _fill_the_ring(context: RankContext) -> None:
    """The first message and its frame leave no room in the ring of 1 MiB for the frame of the second."""
    with _reading():
        context.start("shm", timeout=timedelta(seconds=20))
    other = 1 - context.rank
    for round_, taken in enumerate([64, 192] * 4):
        for _ in range(5):
            _exchange_of(context, 30_000)
        counts = ((1 << 20) - taken) // 4, 50_000
        sent = [dist.isend(torch.full((count,), float(round_ + context.rank)), other) for count in counts]
        for work in sent:
            assert work is not None
            work.wait()
        for count in counts:
            found = torch.empty(count)
            dist.recv(found, other)
            assert torch.equal(found, torch.full((count,), float(round_ + other)))
    leave(dist)


def test_a_full_ring_and_an_offered_message_behind_it(pool: RankPool) -> None:
    pool.run(_fill_the_ring, world_size=2, timeout=60)


def _leave_at_once(context: RankContext, count: int) -> None:
    """Rank 0 does not wait for its last message, and leaves."""
    with _reading():
        context.start("shm")
    for _ in range(5):
        _exchange_of(context, count)
    if context.rank == 0:
        dist.isend(torch.full((count,), 7.0), 1)
        leave(dist)
    else:
        time.sleep(random.choice([0.0, 0.0001, 0.01]))
        found = torch.empty(count)
        dist.recv(found, 0)
        assert torch.equal(found, torch.full((count,), 7.0))
        leave(dist)


def test_a_message_of_a_rank_that_leaves_arrives_if_it_fits_the_ring(pool: RankPool) -> None:
    for _ in range(5):
        pool.run(_leave_at_once, 100_000, world_size=2, timeout=60)


# Deaths


def _until_one_dies(context: RankContext, call: Callable[[int, int], None], after: float) -> str:
    with _reading():
        context.start("shm")
    if context.rank == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, after)
    try:
        while True:
            call(context.rank, context.world_size)
    except PeerLost as error:
        return str(error)
    finally:
        leave(dist)


@pytest.mark.parametrize("call", CALLS)
def test_the_others_learn_who_died_while_they_read(pool: RankPool, call: Callable[[int, int], None]) -> None:
    for number in range(40 if os.environ.get("RINGWAY_SOAK") else 2):
        after = random.uniform(0.05, 0.1)
        ended = pool.try_run(_until_one_dies, call, after, world_size=2 + number % 2, timeout=60)
        pool.replace()
        assert not ended[0].ok
        for outcome in ended[1:]:
            assert outcome.ok, str(outcome)
            assert "rank 0" in outcome.value
            assert "SIGALRM" in outcome.value or "has ended" in outcome.value, outcome.value


# A kernel that forbids it


def _forbid_reading() -> None:
    """From now on, process_vm_readv fails with EPERM in this process: a seccomp filter."""
    number = {"x86_64": 310, "aarch64": 270}.get(platform.machine())
    if number is None:
        pytest.skip(f"unknown number of process_vm_readv on {platform.machine()}")
    load, jump_if_equal, end = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | 1
    code = [(load, 0, 0, 0), (jump_if_equal, 0, 1, number), (end, 0, 0, refuse), (end, 0, 0, allow)]
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    lines = ctypes.create_string_buffer(program, len(program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, with_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, with_filter, filter_) == 0, os.strerror(ctypes.get_errno())


def _forbidden(context: RankContext, first: bool) -> None:
    """Rank 1 may not read before the group is made, or from then on."""
    if first and context.rank == 1:
        _forbid_reading()
    with _reading():
        context.start("shm")
    if not first and context.rank == 1:
        _forbid_reading()
    for call in CALLS:
        for _ in range(3):
            call(context.rank, context.world_size)
    leave(dist)


@pytest.mark.parametrize("first", [True, False])
def test_ranks_that_may_not_read_copy_through_the_segment(pool: RankPool, first: bool) -> None:
    try:
        pool.run(_forbidden, first, world_size=2, timeout=60)
    finally:
        pool.replace()


def _kernels_page() -> torch.Tensor:
    """A page that the process can read, and that the kernel copies for nobody, like the memory of a device."""
    with open("/proc/self/maps") as maps:
        found = [line for line in maps if line.endswith("[vvar]\n")]
    if not found:
        pytest.skip("this kernel has no [vvar] page")
    page = (ctypes.c_uint8 * 4096).from_address(int(found[0].split("-")[0], 16))
    return torch.frombuffer(page, dtype=torch.uint8)


def _sends_what_cannot_be_read(context: RankContext) -> int:
    with _reading():
        context.start("shm")
    other, page, plain = 1 - context.rank, _kernels_page(), torch.full((4096,), 7, dtype=torch.uint8)
    arrived = 0
    for source in [plain, page] * 20:
        found = torch.empty(4096, dtype=torch.uint8)
        work = dist.isend(source, other)
        dist.recv(found, other)
        work.wait()
        arrived += int(source is page or torch.equal(found, plain))
    leave(dist)
    return arrived


def test_memory_that_the_kernel_does_not_copy_goes_through_the_ring(pool: RankPool) -> None:
    assert pool.run(_sends_what_cannot_be_read, world_size=2, timeout=60) == [40, 40]


def test_the_error_names_both_ranks_and_the_kernels_reason() -> None:
    """tests/native/stress.cpp shows that the engine reports it."""
    group = SimpleNamespace(name="world", rank=0, ranks=(4, 7))
    fault = {"kind": 9, "reporter": 0, "rank": 1, "reason": "Bad address"}
    text = str(Faults(cast(GroupInfo, group)).error(1, fault))
    assert "rank 4 could read the memory of rank 7" in text
    assert "Bad address" in text
