"""nccl groups that ringway makes, when a call fails: on a fake group and a fake device.
`scripts/nccl_faults.py` does the same with two ranks of the real NCCL (docs/proofs/nccl_faults.md)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted_cuda import ScriptedCuda, ScriptedGroup, ScriptedWork, scripted_info, until

import ringway._core as _core
from ringway.backends.nccl import backend as nccl_backend
from ringway.backends.nccl import connections as nccl_connections
from ringway.backends.nccl import group as nccl_group
from ringway.backends.nccl import handles as nccl_handles
from ringway.backends.nccl.backend import NcclBackend
from ringway.backends.nccl.group import Aborts
from ringway.backends.process import Process
from ringway.call import ALL_REDUCE, SEND, Call
from ringway.errors import BackendUnavailable, CommTimeout, PeerLost, RingwayError, UsageError
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


class Connecting(Group):
    """Its ranks are not there yet: the calls in which torch makes a communicator wait, and an abort waits for them."""

    connects_later = True

    def __init__(self) -> None:
        super().__init__()
        self.work.finished.set()
        self.there = threading.Event()
        self.calls: list[tuple[str, int, bool]] = []
        """Op, elements, and whether it was made on the program's thread."""
        self.programs = threading.get_ident()

    def _issued(self, op: str, tensors: Any) -> None:
        self.calls.append((op, tensors[0].numel(), threading.get_ident() == self.programs))
        self.there.wait(60)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        self._issued("allreduce", tensors)
        return super().allreduce(tensors, options)

    def send(self, tensors: Any, peer: int, tag: int) -> None:
        self._issued("send", tensors)

    def abort(self) -> None:
        self.there.wait(60)

    def comes_later(self) -> None:
        threading.Timer(0.2, self.there.set).start()


@pytest.fixture
def connecting() -> Iterator[Connecting]:
    group = Connecting()
    yield group
    group.there.set()  # its threads end


def test_nccl_connects_in_a_call_of_its_own(cuda: ScriptedCuda, connecting: Connecting) -> None:
    """On a thread that can be left, and once. A pair of ranks has its own communicator, also in a group of two."""
    communicator = _communicator(connecting, timeout=60.0, size=2)
    for call, op in (
        (lambda: communicator.all_reduce(torch.ones(4)), "allreduce"),
        (lambda: communicator.send(torch.ones(4), 1), "send"),
    ):
        connecting.there.clear()
        connecting.comes_later()
        connecting.calls.clear()
        call()
        call()
        assert connecting.calls == [(op, 1, False), (op, 4, True), (op, 4, True)]


def test_a_group_that_torch_has_connected_needs_no_other_communicator(cuda: ScriptedCuda) -> None:
    group = Connecting()
    group.connects_later = False
    group.there.set()
    _communicator(group, timeout=60.0, size=2).send(torch.ones(4), 1)
    assert group.calls == [("send", 4, True)]


def test_a_receive_from_any_rank_connects_nothing(cuda: ScriptedCuda, connecting: Connecting) -> None:
    communicator = _communicator(connecting, timeout=60.0, size=2)
    connecting.recv_anysource = lambda tensors, tag: connecting.work  # type: ignore[attr-defined]
    with suppress(UsageError):
        communicator.recv(torch.ones(4))
    assert not connecting.calls


def test_a_rank_that_dies_while_nccl_connects_is_named(cuda: ScriptedCuda, connecting: Connecting) -> None:
    communicator = _communicator(connecting, timeout=60.0, size=2)
    lost = PeerLost("rank 1: its process is gone", rank=1)
    threading.Timer(0.2, communicator.health.end, [lost]).start()  # as the watch does
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1"):
        communicator.all_reduce(torch.ones(4))
    assert time.monotonic() - began < 30
    communicator.close()
    assert connecting.calls == [("allreduce", 1, False)]


def test_ranks_that_do_not_come_while_nccl_connects_are_a_timeout(
    cuda: ScriptedCuda, connecting: Connecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_backend, "_CONNECT_SECONDS", 0.1)
    communicator = _communicator(connecting, timeout=0.2, size=2)
    with pytest.raises(CommTimeout, match="all_reduce #0"):
        communicator.all_reduce(torch.ones(4))
    with pytest.raises(CommTimeout, match="all_reduce #0"):
        communicator.all_reduce(torch.ones(4))
    assert connecting.calls == [("allreduce", 1, False)]


def test_an_interrupted_call_leaves_the_connection_to_the_next(cuda: ScriptedCuda, connecting: Connecting) -> None:
    communicator = _communicator(connecting, timeout=60.0, size=2)

    class Alarm(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Alarm):
            communicator.all_reduce(torch.ones(4))
    finally:
        signal.signal(signal.SIGALRM, before)
    connecting.there.set()
    communicator.all_reduce(torch.ones(4))
    assert connecting.calls == [("allreduce", 1, False), ("allreduce", 4, True)]
    assert communicator.fault is None
    assert communicator.record.completed == 1, "the interrupted call has no number"


def test_an_error_while_nccl_connects_is_raised(cuda: ScriptedCuda) -> None:
    class Refuses(Connecting):
        def allreduce(self, tensors: Any, options: Any) -> Any:
            raise RuntimeError("ncclRemoteError: remote process exited")

        def abort(self) -> None:
            pass

    with pytest.raises(PeerLost, match="ncclRemoteError"):
        _communicator(Refuses(), timeout=60.0, size=2).all_reduce(torch.ones(4))


def test_a_connection_that_failed_is_tried_again(cuda: ScriptedCuda, connecting: Connecting) -> None:
    communicator = _communicator(connecting, timeout=60.0, size=2)
    issue, errors = connecting.allreduce, [RuntimeError("out of memory")]

    def first(tensors: Any, options: Any) -> Any:
        if errors:
            raise errors.pop()
        return issue(tensors, options)

    connecting.allreduce = first  # type: ignore[method-assign]
    connecting.there.set()
    with pytest.raises(RingwayError, match="out of memory"):
        communicator.all_reduce(torch.ones(4))
    communicator.all_reduce(torch.ones(4))
    assert connecting.calls == [("allreduce", 1, False), ("allreduce", 4, True)]


def test_a_connection_without_a_thread_is_tried_again(
    cuda: ScriptedCuda, connecting: Connecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    communicator = _communicator(connecting, timeout=60.0, size=2)
    connecting.there.set()

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(nccl_connections, "start", no_thread)
        with pytest.raises(RingwayError, match="can't start new thread"):
            communicator.all_reduce(torch.ones(4))
    communicator.all_reduce(torch.ones(4))
    assert connecting.calls == [("allreduce", 1, False), ("allreduce", 4, True)]


def test_a_block_whose_connection_fails_or_whose_group_ends_raises(cuda: ScriptedCuda, connecting: Connecting) -> None:
    backend: Any = _communicator(connecting, timeout=60.0, size=2).devices.first
    threading.Timer(0.2, backend.close).start()
    with pytest.raises(RingwayError, match="destroyed while NCCL connected"):
        backend.start_coalescing(None)

    class Refuses(Connecting):
        def allreduce(self, tensors: Any, options: Any) -> Any:
            raise RuntimeError("connection reset")

    refused: Any = _communicator(Refuses(), timeout=60.0, size=2).devices.first
    with pytest.raises(RingwayError, match=r"coalesced calls .* connection reset"):
        refused.start_coalescing(None)


def test_a_communicator_that_is_made_too_late_is_aborted(cuda: ScriptedCuda, connecting: Connecting) -> None:
    """torch's abort does not know it before."""
    connecting.abort = lambda: connecting.told.append("abort")  # type: ignore[method-assign]
    communicator = _communicator(connecting, timeout=60.0, size=2)
    threading.Timer(0.2, communicator.health.end, [PeerLost("rank 1: its process is gone", rank=1)]).start()
    with pytest.raises(PeerLost):
        communicator.all_reduce(torch.ones(4))
    until(lambda: connecting.told == ["start", "abort", "end"])
    connecting.there.set()
    until(lambda: connecting.told == ["start", "abort", "end", "abort"])


def test_a_coalesced_block_connects_before_it_begins(cuda: ScriptedCuda, connecting: Connecting) -> None:
    backend: Any = _communicator(connecting, timeout=60.0, size=2).devices.first
    connecting.comes_later()
    backend.start_coalescing(None)
    assert connecting.calls == [("allreduce", 1, False)]
    assert connecting.told == ["open"]


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
