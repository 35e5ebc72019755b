"""nccl's fast path, on a fake group and a stand-in for the CUDA driver: CPU tensors take the place of CUDA tensors."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted_cuda import ASIDE, STREAM, ScriptedCuda, ScriptedWork, StandInDriver, build_stand_in, scripted_info, until

import ringway._core as _core
from ringway.backends.nccl.backend import NcclBackend
from ringway.backends.nccl.fast_path import Driver, NcclFastPath
from ringway.backends.nccl.open_calls import FastWork
from ringway.backends.process import Process
from ringway.backends.torch.adopt import adopt
from ringway.call import ALL_REDUCE, BARRIER, OPS, ReduceOp
from ringway.errors import CommTimeout, PeerLost, RingwayError, UsageError
from ringway.groups.bridge import Bridge
from ringway.groups.communicator import Communicator
from ringway.groups.listener import Listener
from ringway.observe.recorder import recorded

DEVICE = torch.device("cuda:0")


class Group:
    """A fake of torch's group that remembers its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.works: list[ScriptedWork] = []
        self.error: Exception | None = None
        self.synchronous = False
        """Whether synchronous calls run on the current stream and have no work, as in later versions of torch."""

    def __getattr__(self, name: str) -> Any:
        def method(*arguments: Any) -> ScriptedWork | None:
            self.asked.append((name, *arguments))
            if self.synchronous and arguments and not getattr(arguments[-1], "asyncOp", True):
                return None
            self.works.append(ScriptedWork(self.error))
            return self.works[-1]

        return method


class Setting:
    """A communicator of two ranks whose calls take the fast path, and its group, device and recorder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: Path, *, ours: bool = False) -> None:
        """`ours`: ringway made the group, and keeps its deadlines."""
        self.cuda = ScriptedCuda(monkeypatch)
        self.driver = StandInDriver(library)
        monkeypatch.setattr(Driver, "library", str(library))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: self.cuda._stream(DEVICE))
        monkeypatch.setattr(NcclFastPath, "device", _core.CPU)
        self.group = Group()
        self.recorder = _core.Recorder(64)
        info = replace(scripted_info(size=2), timeout=0.3, process=Process())
        backend = NcclBackend(info, self.group) if ours else adopt(info, self.group, "nccl")
        self.listeners: list[Listener] = []
        self.communicator = Communicator(info, {"cpu": backend}, self.recorder, self.listeners)

    def bridge(self) -> Bridge:
        """A group of torch's that shows the communicator."""
        return Bridge("ringway", self.communicator, {}, lambda *given, **named: None)

    def records(self) -> list[tuple[str, str, int]]:
        return [(one.op, one.state, one.nbytes) for one in map(recorded, self.recorder.recent(64))]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch, library: Path) -> Setting:
    return Setting(monkeypatch, library)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, library: Path) -> Setting:
    return Setting(monkeypatch, library, ours=True)


def test_each_op_reaches_torch_and_ends_with_the_stream(setting: Setting) -> None:
    whole, share, other = torch.zeros(4, 2), torch.zeros(4), torch.zeros(4, 2)
    dist = setting.communicator
    dist.all_reduce(whole)
    dist.broadcast(whole, src=1)
    dist.all_gather_into_tensor(whole, share)
    dist.reduce_scatter_tensor(share, whole)
    dist.all_to_all_single(whole, other)
    asked = [(name, arguments[:-1]) for name, *arguments in setting.group.asked]
    assert [name for name, _ in asked] == [
        "allreduce",
        "broadcast",
        "_allgather_base",
        "_reduce_scatter_base",
        "alltoall_base",
    ]
    expected = [[[whole]], [[whole]], [whole, share], [share, whole], [whole, other, [], []]]
    for (_, given), tensors in zip(asked, expected, strict=True):
        assert _identities(given) == _identities(tensors)
    assert setting.group.asked[1][-1].rootRank == 1
    assert all(work.waits == [()] for work in setting.group.works), "the stream stands behind each"
    assert {state for _, state, _ in setting.records()} == {"issued"}
    setting.driver.reach(2)
    until(lambda: [state for _, state, _ in setting.records()] == ["completed"] * 2 + ["issued"] * 3)
    setting.driver.reach()
    until(lambda: {state for _, state, _ in setting.records()} == {"completed"})
    assert [nbytes for _, _, nbytes in setting.records()] == [32] * 5


def _identities(values: Any) -> Any:
    return [_identities(value) for value in values] if isinstance(values, list) else id(values)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_captured_call_ends_when_it_is_captured(setting: Setting, capturing: bool) -> None:
    setting.driver.capture(capturing)
    setting.communicator.all_reduce(torch.zeros(3))
    assert setting.records() == [("all_reduce", "completed" if capturing else "issued", 12)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_calls_that_are_not_plain_take_the_general_path_and_are_recorded_once(setting: Setting) -> None:
    dist = setting.communicator
    square = torch.zeros(4, 4)
    setting.cuda.reached.add(DEVICE)
    setting.driver.reach()
    dist.all_reduce(square.t()[1:])
    dist.all_reduce(square, ReduceOp.MAX)
    dist.all_reduce(square, log_name="gradients")
    dist.all_gather_into_tensor(torch.zeros(2, dtype=torch.complex64), torch.zeros(1, dtype=torch.complex64))
    assert len(setting.records()) == 4
    with pytest.raises(UsageError, match="2 ranks"):
        dist.all_gather_into_tensor(torch.zeros(7), torch.zeros(3))
    with pytest.raises(UsageError, match="does not divide"):
        dist.all_to_all_single(torch.zeros(3, 2), torch.zeros(3, 2))
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(2)])
    with pytest.raises(UsageError, match="nested"):
        dist.all_to_all_single(nested, nested)
    assert len(setting.records()) == 4


def test_an_event_is_reused_once_the_stream_has_passed_it(setting: Setting) -> None:
    def more_calls() -> int:
        """How many events were made for three calls."""
        before = setting.driver.events
        for _ in range(3):
            setting.communicator.all_reduce(torch.zeros(3))
        return setting.driver.events - before

    assert more_calls() == 3
    for rounds in range(1, 20):
        setting.driver.reach(3 * rounds)
        until(lambda done=3 * rounds: setting.communicator.record.completed == done)  # type: ignore[misc]
        if more_calls() == 0:
            return
        # The events come back just after, which may have been too late.
    raise AssertionError("no event was used again")


def test_calls_on_the_default_stream_share_an_event(setting: Setting) -> None:
    """The watch records it, behind all of them. A call that comes later waits for the next one."""
    setting.cuda.current = (0, 0, 1)
    for _ in range(5):
        setting.communicator.all_reduce(torch.zeros(3))
    until(lambda: setting.driver.events >= 1)
    time.sleep(0.02)
    before = setting.driver.events
    assert before < 5
    setting.communicator.all_reduce(torch.zeros(3))
    setting.driver.reach(before, stream=0)
    until(lambda: setting.communicator.record.completed == 5)
    assert [state for _, state, _ in setting.records()] == ["completed"] * 5 + ["issued"]
    setting.driver.reach(stream=0)
    until(lambda: setting.communicator.record.completed == 6)


@pytest.mark.parametrize("reached", [0, 1, 2, 7, 12, 13])
def test_the_watch_finds_how_far_a_stream_has_come(setting: Setting, reached: int) -> None:
    """It asks about few of the events. Thirteen calls, one event each."""
    for _ in range(13):
        setting.communicator.all_reduce(torch.zeros(3))
    setting.driver.reach(reached)
    until(lambda: setting.communicator.record.completed == reached)
    time.sleep(0.01)
    states = [state for _, state, _ in setting.records()]
    assert states == ["completed"] * reached + ["issued"] * (13 - reached)


def test_a_timeout_applies_on_the_fast_path_too(setting: Setting) -> None:
    dist = setting.communicator
    dist.broadcast(torch.zeros(3), src=0)
    dist.set_timeout(7.0)
    for call in (
        lambda: dist.all_reduce(torch.zeros(3)),
        lambda: dist.broadcast(torch.zeros(3), src=0),
        lambda: dist.all_gather_into_tensor(torch.zeros(6), torch.zeros(3)),
        lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(6)),
        lambda: dist.all_to_all_single(torch.zeros(6), torch.zeros(6)),
    ):
        call()
        assert setting.group.asked[-1][-1].timeout.total_seconds() == 7.0


def test_an_immediate_error_is_mapped_and_ends_the_group(setting: Setting) -> None:
    """As with torch's blocking wait."""
    setting.group.error = RuntimeError("WorkNCCL(...) ran for 8000 milliseconds before timing out")
    with pytest.raises(CommTimeout, match=r"broadcast #0 \(float32\[3\], root 1, group scripted\) timed out"):
        setting.communicator.broadcast(torch.zeros(3), src=1)
    assert setting.records() == [("broadcast", "failed", 12)]
    with pytest.raises(CommTimeout, match="broadcast #0"):
        setting.communicator.all_reduce(torch.zeros(3))
    assert len(setting.records()) == 1


@pytest.mark.parametrize("freed", [False, True])
def test_an_error_that_torchs_watchdog_cleaned_up_ends_the_group(own: Setting, freed: bool) -> None:
    """Whether or not that has freed the stream, as if the call had succeeded."""
    own.communicator.set_timeout(60)
    own.communicator.broadcast(torch.zeros(3), src=1)
    own.group.get_error = lambda: SimpleNamespace(name="REMOTE_ERROR")  # type: ignore[method-assign]
    time.sleep(0.15)
    if freed:
        own.driver.reach()
    until(lambda: own.communicator.fault is not None)
    until(lambda: own.records() == [("broadcast", "failed", 12)])
    with pytest.raises(PeerLost, match="REMOTE_ERROR"):
        own.communicator.all_reduce(torch.zeros(3), ReduceOp.MAX)
    assert len(own.records()) == 1


def test_a_call_whose_event_cannot_be_recorded_has_failed(setting: Setting) -> None:
    setting.driver.fail(700)
    with pytest.raises(RingwayError, match=r"all_reduce #0 .*CUDA_ERROR_ILLEGAL_ADDRESS"):
        setting.communicator.all_reduce(torch.zeros(3))
    assert setting.records() == [("all_reduce", "failed", 12)]


def test_a_device_that_fails_ends_its_calls_but_not_the_watch(setting: Setting) -> None:
    setting.communicator.all_reduce(torch.zeros(3))
    setting.driver.fail(700)
    until(lambda: setting.records() == [("all_reduce", "failed", 12)])
    setting.driver.fail(0)
    setting.driver.reach()
    setting.communicator.all_reduce(torch.zeros(3))
    until(lambda: setting.records()[-1] == ("all_reduce", "completed", 12))


def test_a_rank_whose_device_failed_leaves_by_name(own: Setting) -> None:
    """A CUDA error such as an illegal access or one of the memory stays: nothing is tried again."""
    told: list[BaseException] = []

    class Hears(Listener):
        def failed(self, group: Any, error: BaseException) -> BaseException:
            told.append(error)
            return error

    own.listeners.append(Hears())
    own.communicator.set_timeout(60)
    own.communicator.all_reduce(torch.zeros(3))
    own.driver.fail(700)
    until(lambda: own.communicator.fault is not None)
    own.driver.fail(0)
    assert [(type(error), getattr(error, "rank", None)) for error in told] == [(PeerLost, 0)]
    assert "rank 0 has lost its device: CUDA error: " in str(told[0])
    with pytest.raises(RingwayError, match="cannot use its GPU any more") as raised:
        own.communicator.all_reduce(torch.zeros(3))
    assert not isinstance(raised.value, PeerLost), "the program must not go on as a survivor"
    until(lambda: own.records() == [("all_reduce", "failed", 12)])


def test_an_asynchronous_call_ends_with_the_stream_that_waits_for_it(setting: Setting) -> None:
    tensor = torch.zeros(3)
    work: Any = setting.communicator.all_reduce(tensor, async_op=True)
    assert isinstance(work, FastWork)
    assert setting.group.asked[-1][-1].asyncOp
    assert work.result()[0] is tensor
    assert not work.is_completed()
    assert setting.driver.events == 0
    assert work.wait()
    assert work.wait()
    assert (setting.driver.events, len(setting.group.works[-1].waits)) == (1, 2)
    kept = weakref.ref(setting.group.works.pop())
    del work
    until(lambda: kept() is None)
    assert setting.records() == [("all_reduce", "issued", 12)]
    setting.driver.reach(1)
    until(lambda: setting.records() == [("all_reduce", "completed", 12)])


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_wait_in_a_compiled_function(setting: Setting) -> None:
    """Of a call that the function makes, and of one that it is given."""
    torch.compiler.reset()
    given: Any = setting.communicator.all_reduce(torch.zeros(3), async_op=True)
    assert isinstance(given, FastWork)

    @torch.compile(backend="eager")
    def doubled(tensor: torch.Tensor, before: Any) -> torch.Tensor:
        work: Any = setting.communicator.all_reduce(tensor, async_op=True)
        twice = tensor * 2
        before.wait()
        work.wait()
        return twice + 1

    assert doubled(torch.ones(2), given).tolist() == [3, 3]
    assert [work.waits for work in setting.group.works[:2]] == [[()], [()]]


def test_asynchronous_calls_that_nobody_waits_for_end_with_torchs_works(setting: Setting) -> None:
    calls, tensor = setting.communicator.calls, torch.zeros(3)
    works = [calls.run_fast(ALL_REDUCE.code, tensor, tensor, -1, True) for _ in range(3)]
    assert all(isinstance(work, FastWork) for work in works)
    setting.group.works[0].finished.set()
    setting.group.works[2].finished.set()  # out of order: the device has not passed the second yet
    until(lambda: [state for _, state, _ in setting.records()] == ["completed", "issued", "issued"])
    setting.group.works[1].finished.set()
    until(lambda: [state for _, state, _ in setting.records()] == ["completed"] * 3)
    assert works[2].is_completed()  # type: ignore[union-attr]


def test_the_future_of_an_asynchronous_call_is_torchs(setting: Setting) -> None:
    """It orders streams. One that waits for the device would hold up DDP's backward."""
    work: Any = setting.communicator.all_reduce(torch.zeros(3), async_op=True)
    future: torch.futures.Future[Any] = torch.futures.Future()
    setting.group.works[-1].get_future = lambda: future  # type: ignore[attr-defined]
    assert work.get_future() is future


def test_asynchronous_calls_that_are_special_take_the_general_path(setting: Setting) -> None:
    dist, tensor = setting.communicator, torch.zeros(4)
    for make in (
        lambda: dist.all_reduce(torch.zeros(4, dtype=torch.complex64), async_op=True),
        lambda: dist.all_reduce(torch.zeros(4, dtype=torch.int32), ReduceOp.AVG, async_op=True),
        lambda: dist.all_reduce(tensor, async_op=True, log_name="gradients"),
        lambda: dist.all_to_all_single(tensor, tensor.clone(), [1, 3], [1, 3], async_op=True),
    ):
        assert not isinstance(make(), FastWork)
    assert len(setting.records()) == 4


@pytest.mark.parametrize("how", ["synchronous", "asynchronous", "waited for"])
def test_the_logger_gets_the_devices_times(setting: Setting, how: str) -> None:
    """The stand-in's clock moves by 0.5 ms at each event: between the start and the end of a call there is one step. An
    asynchronous call ends on torch's stream, for which a stream of ours waits: the program's stream does not wait."""
    setting.recorder.choose(True, True, False, [], [])
    tensor = torch.zeros(4)
    works = [setting.communicator.all_reduce(tensor, async_op=how != "synchronous") for _ in range(2)]
    assert all(isinstance(work, FastWork) for work in works) == (how != "synchronous")
    assert setting.cuda.current == (STREAM, 0, 1)
    if how == "waited for":
        for work in works:
            assert work is not None
            work.wait()
    assert [len(work.waits) for work in setting.group.works] == [2 if how == "waited for" else 1] * 2
    for work in setting.group.works:
        work.finished.set()
    setting.driver.reach()
    setting.driver.reach(stream=ASIDE)
    until(lambda: [state for _, state, _ in setting.records()] == ["completed"] * 2)
    first, second = map(recorded, setting.recorder.recent(2))
    assert [round(1e9 * (call.duration or 0)) for call in (first, second)] == [500_000] * 2
    assert first.stream == second.stream == 1
    assert second.started_ns >= first.completed_ns
    assert [row[5:7] for row in setting.recorder.logged()] == [(2, 1_000_000)]


def test_open_calls_of_a_logged_group_are_dropped_when_they_end(setting: Setting) -> None:
    """Until then they hold their tensors, which torch has let go of."""
    setting.recorder.choose(True, True, False, [], [])
    path = setting.communicator.devices.first._fast_path  # type: ignore[attr-defined]
    source = torch.zeros(4)
    setting.communicator.all_gather_into_tensor(torch.zeros(8), source, async_op=True)
    kept = weakref.ref(source)
    del source
    assert kept() is not None
    setting.driver.reach(stream=ASIDE)
    setting.group.works.pop().finished.set()
    setting.group.asked.clear()
    until(lambda: not path.open.calls and kept() is None)
    assert [state for _, state, _ in setting.records()] == ["completed"]


def test_messages_take_the_fast_path(setting: Setting) -> None:
    dist, tensor = setting.communicator, torch.zeros(4)
    dist.send(tensor, dst=1, tag=3)
    dist.recv(tensor, src=1)
    sent, received = dist.isend(tensor, dst=1), dist.irecv(tensor, src=1, tag=4)
    assert isinstance(sent, FastWork)
    assert isinstance(received, FastWork)
    assert (sent.result(), received.result()[0] is tensor) == ([], True)
    assert [(name, *arguments[1:]) for name, *arguments in setting.group.asked] == [
        ("send", 1, 3),
        ("recv", 1, 0),
        ("send", 1, 0),
        ("recv", 1, 4),
    ]
    sent.wait()
    received.wait()
    setting.driver.reach()
    until(lambda: setting.records() == [(op, "completed", 16) for op in ("send", "recv", "send", "recv")])


def test_torchs_options_reach_torch_as_they_are(setting: Setting) -> None:
    """As a bridge passes them on: no Call is made, and no option is copied."""
    bridge, tensor = setting.bridge(), torch.zeros(4)
    options = torch.distributed.AllreduceOptions()
    options.asyncOp = False
    for reduce in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        options.reduceOp = reduce
        assert bridge.allreduce([tensor], options) is None
        assert setting.group.asked[-1][-1] is options
    options.asyncOp = True
    assert isinstance(bridge.allreduce([tensor], options), FastWork)
    assert [recorded(row).reduce for row in setting.recorder.recent(9)] == ["SUM", "AVG", "MAX", "MAX"]
    setting.group.works[-1].finished.set()
    # The fast path takes none of these: the Python method does.
    options.asyncOp = False
    setting.cuda.reached.add(DEVICE)
    for given in (([tensor], None), ([tensor] * 2, options), ([torch.zeros(4, 4).t()[1:]], options)):
        seen = len(setting.group.asked)
        bridge.allreduce(*given)
        assert setting.group.asked[seen][-1] is not options
    bridge.allreduce(tensors=[tensor], opts=options)
    assert len(setting.records()) == 8


def test_cpp_gets_torchs_own_work(setting: Setting) -> None:
    """DDP calls from a thread of the autograd engine, and asks the Work for nothing but its future."""
    bridge, tensor = setting.bridge(), torch.zeros(4)
    works = [
        setting.driver.call_from_cpp(bridge.allreduce, [tensor], torch.distributed.AllreduceOptions()),
        setting.driver.call_from_cpp(bridge.send, [tensor], 1, 0),
    ]
    assert works == setting.group.works
    assert not any(work.waits for work in works)
    assert setting.records() == [("all_reduce", "issued", 16), ("send", "issued", 16)]
    for work in works:
        work.finished.set()
    until(lambda: setting.records() == [("all_reduce", "completed", 16), ("send", "completed", 16)])


@pytest.mark.parametrize("message_at", [None, 2, 0])
def test_a_call_ends_the_older_half_of_many_before_it(setting: Setting, message_at: int | None) -> None:
    """It has the interpreter's lock. torch is asked once, about the last of them; a message tells nothing about the
    collectives, nor they about it."""
    first, ended = {None: (0, 4), 2: (0, 2), 0: (1, 4)}[message_at]
    path: Any = setting.communicator.devices.first._fast_path  # type: ignore[attr-defined]
    sweep, path.open.sweep = path.open.sweep, lambda: None  # nobody else ends calls
    tensor, works, states = torch.zeros(3), setting.group.works, list[str]()
    for _ in range(50):  # calls that take long are left to others, and this machine may be slow
        began = time.monotonic()
        works.clear()
        for number in range(8):
            if number == message_at:
                setting.communicator.isend(tensor, dst=1)
            else:
                setting.communicator.all_reduce(tensor, async_op=True)
        works[3 + first].finished.set()
        works[1].finished.set()
        before = [state for _, state, _ in setting.records()][-8:]
        setting.communicator.all_reduce(tensor, async_op=True)
        states = [state for _, state, _ in setting.records()][-9:]
        quick = time.monotonic() - began < 0.02
        for work in works:
            work.finished.set()
        sweep()
        assert not path.open.calls
        if quick:
            break
    assert before == ["issued"] * 8
    assert states == ["issued"] * first + ["completed"] * ended + ["issued"] * (9 - first - ended)


def test_a_message_that_has_not_ended_holds_up_no_other_call(setting: Setting) -> None:
    """But a collective does hold up those behind it: torch runs them in order."""
    path: Any = setting.communicator.devices.first._fast_path  # type: ignore[attr-defined]
    tensor, works = torch.zeros(3), setting.group.works
    setting.communicator.irecv(tensor, src=1)
    for _ in range(3):
        setting.communicator.all_reduce(tensor, async_op=True)
    setting.communicator.isend(tensor, dst=1)
    for ended in (1, 3, 4):
        works[ended].finished.set()
    path.open.sweep()
    assert [state for _, state, _ in setting.records()] == ["issued", "completed", "issued", "issued", "completed"]


def test_nobody_takes_the_interpreters_lock_for_calls_that_are_open_for_a_moment(setting: Setting) -> None:
    path: Any = setting.communicator.devices.first._fast_path  # type: ignore[attr-defined]
    sweep, looks = path.open.sweep, list[float]()
    path.open.sweep = lambda: (looks.append(time.monotonic()), sweep())
    began = time.monotonic()
    setting.communicator.all_reduce(torch.zeros(3), async_op=True)
    setting.group.works[0].finished.set()
    until(lambda: [state for _, state, _ in setting.records()] == ["completed"])
    assert looks[0] - began > 0.05


def test_a_bridges_methods_are_native_while_the_fast_path_is_open(setting: Setting) -> None:
    class Sees(Listener):
        sees_calls = True

    bridge, tensor = setting.bridge(), torch.zeros(1000)
    assert isinstance(bridge.allreduce, _core.BridgeMethod)
    torch._C._distributed_c10d._broadcast_coalesced(bridge, [tensor], 1 << 20, 0)  # type: ignore[attr-defined]
    assert [name for name, *_ in setting.group.asked] == ["broadcast"], "C++ calls them"
    listener = Sees()
    setting.listeners.append(listener)
    setting.communicator.calls.refresh()
    assert not isinstance(bridge.allreduce, _core.BridgeMethod)
    setting.listeners.remove(listener)
    setting.communicator.calls.refresh()
    assert isinstance(bridge.allreduce, _core.BridgeMethod)
    setting.group.error = RuntimeError("NCCL error: ncclRemoteError")
    options = torch.distributed.AllreduceOptions()
    options.asyncOp = False
    for _ in range(2):  # the second is refused
        with pytest.raises(PeerLost):
            bridge.allreduce([tensor], options)
    assert not isinstance(bridge.allreduce, _core.BridgeMethod)


@pytest.mark.parametrize("how", ["synchronous", "waited for", "not waited for"])
def test_an_overdue_call_ends_the_group(own: Setting, how: str) -> None:
    own.group.synchronous = True
    other = boards(own)
    work = own.communicator.broadcast(torch.zeros(3), src=1, async_op=how != "synchronous")
    if how == "waited for":
        assert work is not None
        work.wait()
    until(lambda: own.communicator.fault is not None)
    assert isinstance(own.communicator.fault, CommTimeout)
    assert "broadcast #0" in str(own.communicator.fault)
    until(lambda: "abort" in [name for name, *_ in own.group.asked])  # just after the fault is set
    until(lambda: own.records() == [("broadcast", "failed", 12)])
    assert other.aborted_from == 0
    own.communicator.devices.settle()
    if work is not None:
        with pytest.raises(CommTimeout):
            work.wait()


def test_settling_waits_for_the_fast_path(own: Setting) -> None:
    own.communicator.set_timeout(60)
    own.group.synchronous = True
    own.communicator.all_reduce(torch.zeros(3))
    settled = threading.Event()
    threading.Thread(target=lambda: (own.communicator.devices.settle(), settled.set()), daemon=True).start()
    assert not settled.wait(0.3)
    own.driver.reach()
    assert settled.wait(30)
    assert own.communicator.fault is None


@pytest.mark.parametrize("known_to", ["the group", "the call"])
def test_settling_asks_how_calls_of_the_general_path_ended(
    own: Setting, monkeypatch: pytest.MonkeyPatch, known_to: str
) -> None:
    """torch says at once that they have ended. The device watch asks later how."""
    monkeypatch.setattr("ringway.backends.device_watch.LOOK_LATER", 60.0)
    monkeypatch.setattr("ringway.backends.nccl.handles._DOUBTFUL_SECONDS", 0.0)
    own.communicator.set_timeout(60)
    own.communicator.all_reduce(torch.zeros(3), async_op=True, log_name="gradients")
    if known_to == "the group":
        own.group.get_error = lambda: SimpleNamespace(name="REMOTE_ERROR")  # type: ignore[method-assign]
    else:
        own.group.works[-1].error = RuntimeError("all_reduce: ncclRemoteError")
    own.group.works[-1].finished.set()
    with pytest.raises(PeerLost, match=r"REMOTE_ERROR|all_reduce #0 .*ncclRemoteError"):
        own.communicator.devices.settle()
    assert isinstance(own.communicator.fault, PeerLost)


def test_settling_waits_for_a_call_that_is_being_judged(own: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has learned that it has ended, and asks torch how."""
    monkeypatch.setattr("ringway.backends.nccl.handles._DOUBTFUL_SECONDS", 0.0)
    asked, answer = threading.Event(), threading.Event()
    own.communicator.set_timeout(60)
    own.communicator.all_reduce(torch.zeros(3), async_op=True)

    def exception() -> Exception:
        if not asked.is_set():
            asked.set()
            answer.wait(30)
        return RuntimeError("ncclRemoteError")

    work, path = own.group.works[0], own.communicator.devices.first._fast_path  # type: ignore[attr-defined]
    work.exception = exception  # type: ignore[method-assign]
    work.finished.set()
    judge = threading.Thread(target=path._sweep)
    judge.start()
    assert asked.wait(30)
    own.communicator.devices.settle()
    assert isinstance(own.communicator.fault, PeerLost)
    answer.set()
    judge.join()


class Explains(Listener):
    """A listener that takes long to explain why a group fails."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.go_on = threading.Event()

    def failed(self, group: Any, error: BaseException) -> BaseException:
        self.told.append(str(error))
        self.go_on.wait(30)
        return error


def test_settling_waits_until_a_failed_device_is_explained(own: Setting) -> None:
    explains = Explains()
    own.listeners.append(explains)
    own.communicator.set_timeout(60)
    own.communicator.all_reduce(torch.zeros(3))
    own.driver.fail(700)
    settled = threading.Event()
    threading.Thread(target=lambda: (own.communicator.devices.settle(), settled.set()), daemon=True).start()
    assert not settled.wait(0.3)
    explains.go_on.set()
    assert settled.wait(30)
    assert "cannot use its GPU any more" in str(own.communicator.fault)


def test_a_communicator_is_aborted_once(own: Setting) -> None:
    """Even if two threads find out at the same time that the group has failed."""
    both = threading.Barrier(2, timeout=30)

    class Meets(Listener):
        def failed(self, group: Any, error: BaseException) -> BaseException:
            both.wait()
            return error

    own.listeners.append(Meets())
    threads = [
        threading.Thread(target=own.communicator.health.fail, args=[PeerLost("rank 1 is gone", rank=1)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name, *_ in own.group.asked].count("abort") == 1


def boards(own: Setting) -> _core.GroupRecord:
    """The record of another rank of this host."""
    fd = _core.create_call_board(2, 2, "t" * 32)
    other = _core.GroupRecord(_core.Recorder(16), "g", 2)
    other.compare(_core.CallBoard(fd, 1, [0, 1], "t" * 32))
    own.communicator.calls.compare(_core.CallBoard(fd, 0, [0, 1], "t" * 32), None)
    os.close(fd)
    return other


def test_ranks_are_told_before_a_group_is_aborted(own: Setting) -> None:
    """They are told which calls were sound: those that this rank has settled."""
    other, announced = boards(own), list[int | None]()
    own.communicator.set_timeout(60)
    own.group.abort = lambda: announced.append(other.aborted_from)
    own.communicator.all_reduce(torch.zeros(3))
    own.driver.reach(1)
    own.communicator.devices.settle()
    own.communicator.all_reduce(torch.zeros(3))
    own.communicator.health.end(PeerLost("rank 1 is gone", rank=1))
    assert announced == [1]


@pytest.mark.parametrize("how", ["failed", "closed"])
def test_what_an_idle_rank_has_settled_is_sound(own: Setting, how: str) -> None:
    other = boards(own)
    own.communicator.set_timeout(60)
    own.communicator.all_reduce(torch.zeros(3))
    own.driver.reach()
    own.communicator.devices.settle()
    if how == "failed":
        own.communicator.health.end(PeerLost("rank 1 is gone", rank=1))
    else:
        own.communicator.close(wait=False)
    assert other.aborted_from == (1 if how == "failed" else None)


def test_a_call_that_the_device_has_passed_spoils_nothing(own: Setting) -> None:
    """Even if the watch has not looked since."""
    other = boards(own)
    own.communicator.set_timeout(60)
    own.communicator.all_reduce(torch.zeros(3))
    own.driver.reach()
    own.communicator.close(wait=False)
    assert other.aborted_from is None


@pytest.mark.parametrize("async_op", [False, True])
def test_any_abort_may_have_spoilt_replays_of_a_graph(
    own: Setting, monkeypatch: pytest.MonkeyPatch, async_op: bool
) -> None:
    """They have no numbers."""
    monkeypatch.setattr("ringway.backends.nccl.backend._NOTICE_SECONDS", 0.01)
    monkeypatch.setattr("ringway.backends.nccl.backend.cuda_device", lambda call: DEVICE)
    other = boards(own)
    own.communicator.set_timeout(60)
    own.driver.capture(True)
    own.cuda.capturing = True
    own.communicator.all_reduce(torch.zeros(3), async_op=async_op)
    own.driver.capture(False)
    own.communicator.devices.settle()
    other.announce_abort(1)
    own.communicator.devices.settle()
    assert isinstance(own.communicator.fault, PeerLost)


def test_an_abort_of_the_program_is_announced_too(own: Setting) -> None:
    other = boards(own)
    own.communicator.set_timeout(60)
    own.communicator.isend(torch.zeros(3), dst=1)
    own.communicator.close(wait=False)
    assert other.aborted_from == 0, "a message: nothing is known about the calls of other ranks"


@pytest.mark.parametrize("listened", [False, True])
def test_a_call_that_ended_with_an_aborted_ranks_garbage_is_not_settled(
    own: Setting, monkeypatch: pytest.MonkeyPatch, listened: bool
) -> None:
    """The kernel of the rank that aborts goes on and sends garbage: this rank's call ends, and nothing else tells."""

    class Sees(Listener):
        sees_calls = True

    monkeypatch.setattr("ringway.backends.nccl.backend._NOTICE_SECONDS", 0.01)
    other, dist = boards(own), own.communicator
    dist.set_timeout(60)
    dist.all_reduce(torch.zeros(3))
    own.driver.reach()
    other.announce_abort(1)
    dist.devices.settle()
    dist.health.require()  # the call before was sound
    if listened:
        own.listeners.append(Sees())
        dist.calls.refresh()
    dist.all_reduce(torch.zeros(3))
    own.driver.reach()
    for work in own.group.works:
        work.finished.set()
    dist.devices.settle()
    with pytest.raises(PeerLost, match="another rank has aborted the group"):
        dist.health.require()


def test_a_message_that_ended_with_garbage_is_not_settled(own: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringway.backends.nccl.backend._NOTICE_SECONDS", 0.01)
    other = boards(own)
    own.communicator.set_timeout(60)
    own.communicator.recv(torch.zeros(3), src=1)
    own.driver.reach()
    own.communicator.devices.settle()
    other.announce_abort(0)
    own.communicator.devices.settle()
    with pytest.raises(PeerLost, match="another rank has aborted the group"):
        own.communicator.health.require()


def test_a_barrier_that_ended_with_garbage_raises(own: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringway.backends.nccl.backend._NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    other = boards(own)
    own.communicator.set_timeout(60)

    def barrier() -> None:
        own.group.works.clear()
        ends = threading.Thread(target=lambda: (until(lambda: own.group.works), own.group.works[0].finished.set()))
        ends.start()
        try:
            own.communicator.barrier()
        finally:
            ends.join()

    other.announce_abort(1)
    barrier()
    with pytest.raises(PeerLost, match="another rank has aborted the group"):
        barrier()


def test_a_wait_with_a_timeout_does_not_end_well_with_garbage(own: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringway.backends.nccl.backend._NOTICE_SECONDS", 0.01)
    other = boards(own)
    own.communicator.set_timeout(60)
    works = [own.communicator.all_reduce(torch.zeros(3), async_op=True) for _ in range(2)]
    other.announce_abort(1)
    for each in own.group.works:
        each.finished.set()
    assert works[0] is not None
    assert works[1] is not None
    works[0].wait(timedelta(seconds=30))
    with pytest.raises(PeerLost, match="another rank has aborted the group"):
        works[1].wait(timedelta(seconds=30))


def test_a_wait_with_a_timeout_waits_for_the_last_step_too(own: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringway.backends.nccl.backend._NOTICE_SECONDS", 0.01)
    monkeypatch.setattr("ringway.backends.nccl.handles.cuda_device", lambda call: DEVICE)
    other = boards(own)
    own.communicator.set_timeout(60)
    works: list[Any] = [own.communicator.all_reduce(torch.zeros(4, 4).t()[1:], async_op=True) for _ in range(2)]
    with pytest.raises(CommTimeout, match=r"all_reduce #0 .* it continues"):
        works[0].wait(0.05)
    other.announce_abort(1)
    own.cuda.reached.add(DEVICE)
    works[0].wait(30)
    assert own.cuda.waited == 1
    with pytest.raises(PeerLost, match="another rank has aborted the group"):
        works[1].wait(30)


def test_what_a_rank_has_noticed_says_more_than_another_ranks_abort(
    own: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringway.backends.nccl.backend._NOTICE_SECONDS", 0.01)
    explains, other = Explains(), boards(own)
    own.listeners.append(explains)
    own.communicator.set_timeout(60)
    work: Any = own.communicator.all_reduce(torch.zeros(3), async_op=True)
    path = own.communicator.devices.first._fast_path  # type: ignore[attr-defined]
    other.announce_abort(0)
    path._failed(PeerLost("rank 1 is gone", rank=1))
    own.group.works[-1].finished.set()
    threading.Timer(0.2, explains.go_on.set).start()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        work.wait(30)
    assert explains.told == ["rank 1 is gone"]


@pytest.mark.parametrize("raised", [RuntimeError("NCCL error: ncclRemoteError"), KeyboardInterrupt(), UsageError("x")])
def test_what_torchs_wait_raises_is_explained(setting: Setting, raised: BaseException) -> None:
    work: Any = setting.communicator.all_reduce(torch.zeros(3), async_op=True)

    def wait() -> bool:
        raise raised

    setting.group.works[-1].wait = wait  # type: ignore[method-assign]
    for ask in (work.wait, lambda: work.wait(timeout=None)):
        with pytest.raises(PeerLost if type(raised) is RuntimeError else type(raised)) as seen:
            ask()
        assert type(raised) is RuntimeError or seen.value is raised


def test_calls_end_while_another_thread_holds_the_interpreters_lock(setting: Setting) -> None:
    for number in range(1, 20):  # the thread that ends calls may get no CPU for long
        setting.communicator.all_reduce(torch.zeros(3))
        began = _core.monotonic_ns()
        setting.driver.reach(number)
        ctypes.PyDLL(None).usleep(500_000)
        ended = _core.monotonic_ns()
        row = recorded(setting.recorder.recent(1)[0])
        if row.state == "completed":
            assert began < row.completed_ns < ended
            return
    raise AssertionError("no call ended")


def test_settling_asks_torchs_works_that_nobody_waited_for(own: Setting) -> None:
    """DDP waits for futures only. The device watch looks rarely."""
    own.communicator.set_timeout(60)
    works = [own.communicator.all_reduce(torch.zeros(3), async_op=True) for _ in range(2)]
    for work in own.group.works:
        work.finished.set()
    own.communicator.devices.settle()
    assert [state for _, state, _ in own.records()] == ["completed"] * 2
    del works


def test_a_wait_with_a_timeout_does_not_wait_inside_torch(own: Setting) -> None:
    """torch would abort the group."""
    own.communicator.set_timeout(60)
    work: Any = own.communicator.all_reduce(torch.zeros(3), async_op=True)
    with pytest.raises(CommTimeout, match=r"all_reduce #0 .* it continues"):
        work.wait(0.05)
    assert own.group.works[-1].waits == []
    own.group.works[-1].finished.set()
    assert work.wait(30)
    assert own.communicator.fault is None


@pytest.mark.parametrize("ours", [False, True])
def test_nothing_outlives_its_group(monkeypatch: pytest.MonkeyPatch, library: Path, ours: bool) -> None:
    """Not even until the next garbage collection, because torch's group ends in its destructor."""
    setting = Setting(monkeypatch, library, ours=ours)
    setting.driver.reach()
    setting.communicator.all_reduce(torch.zeros(3))
    until(lambda: setting.records() == [("all_reduce", "completed", 12)])
    work = weakref.ref(setting.group.works.pop())
    until(lambda: work() is None)
    group = weakref.ref(setting.group)
    gc.disable()
    try:
        setting.communicator.close()
        del setting.communicator, setting.group
        until(lambda: group() is None)
    finally:
        gc.enable()


def test_each_device_has_its_own_fast_path(monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    """The first path that accepts the tensor runs the call. A barrier has no tensor and runs on the first device."""
    taken = []

    class Path(_core.FastPath):
        def __init__(self, record: _core.GroupRecord, name: str, takes: bool) -> None:
            super().__init__(record, 0, 2, _core.CPU, 0, 0, 1 << ALL_REDUCE.code | 1 << BARRIER.code)
            self._name, self._takes = name, takes

        def run(self, op: int, *_: Any) -> bool:
            taken.append((self._name, OPS[op].name))
            return self._takes or op == BARRIER.code

    info = scripted_info(size=2)
    first, second = (adopt(info, Group(), "nccl") for _ in range(2))
    monkeypatch.setattr(first, "fast_paths", lambda record, health: [Path(record, "first", takes=False)])
    monkeypatch.setattr(second, "fast_paths", lambda record, health: [Path(record, "second", takes=True)])
    dist = Communicator(info, {"cpu": first, "xpu": first, "meta": lambda: second}, _core.Recorder(64), [])
    dist.devices.routes_on("meta")  # made by the first call on that device
    dist.calls.refresh()
    dist.all_reduce(torch.zeros(3))
    dist.barrier()
    assert taken == [("first", "all_reduce"), ("second", "all_reduce"), ("first", "barrier")]


def test_an_endless_timeout_is_no_deadline(own: Setting) -> None:
    """In nanoseconds, a thousand years overflow."""
    own.communicator.set_timeout(timedelta(days=365_000).total_seconds())
    own.communicator.all_reduce(torch.zeros(3))
    time.sleep(0.25)  # calls are judged after 0.1 s
    assert own.communicator.fault is None
    own.driver.reach()
    until(lambda: own.records() == [("all_reduce", "completed", 12)])


def test_a_failed_groups_calls_end_behind_another_groups_call(own: Setting) -> None:
    """Both wait on one stream. The failed group is reported once."""
    own.communicator.set_timeout(60)
    own.communicator.all_reduce(torch.zeros(3))
    info = replace(own.communicator.info, name="second", timeout=0.3)
    failures: list[BaseException] = []

    class Failures(Listener):
        def failed(self, group: Any, error: BaseException) -> BaseException:
            failures.append(error)
            return error

    second = Communicator(info, {"cpu": NcclBackend(info, Group())}, own.recorder, [Failures()])
    second.broadcast(torch.zeros(3), src=1)
    until(lambda: own.records() == [("all_reduce", "issued", 12), ("broadcast", "failed", 12)])
    time.sleep(0.25)
    assert [type(error) for error in failures] == [CommTimeout]
    assert own.communicator.fault is None
    own.driver.reach()
    until(lambda: own.records()[0] == ("all_reduce", "completed", 12))


def test_a_work_that_is_asked_late_knows_its_error(own: Setting) -> None:
    """torch is asked for errors of calls that took long. This one did, although nobody asked before."""
    own.communicator.set_timeout(60)
    work: Any = own.communicator.all_reduce(torch.zeros(3), async_op=True)
    time.sleep(0.15)
    own.group.works[0].error = RuntimeError("NCCL error: ncclRemoteError")
    own.group.works[0].finished.set()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), PeerLost)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(milliseconds=-1), 0])
def test_a_wait_from_cpp_is_as_cheap_as_one_from_python(setting: Setting, timeout: Any) -> None:
    """Functional collectives wait in C++, which passes a timeout of zero for none."""
    work: Any = setting.communicator.all_reduce(torch.zeros(3), async_op=True)
    assert work.wait(timeout)
    assert setting.driver.events == 1


def test_an_adopted_group_that_torchs_watchdog_cleaned_up_has_failed(setting: Setting) -> None:
    """Its stream goes on as if the call had succeeded."""
    setting.communicator.broadcast(torch.zeros(3), src=1)
    setting.group.get_error = lambda: SimpleNamespace(name="REMOTE_ERROR")  # type: ignore[method-assign]
    time.sleep(0.15)
    setting.driver.reach()
    until(lambda: setting.records() == [("broadcast", "failed", 12)])
    until(lambda: setting.communicator.fault is not None)  # just after: a thread explains the error first
    assert isinstance(setting.communicator.fault, PeerLost)


def test_a_timeout_that_changes_often_costs_no_memory(setting: Setting) -> None:
    path = setting.communicator.devices.first._fast_path  # type: ignore[attr-defined]
    for number in range(6):
        setting.communicator.set_timeout(7.0 + number % 2)
        setting.communicator.all_reduce(torch.zeros(3))
        assert setting.group.asked[-1][-1].timeout.total_seconds() == 7.0 + number % 2
    assert len(path._kinds) == 2


class _Preempted(Exception):
    """What the program's signal handler raises."""


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("raised", [_Preempted, KeyboardInterrupt])
def test_a_handler_that_raises_leaves_no_call_open(own: Setting, raised: type[BaseException], async_op: bool) -> None:
    """Its own error arrives, and the interrupted call ends once. Handlers run in Python code only, and between the
    call's number and its end only torch's method can be that."""
    dist, tensor = own.communicator, torch.zeros(3)
    dist.set_timeout(60)
    armed = False

    def allreduce(*arguments: Any) -> None:
        if armed:
            signal.raise_signal(signal.SIGUSR1)

    own.group.allreduce = allreduce  # type: ignore[method-assign]
    dist.all_reduce(tensor)
    own.driver.reach(1)
    until(lambda: dist.record.completed == 1)

    def handler(*_: Any) -> None:
        raise raised

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        armed = True
        with pytest.raises(raised):
            dist.all_reduce(tensor, async_op=async_op)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert dist.record.collectives == 2
    assert (dist.fault is None) == (raised is _Preempted)
    own.driver.reach()
    until(lambda: "issued" not in {state for _, state, _ in own.records()})
    time.sleep(0.05)
    assert dist.record.completed == 2


_EXITING = """
import sys, threading, time
import ringway._core as _core

record = _core.GroupRecord(_core.Recorder(64), "group")
calls = [_core.StreamCalls(_core.StreamWatch(sys.argv[1]), record, print)]
calls[0].follow(record.begin(0, 4, 0, 0, -1, 0), 0, 0, 1)
_core.begin_exit()
thread = threading.Thread(target=calls.clear)
thread.start()
thread.join()
"""


def test_a_thread_that_drops_a_group_at_exit_does_not_keep_the_interpreter(library: Path) -> None:
    """It holds the interpreter's lock, and must not sleep with it as the core's threads do at exit."""
    subprocess.run([sys.executable, "-c", _EXITING, str(library)], check=True, timeout=60)
