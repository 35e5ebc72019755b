"""The part of the nccl backend that needs no GPU: the code around torch's group, on a fake group.
`scripts/nccl_proof.py` tests the rest on a GPU (docs/proofs/nccl.md)."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from scripted_cuda import (
    ScriptedCuda,
    ScriptedGroup,
    ScriptedTensor,
    ScriptedWork,
    scripted_backend,
    scripted_info,
    until,
)

import ringway as dist
from ringway.backends import registry
from ringway.backends.base import GroupInfo
from ringway.backends.nccl import backend as nccl
from ringway.backends.nccl import handles as nccl_work
from ringway.backends.nccl.backend import NcclBackend
from ringway.backends.torch.adopt import adopt
from ringway.call import ALL_REDUCE, Call, Reduce, reduces
from ringway.errors import CommTimeout, PeerLost, RingwayError
from ringway.groups import factory
from ringway.groups.adoption import torch_backends
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave
from ringway.work import Work


def _call() -> Call:
    tensor = torch.ones(4)
    return Call(ALL_REDUCE, (tensor,), (tensor,), group="scripted", size=1)


def test_a_wait_is_one_wait_of_torch_and_not_sliced() -> None:
    """With torch's blocking wait, a short wait that ends before the collective counts as its timeout, permanently."""
    work = ScriptedWork()
    handle = scripted_backend(work)[0].all_reduce(_call())
    handle.wait()
    handle.wait(7)
    assert work.waits == [(), (timedelta(seconds=7),)]


def test_a_timeout_of_the_blocking_wait_can_be_caught() -> None:
    work = ScriptedWork(
        RuntimeError("[Rank 0] Work WorkNCCL(...) ran for 8000 milliseconds before timing out. Timeout")
    )
    handle = scripted_backend(work)[0].all_reduce(_call())
    with pytest.raises(CommTimeout, match="all_reduce"):
        handle.wait()


def test_the_end_is_reported_when_the_device_has_finished() -> None:
    work = ScriptedWork()
    handle = scripted_backend(work)[0].all_reduce(_call())
    reported: list[tuple[float, BaseException | None]] = []
    handle.when_finished(lambda error: reported.append((time.monotonic(), error)))
    assert handle.on_device
    handle.wait()
    time.sleep(0.05)
    assert reported == []
    finished = time.monotonic()
    work.finished.set()
    deadline = finished + 30
    while not reported and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reported[0][0] >= finished
    assert reported[0][1] is None


def test_a_failure_on_the_device_is_raised_as_a_ringway_error() -> None:
    work = ScriptedWork(RuntimeError("NCCL error: unhandled system error"))
    handle = scripted_backend(work)[0].all_reduce(_call())
    reported: list[BaseException | None] = []
    done = threading.Event()
    handle.when_finished(lambda error: (reported.append(error), done.set()))
    time.sleep(1.2 * nccl_work._DOUBTFUL_SECONDS)
    work.finished.set()
    assert done.wait(30)
    assert isinstance(reported[0], RingwayError)
    assert "unhandled system error" in str(reported[0])


def test_a_quick_call_is_not_asked_for_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch prints a warning when it is asked for an error."""
    monkeypatch.setattr(nccl_work, "_DOUBTFUL_SECONDS", 600.0)
    work = ScriptedWork()
    work.finished.set()
    handle = scripted_backend(work)[0].all_reduce(_call())
    monkeypatch.setattr(work, "exception", lambda: pytest.fail("it was asked"))
    assert handle.done()
    assert handle.outcome() is None


def _on(device: str, async_op: bool = False) -> Call:
    tensor: Any = ScriptedTensor(device)
    return Call(ALL_REDUCE, (tensor,), (tensor,), group="scripted", size=1, async_op=async_op)


def test_a_synchronous_call_ends_with_its_stream_and_keeps_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = ScriptedCuda(monkeypatch)
    reported: list[str] = []
    for device in ("cuda:0", "cuda:1"):  # whose default streams have the same number
        call = _on(device)
        handle = scripted_backend(ScriptedWork())[0].all_reduce(call)
        handle.when_finished(lambda error, device=device: reported.append(device), soon=False)
        tensor = weakref.ref(call.inputs[0])
        del call, handle
        gc.collect()
        assert tensor() is None
    cuda.reached.add(torch.device("cuda:1"))
    until(lambda: reported == ["cuda:1"])
    cuda.reached.add(torch.device("cuda:0"))
    until(lambda: reported == ["cuda:1", "cuda:0"])


def test_a_call_that_has_ended_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's work holds the tensors of its call."""
    cuda = ScriptedCuda(monkeypatch)
    cuda.reached.add(torch.device("cuda:0"))
    for async_op in (False, True):
        work = ScriptedWork()
        work.finished.set()
        backend, group = scripted_backend(work)
        backend.all_reduce(_on("cuda:0", async_op)).when_finished(lambda error: None, soon=False)
        kept = weakref.ref(work)
        del work, group.work
        until(lambda kept=kept: kept() is None)


def test_a_synchronous_call_that_never_ends_raises_the_error_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedCuda(monkeypatch)
    work = ScriptedWork(RuntimeError("NCCL error: ncclRemoteError"))
    work.finished.set()  # torch takes an error for an end; the stream does not get there
    reported: list[BaseException | None] = []
    scripted_backend(work)[0].all_reduce(_on("cuda:0")).when_finished(reported.append, soon=False)
    until(lambda: bool(reported))
    assert isinstance(reported[0], PeerLost)


def test_a_captured_call_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = ScriptedCuda(monkeypatch)
    cuda.capturing = True
    work = ScriptedWork()
    monkeypatch.setattr(work, "is_completed", lambda: pytest.fail("it was asked"))
    backend, group = scripted_backend(work)
    reported: list[BaseException | None] = []
    backend.all_reduce(_on("cuda:0")).when_finished(reported.append, soon=False)
    backend.all_reduce(_on("cuda:0", async_op=True)).when_finished(reported.append, soon=True)
    assert reported == [None, None]
    backend.close()
    assert group.aborted == 0


def test_a_hanging_work_is_not_confused_with_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedCuda(monkeypatch)
    works = [ScriptedWork() for _ in range(3)]
    backend, group = scripted_backend(works[0])
    handles = []
    for group.work in works:
        handles.append(backend.all_reduce(_on("cuda:0", async_op=True)))
    ended: list[int] = []
    for number, handle in enumerate(handles):
        handle.when_finished(lambda error, number=number: ended.append(number), soon=False)
    users = [Work(handle, (), lambda error: error) for handle in handles]
    assert not users[0].is_completed()
    late = users[1].get_future()
    works[0].finished.set()
    assert users[0].is_completed()
    users[0].get_future().wait()
    until(lambda: 0 in ended)
    time.sleep(0.05)
    assert not late.done()
    assert not users[1].is_completed()
    assert 1 not in ended
    works[1].finished.set()
    late.wait()
    works[2].finished.set()
    until(lambda: ended == [0, 1, 2])


@pytest.mark.parametrize("capturing", [False, True])
def test_the_last_step_is_enqueued_behind_the_call_without_a_wait(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    cuda = ScriptedCuda(monkeypatch)
    cuda.capturing = capturing
    work = ScriptedWork()
    steps: list[str] = []
    handle = scripted_backend(work)[0].all_reduce(_on("cuda:0", async_op=True)).then(lambda: steps.append("last"))
    assert work.waits == [()], "the stream waits first"
    assert steps == ["last"]
    user = Work(handle, (), lambda error: error)
    user.wait()
    assert cuda.waited == 1, "a wait comes after the last step"
    assert user.is_completed() is capturing
    cuda.reached.add(torch.device("cuda:0"))
    assert user.is_completed()


def test_waiting_only_orders_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedCuda(monkeypatch)
    work = ScriptedWork()
    user = Work(scripted_backend(work)[0].all_reduce(_on("cuda:0", async_op=True)), (), lambda error: error)
    user.wait()
    assert not user.is_completed()
    work.finished.set()
    assert user.is_success()


def test_a_call_that_was_aborted_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedCuda(monkeypatch)
    work = ScriptedWork()
    backend, group = scripted_backend(work)
    monkeypatch.setattr(group, "abort", work.finished.set)
    user = Work(backend.all_reduce(_on("cuda:0", async_op=True)), (), lambda error: error)
    backend.abort()
    assert user.is_completed()
    assert isinstance(user.exception(), RingwayError)


def test_a_device_that_cannot_be_queried_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedCuda(monkeypatch)
    work = ScriptedWork()

    def broken() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(work, "is_completed", broken)
    user = Work(scripted_backend(work)[0].all_reduce(_on("cuda:0", async_op=True)), (), lambda error: error)
    assert user.is_completed()
    assert "illegal memory access" in str(user.exception())


def test_teardown_waits_for_a_limited_time_and_then_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_LEAVE_SECONDS", 0.2)
    stuck, group = scripted_backend(ScriptedWork())
    stuck.all_reduce(_call())
    began = time.monotonic()
    stuck.close()
    stuck.close()
    assert group.aborted == 1
    assert time.monotonic() - began < 30
    work = ScriptedWork()
    work.finished.set()
    quiet, group = scripted_backend(work)
    quiet.all_reduce(_call())
    quiet.close()
    assert group.aborted == 0


def test_a_shutdown_that_waits_for_a_graph_is_explained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl, "_LEAVE_SECONDS", 0.2)
    group = ScriptedGroup(ScriptedWork())
    explained = threading.Event()
    monkeypatch.setattr(group, "shutdown", lambda: until(lambda: "CUDA graphs" in caplog.text) or explained.set())
    nccl.NcclBackend(scripted_info(), group).close()
    assert explained.is_set()


@pytest.mark.parametrize("ours", [False, True])
def test_ringways_groups_are_shut_down_and_torchs_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    monkeypatch.setattr(nccl, "_LEAVE_SECONDS", 0.2)
    for ended in (True, False):
        work = ScriptedWork()
        if ended:
            work.finished.set()
        group = ScriptedGroup(work)
        backend = nccl.NcclBackend(scripted_info(), group, None if ours else lambda: False)
        backend.all_reduce(_call())
        backend.close()
        backend.close()
        assert (group.shut_down, group.aborted) == ((int(ours), 0) if ended else (0, 1))


def test_reductions_that_nccl_lacks_are_converted_or_exchanged() -> None:
    backend = scripted_backend(ScriptedWork())[0]
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        assert backend.can_reduce(dtype, Reduce.SUM)
    assert backend.can_reduce(torch.int16, Reduce.BXOR)
    assert not backend.can_reduce(torch.int32, Reduce.AVG)
    assert not backend.can_reduce(torch.complex64, Reduce.SUM)
    assert not backend.can_reduce(torch.bool, Reduce.SUM)
    assert not backend.can_move(torch.complex64)
    for reduce in Reduce:
        assert not backend.can_reduce(torch.float32, reduce) or reduces(torch.float32, reduce)


def _ends_behind_our_back(context: RankContext, held: bool) -> list[int]:
    """How often an adopted nccl group is aborted: while torch has it, and after torch has destroyed it."""
    dist.destroy_process_group()
    c10d.init_process_group("gloo", store=context.store, rank=context.rank, world_size=context.world_size)
    aborted = []
    for destroyed in (False, True):
        group = c10d.new_group()
        backend = torch_backends(scripted_info(), group, "cpu:nccl")["cpu"]
        backend._group = scripted = ScriptedGroup(ScriptedWork())
        if destroyed:
            c10d.destroy_process_group(group)
        if not held:
            del group
        backend.abort()
        aborted.append(scripted.aborted)
    c10d.destroy_process_group()
    return aborted


@pytest.mark.parametrize("held", [True, False])
def test_a_group_that_torch_has_destroyed_is_not_aborted(pool: RankPool, held: bool) -> None:
    """NCCL would free its communicator twice and corrupt the heap."""
    assert pool.run(_ends_behind_our_back, held, world_size=1) == [[1, 0]]


def _reconfigured(context: RankContext) -> dict[str, Any]:
    """A call hangs on the device when the members are replaced."""
    leave(dist)
    made: list[tuple[str, int, ScriptedGroup]] = []

    def make(info: GroupInfo) -> ScriptedGroup:
        made.append((info.name, info.size, ScriptedGroup(ScriptedWork())))
        return made[-1][2]

    nccl.make_nccl = make
    factory.obstacle = lambda name: None  # this torch has no nccl
    dist.init_process_group("nccl", store=c10d.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
    handle = dist._get_reconfigure_handle()
    dist._reconfigure(1, [handle]).wait()
    first = dist.communicator()
    pending = first.devices.made()[0].all_reduce(_call())
    nccl._LEAVE_SECONDS = 1000.0  # it must not wait for the call that hangs
    dist._reconfigure(2, [handle]).wait()
    second = dist.communicator()
    assert second is not first
    assert first.closed
    assert not second.closed
    return {
        "made": [(name, size) for name, size, _ in made],
        "aborted": [group.aborted for *_, group in made],
        "shut down": [group.shut_down for *_, group in made],
        "pending": pending is not None,
    }


def test_members_are_replaced_by_abort_and_reconnect(pool: RankPool) -> None:
    (seen,) = pool.run(_reconfigured, world_size=1)
    pool.replace()
    assert seen["aborted"] == [1, 0]
    assert seen["shut down"] == [0, 0]
    assert [size for _, size in seen["made"]] == [1, 1]
    assert seen["made"][0] != seen["made"][1], "the second group would read what the first left in the store"


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-lazy", "nccl-legacy"])
def test_every_nccl_of_torch_is_taken_like_nccl(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The others exist from torch 2.15 on. Here a test says that they do."""
    monkeypatch.setattr(c10d.Backend, "backend_list", [*c10d.Backend.backend_list, name])
    assert registry.parse(f"cpu:gloo,cuda:{name}") == {"cpu": "gloo", "cuda": name}
    assert registry.parse(name) == {"": name}
    adopted = adopt(scripted_info(), ScriptedGroup(ScriptedWork()), name)
    assert isinstance(adopted, NcclBackend)
    assert adopted.devices == ("cuda",)
