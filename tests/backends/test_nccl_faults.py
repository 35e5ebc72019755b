"""nccl groups that ringway makes, when a call fails: on a fake group and a fake device.
`scripts/nccl_faults.py` does the same with two ranks of the real NCCL (docs/proofs/nccl_faults.md)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted_cuda import ScriptedCuda, ScriptedGroup, ScriptedWork, scripted_info, until

import ringway._core as _core
from ringway.backends.nccl import group as nccl_group
from ringway.backends.nccl import handles as nccl_handles
from ringway.backends.nccl.backend import NcclBackend
from ringway.backends.nccl.group import Aborts
from ringway.backends.process import Process
from ringway.call import ALL_REDUCE, SEND, Call
from ringway.errors import BackendUnavailable, CommTimeout, PeerLost, RingwayError
from ringway.groups.communicator import Communicator
from ringway.groups.listener import Listener


class Group(ScriptedGroup):
    """A fake of torch's group, which remembers its options and the order of what it was told."""

    def __init__(self) -> None:
        super().__init__(ScriptedWork())
        self.options: Any = None
        self.told: list[str] = []

    def allreduce(self, tensors: Any, options: Any) -> Any:
        self.options = options
        return self.work if options.asyncOp else None

    def send(self, tensors: Any, peer: int, tag: int) -> None:
        self.told.append("send")

    def abort(self) -> None:
        super().abort()
        self.told.append("abort")
        self.work.finished.set()

    def _group_start(self) -> None:
        self.told.append("start")

    def _group_end(self) -> None:
        self.told.append("end")

    def _start_coalescing(self) -> None:
        self.told.append("open")

    def _end_coalescing(self) -> ScriptedWork:
        self.told.append("close")
        return self.work


def _communicator(
    group: Group, timeout: float = 0.2, listeners: Sequence[Listener] = (), size: int = 1
) -> Communicator:
    info = scripted_info(size)
    backend = NcclBackend(type(info)(**{**info.__dict__, "timeout": timeout, "process": Process()}), group)
    return Communicator(info, {"cpu": backend}, _core.Recorder(64), list(listeners))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ScriptedCuda:
    return ScriptedCuda(monkeypatch)


def test_an_overdue_call_ends_the_group_and_frees_the_device(cuda: ScriptedCuda) -> None:
    group = Group()
    communicator = _communicator(group)
    work = communicator.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    until(lambda: communicator.fault is not None)
    assert isinstance(communicator.fault, CommTimeout)
    assert "all_reduce #0" in str(communicator.fault)
    assert group.told == ["start", "abort", "end"]
    for call in (communicator.health.require, lambda: communicator.all_reduce(torch.ones(4))):
        with pytest.raises(CommTimeout, match="all_reduce #0"):
            call()
    communicator.close()
    assert group.aborted == 1


def _first_call(communicator: Communicator, call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A call in a thread, and the error that it raises."""
    communicator.info.store.set("ringway/mark", "scripted")
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except RingwayError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_nccl_makes_a_communicator_when_its_ranks_are_there(cuda: ScriptedCuda) -> None:
    """Inside NCCL, a rank that waits for another one cannot be reached. A pair of ranks has a communicator of its
    own, also in a group of two."""
    group = Group()
    group.work.finished.set()
    communicator = _communicator(group, timeout=60.0, size=2)
    for call, where, seen in (
        (lambda: communicator.all_reduce(torch.ones(4)), "all", lambda: group.options is not None),
        (lambda: communicator.send(torch.ones(4), 1), "(0, 1)", lambda: group.told == ["send"]),
    ):
        thread, raised = _first_call(communicator, call)
        time.sleep(0.2)
        assert not seen()
        communicator.info.store.set(f"ringway/nccl/scripted/{where}/1", "")
        thread.join(30)
        assert seen()
        assert not raised
        call()  # they meet once


def test_a_rank_that_dies_before_nccl_connects_is_named(cuda: ScriptedCuda) -> None:
    group = Group()
    communicator = _communicator(group, timeout=60.0, size=2)
    thread, raised = _first_call(communicator, lambda: communicator.all_reduce(torch.ones(4)))
    time.sleep(0.2)
    communicator.health.end(PeerLost("rank 1: its process is gone", rank=1))  # as the watch does
    thread.join(30)
    assert [type(error) for error in raised] == [PeerLost]
    assert "rank 1" in str(raised[0])
    assert group.options is None


def test_a_rank_that_dies_inside_nccls_connection_is_named(cuda: ScriptedCuda) -> None:
    """NCCL waits for it, and an abort waits for NCCL: neither keeps the caller."""
    inside, forever = threading.Event(), threading.Event()

    class Waits(Group):
        def allreduce(self, tensors: Any, options: Any) -> Any:
            inside.set()
            forever.wait(60)

        def abort(self) -> None:
            forever.wait(60)

    communicator = _communicator(Waits(), timeout=60.0, size=2)
    communicator.info.store.set("ringway/nccl/scripted/all/1", "")
    thread, raised = _first_call(communicator, lambda: communicator.all_reduce(torch.ones(4)))
    assert inside.wait(30)
    began = time.monotonic()
    communicator.health.end(PeerLost("rank 1: its process is gone", rank=1))
    thread.join(30)
    assert time.monotonic() - began < 20
    assert "rank 1" in str(raised[0])
    communicator.close()
    forever.set()


def test_an_error_of_nccls_connection_is_raised(cuda: ScriptedCuda) -> None:
    class Refuses(Group):
        def allreduce(self, tensors: Any, options: Any) -> Any:
            raise RuntimeError("ncclRemoteError: remote process exited")

    communicator = _communicator(Refuses(), timeout=60.0, size=2)
    communicator.info.store.set("ringway/nccl/scripted/all/1", "")
    thread, raised = _first_call(communicator, lambda: communicator.all_reduce(torch.ones(4)))
    thread.join(30)
    assert [type(error) for error in raised] == [PeerLost]


def test_a_rank_that_does_not_come_before_nccl_connects_is_a_timeout(cuda: ScriptedCuda) -> None:
    group = Group()
    communicator = _communicator(group, timeout=0.2, size=2)
    thread, raised = _first_call(communicator, lambda: communicator.all_reduce(torch.ones(4)))
    thread.join(30)
    assert [type(error) for error in raised] == [CommTimeout]
    assert "all_reduce #0" in str(raised[0])
    assert group.options is None


def test_a_call_that_ends_in_time_leaves_the_group_alone(cuda: ScriptedCuda) -> None:
    group = Group()
    communicator = _communicator(group, timeout=0.1)
    communicator.all_reduce(torch.ones(4), async_op=True)
    group.work.finished.set()
    time.sleep(0.3)
    communicator.health.require()
    assert group.aborted == 0


def test_torch_keeps_no_deadline_and_runs_synchronous_calls_on_the_current_stream(cuda: ScriptedCuda) -> None:
    group = Group()
    group.work.finished.set()
    communicator = _communicator(group)
    communicator.all_reduce(torch.ones(4), async_op=True)
    assert group.options.asyncOp
    assert group.options.timeout.total_seconds() < 0  # unset
    backend = communicator.devices.first
    tensor = torch.ones(4)
    backend.all_reduce(Call(ALL_REDUCE, (tensor,), (tensor,), timeout=3.0, size=1))  # type: ignore[attr-defined]
    assert not group.options.asyncOp
    assert group.options.timeout.total_seconds() < 0


def test_settling_waits_for_the_device_and_for_the_explanation(cuda: ScriptedCuda) -> None:
    """A call is overdue, and finding out why takes a while: the caller must not continue in between."""
    group = Group()
    communicator = _communicator(group)
    explaining = threading.Event()
    fail = communicator.health.fail

    def slow(error: BaseException) -> BaseException:
        explaining.wait(30)
        return fail(error)

    communicator.health.fail = slow  # type: ignore[method-assign]
    communicator.all_reduce(torch.ones(4), async_op=True)
    settled = threading.Event()

    def settle() -> None:
        communicator.devices.settle()
        settled.set()

    threading.Thread(target=settle, daemon=True).start()
    assert not settled.wait(1.0)
    explaining.set()
    assert settled.wait(30)
    assert isinstance(communicator.fault, CommTimeout)


def test_a_barrier_has_a_deadline(cuda: ScriptedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own wait for a barrier blocks until the device has finished, or forever."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group = Group()
    group.barrier = lambda options: group.work  # type: ignore[attr-defined]
    communicator = _communicator(group)
    with pytest.raises(CommTimeout, match="barrier #0"):
        communicator.barrier()
    assert group.aborted == 1


def test_an_error_that_torchs_watchdog_cleaned_up_ends_the_group(
    cuda: ScriptedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is free again, as if the call had succeeded."""
    monkeypatch.setattr(nccl_handles, "_DOUBTFUL_SECONDS", 0.0)
    group = Group()
    group.get_error = lambda: SimpleNamespace(name="COMM_ERROR")  # type: ignore[attr-defined]
    communicator = _communicator(group, timeout=60)
    communicator.all_reduce(torch.ones(4), async_op=True)
    group.work.finished.set()
    until(lambda: communicator.fault is not None)
    assert isinstance(communicator.fault, PeerLost)
    assert "COMM_ERROR" in str(communicator.fault)


def test_settling_ends_when_the_group_is_closed(cuda: ScriptedCuda) -> None:
    communicator = _communicator(Group())
    backend = communicator.devices.first
    communicator.close(wait=False)
    backend._works.failing = CommTimeout("overdue while it closed")  # type: ignore[attr-defined]
    backend.settle()


def test_a_listener_that_raises_does_not_keep_a_group_from_failing(cuda: ScriptedCuda) -> None:
    class Broken(Listener):
        def failed(self, group: Any, error: BaseException) -> BaseException:
            raise OSError("the disk is full")

    group = Group()
    communicator = _communicator(group, listeners=[Broken()])
    communicator.all_reduce(torch.ones(4), async_op=True)
    until(lambda: communicator.fault is not None)
    assert isinstance(communicator.fault, CommTimeout)
    until(lambda: group.aborted == 1)


def test_groups_of_a_dead_rank_are_aborted_together(cuda: ScriptedCuda) -> None:
    told: list[str] = []
    process = Process()
    info = scripted_info()
    groups = [Group() for _ in range(2)]
    for group in groups:
        group.told = told
    backends = [NcclBackend(type(info)(**{**info.__dict__, "process": process}), group) for group in groups]
    error = PeerLost("rank 1 is gone", rank=1)
    with process.part(Aborts).together():
        for backend in backends:
            backend.failed(error)
        assert told == []
    assert told == ["start", "abort", "abort", "end"]
    tensor = torch.ones(4)
    with pytest.raises(PeerLost):
        backends[0].all_reduce(Call(ALL_REDUCE, (tensor,), (tensor,), size=1))


def test_calls_of_a_block_end_with_it_and_take_their_last_step_after_it(cuda: ScriptedCuda) -> None:
    group = Group()
    backend = _communicator(group).devices.first
    device, tensor, ended = torch.device("cuda", 0), torch.ones(4), []
    backend.start_coalescing(device)
    sent = backend.send(Call(SEND, (tensor,), (), peer=0, size=1))  # type: ignore[attr-defined]
    sent.then(lambda: group.told.append("last step")).when_finished(ended.append)
    sent.wait()
    assert group.told == ["open", "send"]
    backend.end_coalescing(device)
    assert group.told == ["open", "send", "close", "last step"]
    assert ended == []
    group.work.finished.set()
    until(lambda: ended == [None])


def test_calls_of_a_block_that_cannot_start_end_with_its_error(cuda: ScriptedCuda) -> None:
    group = Group()
    communicator = _communicator(group)
    communicator.set_timeout(60)
    backend, device, tensor = communicator.devices.first, torch.device("cuda", 0), torch.ones(4)

    def refuse() -> ScriptedWork:
        raise RuntimeError("NCCL error: invalid usage")

    group._end_coalescing = refuse  # type: ignore[method-assign]
    backend.start_coalescing(device)
    works = [communicator.all_reduce(tensor, async_op=True) for _ in range(2)]
    with pytest.raises(RingwayError, match="invalid usage"):
        backend.end_coalescing(device)
    assert communicator.record.completed == 2
    for work in works:
        assert work is not None
        with pytest.raises(RingwayError, match="invalid usage"):
            work.wait()


def test_a_barrier_runs_on_the_device_that_the_program_names(
    cuda: ScriptedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else on the one that the group is bound to, else on the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    group = Group()
    group.work.finished.set()
    seen = []
    group.barrier = lambda options: seen.append(options.device) or group.work  # type: ignore[attr-defined, func-returns-value]
    for bound in (None, torch.device("cuda", 3)):
        info = replace(scripted_info(), bound_device=bound, process=Process())
        communicator = Communicator(info, {"cpu": NcclBackend(info, group)}, _core.Recorder(64), [])
        communicator.barrier()
        communicator.barrier(device_ids=[5])
    assert [device.index for device in seen] == [2, 5, 3, 5]


def test_torchs_watchdog_is_told_to_leave_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    before = dict(os.environ)
    with nccl_group._watchdog_only_cleans_up():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert dict(os.environ) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(BackendUnavailable, match=r"no NCCL|no CUDA device"):
        NcclBackend(scripted_info())
