"""`shm` for CUDA tensors, on a stand-in for the driver. docs/proofs/shm_cuda.md has what was seen on a GPU."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import shm_programs
import torch
from scripted_cuda import build_stand_in

from ringway import call as ops
from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost, RingwayError
from ringway.observe.recorder import RecordedCall, recent_calls
from ringway.store import Deadline
from ringway.testing import RankContext, RankPool
from ringway.testing.conformance import Report, Setting, all_cases, run_setting

HERE = Path(__file__).parent
BACKEND = "shm_stand_in"
SOAK = os.environ.get("RINGWAY_SOAK") == "1"
SOME = [
    *("broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_to_all_single_uneven"),
    *("input_is_a_slice_of_output", "output_is_a_slice_of_input", "all_to_all_in_place_is_right_or_refused"),
    *("every_op_in_flight_at_once", "many_in_flight", "both_send_first", "all_reduce_coalesced"),
]
"""The conformance cases of a short run."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Ranks whose CUDA driver is the stand-in."""
    library = build_stand_in(tmp_path_factory.mktemp("driver"), "cuda_ipc_stand_in")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGWAY_TEST_CUDA", str(library))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
        with RankPool(3, preload=["stand_in_cuda"]) as pool:
            yield pool


def _backend(dist: Any) -> Any:
    return dist.communicator().devices.first


@pytest.mark.processes
def test_conformance_on_the_stand_in(ranks: RankPool) -> None:
    """Every case, with every call direct that can be. The tensors are not in device memory, so all are staged."""
    report = Report()
    cases = list(all_cases()) if SOAK else SOME
    run_setting(ranks, Setting(BACKEND, 3, every=3 if SOAK else 61), cases, report)
    assert not report.findings, str(report)
    assert len(report.seconds) == len(cases)


def _several_groups(context: RankContext) -> list[float]:
    """Calls of three groups in one order, on streams that share a queue. Rank 2 comes only when rank 0 waits for it."""
    dist = context.start(BACKEND)
    groups = {name: (dist.new_group(ranks), ranks) for name, ranks in (("A", [0, 1, 2]), ("B", [0, 2]), ("C", [0, 1]))}
    for group, ranks in groups.values():
        if context.rank in ranks:
            dist.all_reduce(torch.ones(4), group=group)  # the first call of a group waits for all ranks
    found, works = [], []
    if context.rank == 2:
        context.store.wait(["rank 0 waits"])
    elif context.rank == 0:
        threading.Timer(0.3, lambda: context.store.set("rank 0 waits", "")).start()
    for name in ("A", "C", "B"):
        group, ranks = groups[name]
        if context.rank in ranks:
            tensor = torch.full((4,), context.rank + 1.0)
            works.append((tensor, dist.all_reduce(tensor, group=group, async_op=name != "C")))
    for tensor, work in works:
        if work is not None:
            work.wait()
        found.append(tensor[0].item())
    return found


def test_calls_of_several_groups_keep_one_order(ranks: RankPool) -> None:
    assert ranks.run(_several_groups, world_size=3, timeout=60) == [[6.0, 3.0, 4.0], [6.0, 3.0], [6.0, 4.0]]


def _interrupted_before_its_turn(context: RankContext) -> list[str]:
    """Rank 0's call of B has met, and waits for its call of A, which rank 2 does not make, when Ctrl-C comes."""
    dist = context.start(BACKEND)
    a, b = dist.new_group([0, 2]), dist.new_group([0, 1])
    for group, ranks in ((a, [0, 2]), (b, [0, 1])):
        if context.rank in ranks:
            dist.all_reduce(torch.ones(4), group=group)  # the first call of a group waits for all ranks
    told: list[str] = []
    if context.rank == 2:
        context.store.wait(["interrupted"])
        return told
    if context.rank == 0:
        dist.all_reduce(torch.ones(4), group=a, async_op=True)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            dist.all_reduce(torch.ones(4), group=b)
        except KeyboardInterrupt:
            told.append("interrupted")
            context.store.set("interrupted", "")
    try:
        for _ in range(2):
            dist.all_reduce(torch.ones(4), group=b, async_op=True).wait()
            dist.settled()
    except RingwayError as error:
        told.append(str(error))
    return told


def test_ctrl_c_before_a_calls_turn_ends_the_group(ranks: RankPool) -> None:
    first, second, _ = ranks.run(_interrupted_before_its_turn, world_size=3, timeout=60)
    assert first[0] == "interrupted"
    assert "interrupted by KeyboardInterrupt in the middle of a call" in first[1]
    assert "rank 0 aborted the group" in second[0]
    ranks.replace()


def _closed_twice(context: RankContext) -> list[float]:
    """Rank 0 closes the group in two threads, while rank 2 has not broadcast yet."""
    import stand_in_cuda

    dist = context.start(BACKEND, group_name="closed twice")
    dist.all_reduce(torch.ones(4))
    kernel = stand_in_cuda.KERNEL(lambda _: context.store.wait(["closing"]))
    if context.rank == 2:
        stand_in_cuda.library().stand_in_launch(8, kernel, 0)
    tensor = torch.full((4,), float(context.rank))
    work = dist.broadcast(tensor, 2, async_op=True)
    if context.rank == 0:
        communicator = dist.communicator()
        link = _backend(dist)._link
        while link.drain(0.01):
            pass  # the call is not launched yet
        closers = [threading.Thread(target=communicator.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        time.sleep(0.5)  # both are in the middle of it
        context.store.set("closing", "")
        for closer in closers:
            closer.join()
        return [2.0]
    work.wait()
    return tensor.unique().tolist()


def test_closing_in_two_threads_frees_no_other_rank(ranks: RankPool) -> None:
    assert ranks.run(_closed_twice, world_size=3, timeout=60) == [[2.0]] * 3
    ranks.replace()


def _in_device_memory(context: RankContext) -> list[Any]:
    import stand_in_cuda

    dist = context.start(BACKEND)
    size, driver = context.world_size, stand_in_cuda.library()
    tensor = stand_in_cuda.in_device_memory(1000, torch.float32)
    dist.all_reduce(tensor.fill_(context.rank + 1))
    backend = _backend(dist)
    staged = []
    backend._stage = lambda *given: staged.append(given)
    dist.all_reduce(tensor)
    seen: list[Any] = [tensor.unique().tolist(), backend.why_host, len(staged)]
    # Memory is freed and allocated again at the same addresses while the others still have it mapped.
    for step in range(150):
        tensor = stand_in_cuda.in_device_memory(5000, torch.float32)
        dist.all_reduce(tensor.fill_(context.rank + step))
        assert tensor.unique().tolist() == [sum(rank + step for rank in range(size))], step
        address = tensor.data_ptr()
        del tensor
        if step % 3:
            driver.cuMemFree_v2(address)
    seen.append(driver.stand_in_opened())
    dist.destroy_process_group()
    seen.append(driver.stand_in_opened())
    return seen


@pytest.mark.processes
@pytest.mark.timeout(500 if SOAK else 120)
def test_random_programs_on_the_stand_in(ranks: RankPool) -> None:
    first = random.randrange(1 << 30)
    print(f"seeds from {first}")
    count = 300 if SOAK else 6
    ranks.run(shm_programs.run_programs, first, count, False, BACKEND, world_size=3, timeout=100 + count)


def test_device_memory_is_mapped_once_and_given_back(ranks: RankPool) -> None:
    for seen in ranks.run(_in_device_memory, world_size=3):
        assert seen[:3] == [[18.0], "", 0], "the ranks share device memory, and nothing was staged"
        assert seen[3] <= 2 * 64, "each of two peers has at most 64 mappings here"
        assert seen[4] == 0, "all are closed with the group"


def _asynchronous(context: RankContext) -> None:
    """Many calls in flight, direct ones and ones through the host (bool), in one order."""
    dist = context.start(BACKEND)
    size, works = context.world_size, []
    for step in range(40):
        total = torch.full((100,), float(context.rank + step))
        gathered = torch.empty(50 * size)
        either = torch.tensor([context.rank == step % size])
        works.append((dist.all_reduce(total, async_op=True), total, sum(range(size)) + size * step))
        works.append(
            (dist.all_gather_into_tensor(gathered, torch.full((50,), float(step)), async_op=True), gathered, step)
        )
        works.append((dist.all_reduce(either, op=dist.ReduceOp.MAX, async_op=True), either, True))
        if step % 10 == 9:
            now = torch.ones(7)
            dist.all_reduce(now)
            assert now.unique().tolist() == [size]
    for work, tensor, expected in works:
        work.wait()
        assert tensor.unique().tolist() == [expected]


def test_asynchronous_calls_keep_their_order(ranks: RankPool) -> None:
    ranks.run(_asynchronous, world_size=3)


def _no_sharing(context: RankContext, whose: int) -> str:
    import stand_in_cuda

    driver = stand_in_cuda.library()
    driver.stand_in_refuse(int(context.rank == whose))
    try:
        dist = context.start(BACKEND, group_name=f"refused by {whose}")
        total = torch.full((10,), context.rank + 1.0)
        dist.all_reduce(total)
        assert total.unique().tolist() == [6.0]
        why: str = _backend(dist).why_host
        return why
    finally:
        driver.stand_in_refuse(0)


def test_without_shared_device_memory_calls_go_through_the_host(ranks: RankPool) -> None:
    for why in ranks.run(_no_sharing, 1, world_size=3):
        assert why.startswith("rank 1 cannot share device memory"), "every rank knows who, and why"


def _arranged(context: RankContext, gpus: int, mps: bool) -> list[tuple[int, int]]:
    """The kernels that this rank launched for an all_reduce and for a broadcast, of shared memory and of staged."""
    import stand_in_cuda

    driver, size = stand_in_cuda.library(), context.world_size
    driver.stand_in_mps(int(mps))
    driver.stand_in_gpu(context.rank % gpus)
    try:
        dist = context.start(BACKEND, group_name=f"on {gpus} GPUs, MPS {mps}")
        backend, launched = _backend(dist), []
        for tensor in (stand_in_cuda.in_device_memory(1001, torch.int32), torch.empty(1001, dtype=torch.int32)):
            counts = [len(backend.device._kernels)]
            dist.all_reduce(tensor.fill_(context.rank + 1))
            assert tensor.unique().tolist() == [size * (size + 1) // 2]
            counts.append(len(backend.device._kernels))
            for source in (tensor, tensor[1:], tensor.view(torch.uint8)[3:]):  # no two are equally aligned
                dist.broadcast(source.fill_(context.rank), 1)
                assert source.unique().tolist() == [1]
            dist.broadcast(tensor[:0], 1)
            counts.append(len(backend.device._kernels))
            launched.append((counts[1] - counts[0], counts[2] - counts[1]))
        dist.destroy_process_group()
        return launched
    finally:
        driver.stand_in_mps(0)
        driver.stand_in_gpu(0)


@pytest.mark.parametrize(
    ("gpus", "mps", "expected"),
    [
        (1, False, [(1, 0), (0, 3), (0, 0)]),  # one rank reduces for all, and the root writes to all
        (1, True, [(1, 0), (1, 3), (1, 0)]),
        (3, False, [(1, 0), (1, 0), (1, 0)]),
        (2, True, [(1, 0), (1, 0), (1, 0)]),
    ],
)
def test_who_does_the_work(ranks: RankPool, gpus: int, mps: bool, expected: list[tuple[int, int]]) -> None:
    for launched, each in zip(ranks.run(_arranged, gpus, mps, world_size=3), expected, strict=True):
        assert launched == [each, each]


def _on_the_fast_path(context: RankContext, gpus: int, mps: bool) -> None:
    """Every op of the path, between calls on the general path, which are not in device memory and so are staged."""
    import stand_in_cuda

    driver, size, rank = stand_in_cuda.library(), context.world_size, context.rank
    driver.stand_in_mps(int(mps))
    driver.stand_in_gpu(rank % gpus)
    try:
        dist = context.start(BACKEND, group_name=f"fast on {gpus} GPUs, MPS {mps}")
        backend, staged = _backend(dist), torch.ones(3)
        dist.all_reduce(staged)

        def run(op: Any, output: Any, given: Any = None, peer: int = -1) -> Any:
            assert backend._path.run(op.code, output, given, peer, False, 0, 0) is True, op.name
            assert backend._link.drain(60)
            return output

        everyone = sum(range(1, size + 1))
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            for count in (1, 63, 1000):
                one = stand_in_cuda.in_device_memory(count, dtype).fill_(rank + 1)
                all_of_them = stand_in_cuda.in_device_memory(count * size, dtype)
                assert run(ops.ALL_REDUCE, one).unique().tolist() == [everyone]
                dist.all_reduce(staged.fill_(1))
                assert staged.tolist() == [size] * 3
                for shifted in (one, one[1:], all_of_them[: 2 * (count // 2)]):
                    if shifted.numel():
                        run(ops.BROADCAST, shifted.fill_(rank + 5), peer=1)
                        assert shifted.unique().tolist() == [6]
                one.fill_(rank + 1)
                gathered = run(ops.ALL_GATHER_SINGLE, all_of_them, one).view(size, count)
                assert gathered[:, 0].tolist() == list(range(1, size + 1))
                all_of_them.view(size, count)[rank] = 9  # in place
                run(ops.ALL_GATHER_SINGLE, all_of_them, all_of_them.view(size, count)[rank])
                assert all_of_them.unique().tolist() == [9]
                all_of_them.view(size, count).copy_(torch.arange(size).view(size, 1) + rank)
                scattered = run(ops.REDUCE_SCATTER_SINGLE, one, all_of_them)
                assert scattered.unique().tolist() == [size * rank + everyone - size]
                exchanged = stand_in_cuda.in_device_memory(count * size, dtype)
                all_of_them.view(size, count).copy_(torch.arange(size).view(size, 1) + 10 * rank)
                run(ops.ALL_TO_ALL_SINGLE, exchanged, all_of_them)
                assert exchanged.view(size, count)[:, 0].tolist() == [10 * other + rank for other in range(size)]
                run(ops.REDUCE, one.fill_(rank + 1), one, peer=2)
                assert one.unique().tolist() == [everyone if rank == 2 else rank + 1]
                blocks, root = list(all_of_them.view(size, count)), rank == 1
                run(ops.GATHER, blocks if root else None, one.fill_(rank + 1), peer=1)
                if root:
                    assert all_of_them.view(size, count)[:, -1].tolist() == list(range(1, size + 1))
                    all_of_them.view(size, count)[:] = torch.arange(size).view(size, 1) + 3
                run(ops.SCATTER, one, blocks if root else None, peer=1)
                assert one.unique().tolist() == [rank + 3]
                run(ops.SEND, one.fill_(rank + 7), one, peer=(rank + 1) % size)
                run(ops.RECV, one, one, peer=(rank - 1) % size)
                assert one.unique().tolist() == [(rank - 1) % size + 7]
        floats = stand_in_cuda.in_device_memory(3 * size, torch.float32)
        refused = [
            (ops.ALL_REDUCE, torch.ones(3), None, "cannot be shared"),
            (ops.ALL_REDUCE, floats.view(torch.bool)[:3], None, "has no kernel"),
            (ops.ALL_TO_ALL_SINGLE, floats, floats, "in place"),
            (ops.ALL_GATHER_SINGLE, floats, floats[1:4] if rank else floats[2:5], "overlaps"),
            (ops.REDUCE_SCATTER_SINGLE, floats[1:4], floats, "overlaps"),
            (ops.SEND, floats, floats, "names no rank"),
        ]
        for op, output, given, why in refused:
            if size == 3:
                assert backend._path.run(op.code, output, given, -1, False, 0, 0) is False, why
        name = dist.communicator().name

        def open_calls() -> list[RecordedCall]:
            return [call for call in recent_calls(60) if call.group == name and call.state == "issued"]

        assert Deadline(60).poll(lambda: not open_calls() or None), open_calls()
        assert {call.state for call in recent_calls(60) if call.group == name} == {"completed"}
        dist.destroy_process_group()
    finally:
        driver.stand_in_mps(0)
        driver.stand_in_gpu(0)


@pytest.mark.parametrize(("gpus", "mps"), [(1, False), (1, True), (3, False)])
def test_direct_calls_on_the_fast_path(ranks: RankPool, gpus: int, mps: bool) -> None:
    ranks.run(_on_the_fast_path, gpus, mps, world_size=3, timeout=120)


def _messages(context: RankContext) -> list[Any]:
    """Messages by value and by reference: before the ranks have met, beyond the free blocks, and in other order."""
    import stand_in_cuda

    def tensor(count: int, value: float = 0) -> torch.Tensor:
        return stand_in_cuda.in_device_memory(count, torch.float32).fill_(value)

    dist = context.start(BACKEND, group_name="messages")
    backend, sends = _backend(dist), context.rank == 0
    early, late = tensor(500_000, 1), tensor(3000, 2)
    works = [dist.isend(early, 1)] if sends else [dist.irecv(early.zero_(), 0), dist.irecv(late.zero_(), 0, tag=5)]
    dist.all_reduce(torch.ones(3))  # the ranks meet
    if sends:
        works.append(dist.isend(late, 1, tag=5))
    for work in works:
        work.wait()
    seen: list[Any] = [early.unique().tolist(), late.unique().tolist()]
    for count in (10, 5000, 100_000):
        several = [tensor(count, number) for number in range(40)]
        for number in range(40) if sends else range(39, -1, -1):
            (dist.send if sends else dist.recv)(
                several[number] if sends else several[number].zero_(), 1 - context.rank, tag=number
            )
        seen.append([one.unique().tolist() for one in several] == [[number] for number in range(40)])
        op = ops.SEND if sends else ops.RECV
        for number, one in enumerate(several):
            one.fill_(number if sends else -1)
        for one in several:
            done = backend._path.run(op.code, one, one, 1 - context.rank, False, 0, 0)
            if not done:  # without a free block, a message that is not small needs the general path
                assert sends
                dist.send(one, 1)
        assert backend._link.drain(60)
        seen.append([one.unique().tolist() for one in several] == [[number] for number in range(40)])
    last = tensor(70_000, 9 if sends else 0)
    if sends:
        dist.send(last, 1)
    else:
        context.store.wait(["rank 0 leaves"])
        dist.recv(last, 0)
    seen.append(last.unique().tolist())
    if sends:
        threading.Timer(0.3, lambda: context.store.set("rank 0 leaves", "")).start()
    dist.destroy_process_group()
    return seen


def test_messages_by_value_and_by_reference(ranks: RankPool) -> None:
    for seen in ranks.run(_messages, world_size=2, timeout=100):
        assert seen == [[1.0], [2.0], *[True] * 6, [9.0]]


class FastRank:
    """A rank whose calls go through the fast path, on streams that the test chooses."""

    def __init__(self, context: RankContext, name: str, direct: bool = True) -> None:
        self.dist = context.start(BACKEND, group_name=name)
        self.dist.all_reduce(torch.ones(3))
        self.backend = _backend(self.dist)
        if not direct:
            self.backend._from = [1 << 40] * len(ops.OPS)
            self.backend._attach_path()

    def run(self, op: Any, tensor: torch.Tensor, peer: int = -1, tag: int = 0, stream: int = 7) -> bool:
        self.backend.device.stream = stream
        return bool(self.backend._path.run(op.code, tensor, tensor, peer, False, tag, 0))

    def tensor(self, value: float, count: int = 100) -> torch.Tensor:
        import stand_in_cuda

        return stand_in_cuda.in_device_memory(count, torch.float32).fill_(value)

    def busy(self, seconds: float, then: Callable[[], object] = lambda: None, stream: int = 7) -> None:
        """Occupies a stream."""
        self.backend.device.stream = stream
        self.backend.device.enqueue(lambda: (time.sleep(seconds), then()))  # type: ignore[func-returns-value]


def _message_between_calls(context: RankContext) -> list[list[float]]:
    """A call on one stream, which is busy; a message and another call on the next one."""
    import stand_in_cuda

    stand_in_cuda.library().stand_in_mps(1)  # so that each rank reduces a share
    rank = FastRank(context, "message between calls")
    first, second, message = rank.tensor(0), rank.tensor(10 + context.rank), rank.tensor(0)
    rank.busy(0.4 if context.rank == 0 else 0.0, lambda: first.fill_(1 + context.rank))
    if context.rank == 1:
        assert rank.run(ops.SEND, message.fill_(7), 0)
    assert rank.run(ops.ALL_REDUCE, first)
    if context.rank == 0:
        assert rank.run(ops.RECV, message, 1, stream=9)
    assert rank.run(ops.ALL_REDUCE, second, stream=9)
    assert rank.backend._link.drain(60)
    stand_in_cuda.library().stand_in_mps(0)
    return [tensor.unique().tolist() for tensor in (first, second, message)]


def test_a_message_does_not_break_the_order_of_calls(ranks: RankPool) -> None:
    assert ranks.run(_message_between_calls, world_size=2) == [[[3.0], [21.0], [7.0]]] * 2


def _through_bounce_memory(context: RankContext) -> list[float]:
    """A small message that is still on its way to the device while the next small call runs."""
    rank = FastRank(context, "bounce", direct=False)
    small, message = rank.tensor(1), rank.tensor(7)
    assert rank.run(ops.ALL_REDUCE, small)
    if context.rank == 1:
        assert rank.run(ops.SEND, message, 0)
    else:
        rank.busy(0.4, stream=9)
        assert rank.run(ops.RECV, message.zero_(), 1, stream=9)
    assert rank.run(ops.ALL_REDUCE, small.fill_(1))
    rank.busy(0.0, stream=9)
    for stream in (7, 9):
        rank.backend.device.order(small, rank.backend.device.mark(stream))
    return [float(small[0]), float(message[0])]


def test_bounce_memory_is_not_written_before_its_upload(ranks: RankPool) -> None:
    assert ranks.run(_through_bounce_memory, world_size=2) == [[2.0, 7.0]] * 2


def _receives_in_threads(context: RankContext) -> list[float]:
    rank = FastRank(context, "receives in threads", direct=False)
    tensors = [rank.tensor(0), rank.tensor(0)]
    if context.rank == 1:
        context.store.wait(["both wait"])
        for tag in (2, 1):
            rank.dist.send(rank.tensor(tag), 0, tag=tag)
        rank.dist.barrier()
        return []

    def receive(tag: int) -> None:
        if not rank.run(ops.RECV, tensors[tag - 1], 1, tag):
            rank.dist.recv(tensors[tag - 1], 1, tag=tag)

    threads = [threading.Thread(target=receive, args=(tag,)) for tag in (1, 2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    context.store.set("both wait", "")
    for thread in threads:
        thread.join()
    rank.dist.barrier()
    rank.backend.device.order(tensors[0], rank.backend.device.mark(7))
    return [float(tensor[0]) for tensor in tensors]


def test_threads_receive_into_memory_of_their_own(ranks: RankPool) -> None:
    assert ranks.run(_receives_in_threads, world_size=2)[0] == [1.0, 2.0]


def _third_rank_leaves(context: RankContext) -> list[Any]:
    rank = FastRank(context, "third rank leaves")
    message = rank.tensor(7 if context.rank == 0 else 0, 5000)
    if context.rank == 0:
        assert rank.run(ops.SEND, message, 1)
    elif context.rank == 1:
        rank.busy(0.8)
        assert rank.run(ops.RECV, message, 0)
        assert rank.backend._link.drain(60)
        return [float(message[0]), rank.backend.fault()]
    rank.dist.destroy_process_group()
    return []


def test_a_rank_that_leaves_does_not_end_a_message_of_two_others(ranks: RankPool) -> None:
    assert ranks.run(_third_rank_leaves, world_size=3)[1] == [7.0, None]


def _wrong_message(context: RankContext, how: str) -> str:
    import stand_in_cuda

    dist = context.start(BACKEND, group_name=f"wrong {how}")
    dist.all_reduce(torch.ones(3))
    backend = _backend(dist)
    tensor = stand_in_cuda.in_device_memory(3000 + (context.rank if how == "size" else 0), torch.float32)
    if context.rank == 0:
        if how == "reference":
            call = ops.Call(ops.SEND, inputs=[tensor], peer=1, size=2, ranks=[0, 1])
            backend._native.message(call, 5.0, b"\xff" * 128)
        else:
            dist.send(tensor, 1)
        return "sent"
    try:
        dist.recv(tensor, 0)
    except (CollectiveMismatch, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "received"


def test_wrong_messages_are_refused(ranks: RankPool) -> None:
    _, said = ranks.run(_wrong_message, "size", world_size=2)
    assert "CollectiveMismatch" in said
    assert "12000" in said
    assert "12004" in said
    _, said = ranks.run(_wrong_message, "reference", world_size=2)
    assert "rank 0 sent a reference to no memory" in said


def _paths_meet(context: RankContext) -> str:
    """Rank 0's blocks have other sizes, so it takes the general path, and the others the fast one."""
    import stand_in_cuda

    dist = context.start(BACKEND, group_name="paths meet")
    dist.all_reduce(torch.ones(3))
    backend = _backend(dist)
    given, taken = (stand_in_cuda.in_device_memory(6, torch.float32) for _ in range(2))

    def call() -> None:
        if context.rank == 0:
            dist.all_to_all_single(taken, given, [2, 2, 2], [2, 1, 3])
        else:
            assert backend._path.run(ops.ALL_TO_ALL_SINGLE.code, taken, given, -1, False, 0, 0) is True

    with pytest.raises(CollectiveMismatch) as caught:
        call()
    return str(caught.value)


def test_sizes_are_compared_between_both_paths(ranks: RankPool) -> None:
    for outcome in ranks.try_run(_paths_meet, world_size=3, timeout=60):
        assert outcome.ok, str(outcome)
        assert "rank 0" in outcome.value, outcome.value


def _differ(context: RankContext, what: str) -> str:
    dist = context.start(BACKEND, group_name=f"differ in {what}")
    dist.barrier()

    def call() -> None:
        if what == "count":
            dist.all_reduce(torch.ones(10 + (context.rank == 0)))
        elif what == "op" and context.rank:
            dist.all_reduce(torch.ones(10))
        elif what == "op":
            dist.broadcast(torch.ones(10), 0)
        else:
            rows = [2, 2, 2]
            sent = [2, 1, 3] if context.rank == 0 else rows
            dist.all_to_all_single(torch.empty(6), torch.empty(6), rows, sent)
        dist.barrier()

    with pytest.raises(CollectiveMismatch) as caught:
        call()
    return str(caught.value)


def test_ranks_that_call_different_things_are_told(ranks: RankPool) -> None:
    for what in ("count", "op", "splits"):
        for outcome in ranks.try_run(_differ, what, world_size=3, timeout=60):
            assert outcome.ok, f"{what}: {outcome}"
            assert "rank 0" in outcome.value, outcome.value


def _loses(context: RankContext, after: float) -> tuple[int, str]:
    dist = context.start(BACKEND, group_name=f"loses after {after}")
    tensor = torch.ones(20_000)
    dist.all_reduce(tensor)
    if context.rank == 1:
        threading.Timer(after, lambda: os.kill(os.getpid(), 9)).start()

    def call() -> None:
        while True:
            works = [dist.all_reduce(tensor.fill_(1.0), async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
            dist.all_reduce(tensor.fill_(1.0))

    with pytest.raises(PeerLost) as caught:
        call()
    dist.destroy_process_group()
    return caught.value.rank, str(caught.value)


def test_a_killed_rank_is_named(ranks: RankPool) -> None:
    for after in (0.02, 0.05, 0.11):
        outcomes = ranks.try_run(_loses, after, world_size=3, timeout=60)
        assert [outcome.ok for outcome in outcomes] == [True, False, True], [str(outcome) for outcome in outcomes]
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome.value[0] == 1
            assert "SIGKILL" in outcome.value[1] or "ended" in outcome.value[1]


def _stuck(context: RankContext) -> str:
    """Rank 1's device does not get to its part: a kernel before it takes until another rank's call has ended."""
    import stand_in_cuda

    dist = context.start(BACKEND, group_name="stuck")
    dist.all_reduce(torch.ones(10))
    dist.communicator().set_timeout(1.5)

    def endless(_: int) -> None:
        context.store.wait(["ended"], timedelta(seconds=300))

    kernel = stand_in_cuda.KERNEL(endless)
    if context.rank == 1:
        stand_in_cuda.library().stand_in_launch(7, kernel, 0)

    def call() -> None:
        dist.all_reduce(torch.ones(10))
        dist.settled()
        dist.all_reduce(torch.ones(10))

    with pytest.raises((CommTimeout, PeerLost)) as caught:
        call()
    context.store.set("ended", "")
    dist.destroy_process_group()
    return type(caught.value).__name__


def test_a_device_that_is_stuck_ends_the_group_in_time(ranks: RankPool) -> None:
    assert "CommTimeout" in ranks.run(_stuck, world_size=3)


def test_the_backend_is_named_by_device() -> None:
    from ringway.backends import registry

    both = registry.combined("cpu:shm,cuda:shm")
    assert both is not None
    assert both.devices == ("cpu",)
    assert list(both.others) == ["cuda"]
    assert both.others["cuda"].one_host
    assert registry.combined("cuda:shm") == both, "what serves CUDA tensors serves CPU tensors too"
    assert registry.combined("shm") is None
    assert registry.user_spelling(both.torch_name) == "cpu:shm,cuda:shm"


@pytest.mark.processes
@pytest.mark.parametrize("interpreted", ["1", "0"] if SOAK else ["1"])
def test_the_kernels_that_reduce(interpreted: str) -> None:
    """Interpreted: the values. Compiled for an H200: the code."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": interpreted}
    command = [sys.executable, "-W", "ignore", str(HERE / "cuda_kernel_checks.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"
