"""nccl's fast path, on a fake group and a fake device: CPU tensors take the place of CUDA tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from scripted_cuda import ScriptedCuda, ScriptedWork, scripted_info, until

import ringway._core as _core
from ringway.backends.nccl.fast_path import NcclFastPath
from ringway.backends.torch.adopt import adopt
from ringway.call import ALL_REDUCE, BARRIER, OPS, ReduceOp
from ringway.errors import CommTimeout, PeerLost, RingwayError, UsageError
from ringway.groups.communicator import Communicator
from ringway.observe.recorder import recorded

DEVICE = torch.device("cuda:0")


class Group:
    """A fake of torch's group that remembers its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.works: list[ScriptedWork] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        def method(*arguments: Any) -> ScriptedWork:
            self.asked.append((name, *arguments))
            self.works.append(ScriptedWork(self.error))
            return self.works[-1]

        return method


class Setting:
    """A communicator of two ranks whose calls take the fast path, and its group, device and recorder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = ScriptedCuda(monkeypatch)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: self.cuda._stream(DEVICE))
        monkeypatch.setattr(NcclFastPath, "device", _core.CPU)
        self.group = Group()
        self.recorder = _core.Recorder(64)
        info = scripted_info(size=2)
        self.communicator = Communicator(info, {"cpu": adopt(info, self.group, "nccl")}, self.recorder, [])

    def records(self) -> list[tuple[str, str, int]]:
        return [(one.op, one.state, one.nbytes) for one in map(recorded, self.recorder.recent(64))]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(monkeypatch)


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
    setting.cuda.reached.add(DEVICE)
    until(lambda: {state for _, state, _ in setting.records()} == {"completed"})
    assert [nbytes for _, _, nbytes in setting.records()] == [32] * 5


def _identities(values: Any) -> Any:
    return [_identities(value) for value in values] if isinstance(values, list) else id(values)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_captured_call_ends_when_it_is_captured(setting: Setting, capturing: bool) -> None:
    setting.cuda.capturing = capturing
    setting.communicator.all_reduce(torch.zeros(3))
    assert setting.records() == [("all_reduce", "completed" if capturing else "issued", 12)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_calls_that_are_not_plain_take_the_general_path_and_are_recorded_once(setting: Setting) -> None:
    dist = setting.communicator
    square = torch.zeros(4, 4)
    setting.cuda.reached.add(DEVICE)
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


def test_an_event_is_reused_once_the_stream_has_passed_it(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    event = torch.cuda.Event
    monkeypatch.setattr(torch.cuda, "Event", lambda: made.append(event()) or made[-1])
    for _ in range(3):
        setting.communicator.all_reduce(torch.zeros(3))
    assert len(made) == 3
    setting.cuda.reached.add(DEVICE)
    until(lambda: {state for _, state, _ in setting.records()} == {"completed"})
    for _ in range(3):
        setting.communicator.all_reduce(torch.zeros(3))
    assert len(made) == 3


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


def test_a_late_error_ends_the_group(setting: Setting) -> None:
    setting.communicator.broadcast(torch.zeros(3), src=1)
    work = setting.group.works[-1]
    work.error = RuntimeError("NCCL error: ncclRemoteError")
    work.finished.set()  # torch takes an error for an end; the stream does not get there
    until(lambda: setting.communicator.fault is not None)
    assert setting.records() == [("broadcast", "failed", 12)]
    setting.communicator.health.end_if_calls_differ()
    with pytest.raises(PeerLost, match=r"broadcast #0 \(root 1, group scripted\)"):
        setting.communicator.all_reduce(torch.zeros(3), ReduceOp.MAX)
    assert len(setting.records()) == 1


def test_a_call_whose_event_cannot_be_recorded_has_failed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(event: Any, stream: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda.Event, "record", broken)
    with pytest.raises(RingwayError, match=r"all_reduce #0 .*illegal memory access"):
        setting.communicator.all_reduce(torch.zeros(3))
    assert setting.records() == [("all_reduce", "failed", 12)]


def test_nothing_outlives_its_group(setting: Setting) -> None:
    """Not even until the next garbage collection, because torch's group ends in its destructor."""
    setting.cuda.reached.add(DEVICE)
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

        def run(self, op: int, outputs: Any, inputs: Any, peer: int, tag: int, wait: bool) -> bool:
            taken.append((self._name, OPS[op].name))
            return self._takes or op == BARRIER.code

    info = scripted_info(size=2)
    first, second = (adopt(info, Group(), "nccl") for _ in range(2))
    monkeypatch.setattr(first, "fast_paths", lambda record, health: [Path(record, "first", takes=False)])
    monkeypatch.setattr(second, "fast_paths", lambda record, health: [Path(record, "second", takes=True)])
    dist = Communicator(info, {"cpu": first, "xpu": first, "meta": lambda: second}, _core.Recorder(64), [])
    dist.devices.plan("meta")  # made by the first call on that device
    dist.calls.refresh()
    dist.all_reduce(torch.zeros(3))
    dist.barrier()
    assert taken == [("first", "all_reduce"), ("second", "all_reduce"), ("first", "barrier")]
