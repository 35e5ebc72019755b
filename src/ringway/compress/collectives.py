"""The compressed all-reduce, written once over a communicator's all_to_all and all_gather.

Two phases, two collectives:

1. Each worker adds its residual, encodes every shard for the rank that serves it, and keeps what was lost.
   all_to_all_single brings each server its shard from everybody.
2. The server averages what it decodes, adds its own residual, encodes the average, keeps what was lost.
   all_gather_into_tensor brings everybody all shards, which they decode into the tensor.

A large tensor travels in windows (`layout`), so that one is encoded while another is on the wire and a third is
decoded. With one scale a tensor a scale is known only after everything was seen: phase 2 then begins when
phase 1 has ended.

Every step is the same on all ranks in the same order, whatever the data: a NaN is reported, by everybody,
at the end.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.compress.auto import measured_forecast
from ringway.compress.codecs.codec import Codec, get_codec
from ringway.compress.codecs.onebit import OneBit
from ringway.compress.feedback import ErrorFeedback, Slot, as_slot, is_outside
from ringway.compress.finite import Verdict
from ringway.compress.kernels.choice import kernels_for
from ringway.compress.kernels.kernels import VALUE_DTYPES, Kernels
from ringway.compress.report import SAMPLE_EVERY
from ringway.compress.windows import Layout, Window, frame_bytes, statuses
from ringway.compress.workspace import Shelf, Workspace
from ringway.errors import NotFinite, UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.world import world
from ringway.work import Work

CPU_WINDOW_BYTES = 1 << 20
"""How much of a tensor on the CPU travels together, in the codec's bytes: little enough that encoding overlaps with
the wire, enough to be worth two collectives. Over 1 Gbit/s the best of what was tried, for onebit and int8 alike."""
CUDA_WINDOW = 1 << 28
"""And on a GPU, in elements: there a window's launches cost more than they gain, unless it is large."""

OVERLAPPING = 4
"""From how many windows on those of a codec with a byte or more an element overlap. A window's frames lie in memory
twice, sent and arrived, and of windows that overlap at most three are under way: 6 / 4 bytes an element."""


@dataclass(frozen=True)
class Split:
    """In how many windows at least a tensor travels whose codec has a byte or more an element, from how many elements
    on: the whole at once would need more than 2 bytes an element."""

    windows: int
    elements: int


CPU_SPLIT = Split(OVERLAPPING, 1 << 16)
CUDA_SPLIT = Split(2, 1 << 24)
"""There each window costs its launches, so they are few, and one after the other: 2 / 2 bytes an element."""


@dataclass(frozen=True)
class Setting:
    """How one compressed all-reduce is to be done."""

    codec: Codec
    kernels: Kernels
    raise_not_finite: bool
    window: int
    split: Split = CPU_SPLIT


def compressed_all_reduce(
    tensor: Tensor,
    feedback: ErrorFeedback | Slot | None,
    codec: str | Codec = "onebit",
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    kernels: str | None = None,
    not_finite: str = "raise",
    window: int | None = None,
) -> Work | None:
    """Average `tensor` over the group, in place, sending `codec`'s bytes instead of the values.

    `feedback` is an `ErrorFeedback`, one slot of it (`feedback["layer1"]`), or None for no feedback: then the
    result is biased. `group` is the feedback's unless given. `codec="auto"` (or `"auto:int8"`) compresses only
    where that is faster (see `auto`). With `async_op` the call returns a Work; the first such call makes a group, so
    every rank must make it at the same point.

    NaN or infinity on any rank raises `NotFinite` on every rank; with `not_finite="propagate"` the tensor
    becomes NaN there instead, for programs that look for it (a gradient scaler). Residuals stay sound. On a
    GPU an asynchronous call reports it at the next call with the same feedback.

    `kernels` insists on `reference`, `native` or `triton`; `window` is how many elements travel together.
    """
    if is_outside(group):
        warnings.warn("compressed_all_reduce: this rank is not in the given group", stacklevel=2)
        return None
    slot = as_slot(feedback)
    group = _group_of(slot, group)
    communicator = world.communicator(group)
    _check(tensor, not_finite)
    auto, codec = _split_auto(codec)
    chosen = get_codec(codec)
    setting = Setting(
        chosen,
        kernels_for(chosen, tensor.device, kernels),
        not_finite == "raise",
        window or (CUDA_WINDOW if tensor.is_cuda else _cpu_window(chosen)),
        CUDA_SPLIT if tensor.is_cuda else CPU_SPLIT,
    )
    if auto:
        return _all_reduce_where_it_helps(tensor, slot, communicator, setting, async_op)
    return _start(tensor, slot, communicator, setting, async_op)


def _cpu_window(codec: Codec) -> int:
    """How many elements have `CPU_WINDOW_BYTES`."""
    sample = 1 << 20
    return CPU_WINDOW_BYTES * sample // max(1, codec.nbytes(sample))


def _split_auto(codec: str | Codec) -> tuple[bool, str | Codec]:
    """Whether the choice is left to us, and the codec to compress with: "auto" means "auto:onebit"."""
    if isinstance(codec, str) and codec.partition(":")[0] == "auto":
        return True, codec.partition(":")[2] or "onebit"
    return False, codec


def _all_reduce_where_it_helps(
    tensor: Tensor, slot: Slot | None, communicator: Communicator, setting: Setting, async_op: bool
) -> Work | None:
    """Compressed where the link and the codec, once measured, promise that it is faster; else plain."""
    if slot is None:
        raise UsageError("codec='auto' needs an ErrorFeedback: it keeps what was measured")
    forecasts, key = slot.owner.forecasts, (tensor.device.type, setting.codec.spec)
    if key not in forecasts:
        forecasts[key] = measured_forecast(
            communicator,
            setting.codec,
            tensor.device,
            lambda trial: _start(trial, None, communicator, setting, async_op=False),
        )
    forecast = forecasts[key]
    report = slot.owner.report
    if forecast.helps(tensor.nbytes):
        report.predicted_calls += 1
        report.predicted_plain_seconds += forecast.plain(tensor.nbytes)
        return _start(tensor, slot, communicator, setting, async_op)
    report.plain_calls += 1
    return communicator.all_reduce(tensor, c10d.ReduceOp.AVG, async_op=async_op, log_name="left plain")


def _start(
    tensor: Tensor, slot: Slot | None, communicator: Communicator, setting: Setting, async_op: bool
) -> Work | None:
    """Run a compressed all-reduce here and now, or hand it to the feedback's lane."""
    if not async_op:
        # Frames and residuals live on from call to call, and what is made in inference mode is written in no other
        # mode: so every call is in it, whatever the caller is in.
        with torch.inference_mode():
            AllReduce(tensor, slot, communicator, setting).run()
        return None
    if slot is None:
        raise UsageError("an asynchronous compressed_all_reduce needs an ErrorFeedback: it runs the steps")

    def job(own: Communicator) -> None:
        AllReduce(tensor, slot, own, setting, deferred=tensor.is_cuda).run()

    return slot.owner.lane(tensor.device).submit(job, [tensor])


def _group_of(slot: Slot | None, group: c10d.ProcessGroup | None) -> c10d.ProcessGroup | None:
    if slot is None:
        return group
    if group is not None and group is not slot.owner.group:
        theirs = world.communicator(slot.owner.group)
        if theirs is not world.communicator(group):
            raise UsageError(
                f"the feedback is of group {theirs.name}, the call of group {world.communicator(group).name}: "
                "residuals belong to one group; make an ErrorFeedback(group) for each"
            )
    return slot.owner.group


def _check(tensor: Tensor, not_finite: str) -> None:
    if tensor.dtype not in VALUE_DTYPES or tensor.layout is not torch.strided:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES)
        raise UsageError(f"a compressed collective takes dense tensors of {names}, not {tensor.dtype} {tensor.layout}")
    if not_finite not in ("raise", "propagate"):
        raise UsageError(f"not_finite= is 'raise' or 'propagate', not {not_finite!r}")


@dataclass
class _Sent:
    """A window whose frames are on the wire."""

    window: Window
    work: Work | None
    frames: Tensor
    held: Tensor | None
    """What must stay in memory until the work is done."""

    def arrived(self, shelf: Shelf) -> Tensor:
        """The frames that came; what was sent for them goes back to the shelf."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.held is not None:
            shelf.give_back(self.held)
            self.held = None
        return self.frames


class AllReduce:
    """One compressed all-reduce of one rank."""

    def __init__(
        self,
        tensor: Tensor,
        slot: Slot | None,
        communicator: Communicator,
        setting: Setting,
        deferred: bool = False,
    ) -> None:
        self._tensor = tensor
        self._flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)
        self._slot = slot
        self._communicator = communicator
        self._setting = setting
        self._codec, self._kernels = setting.codec, setting.kernels
        self._deferred = deferred
        self._layout = Layout(tensor.numel(), communicator.size)
        self._worker: Tensor | None = None
        self._server: Tensor | None = None
        workspace = Workspace() if slot is None else slot.owner.workspace
        self._shelf = workspace.shelf(tensor.device)
        self._overlaps = False
        self._verdicts: list[Verdict] = []

    def use_residuals(self, worker: Tensor, server: Tensor) -> None:
        """Residuals that the caller keeps himself, instead of a slot's."""
        self._worker, self._server = worker, server

    def run(self) -> None:
        if self._flat.numel() == 0:
            return
        began = time.perf_counter()
        if self._slot is None:
            self._exchange()
        else:
            self._with_residuals(self._slot)
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat.view(self._tensor.shape))
        self._account(time.perf_counter() - began)
        self._report_not_finite()

    def _with_residuals(self, slot: Slot) -> None:
        if slot.busy:
            raise UsageError(f"the residual {slot.key!r} is in use by a call under way; wait for that first")
        self._report_earlier(slot)
        device = self._flat.device
        self._worker, self._server = slot.prepare(self._layout, self._communicator.rank, device)
        slot.busy = True
        try:
            if slot.calls % SAMPLE_EVERY == 0:
                norm = kernels_for(OneBit(None), device, self._kernels.name).measure
                whole = norm(self._flat, self._worker)
                self._exchange()
                slot.owner.report.add_error(norm(self._worker, None), whole)
            else:
                self._exchange()
            slot.calls += 1
        finally:
            slot.busy = False

    def _exchange(self) -> None:
        window, numel = self._setting.window, self._layout.numel
        split = self._setting.split
        heavy = numel >= split.elements and self._codec.nbytes(numel) >= numel
        if heavy:
            window = min(window, -(-numel // split.windows))
        columns = -(-window // self._layout.ranks)
        columns = -(-columns // self._codec.granule) * self._codec.granule
        windows = self._layout.windows(columns)
        self._overlaps = len(windows) >= (OVERLAPPING if heavy else 2)
        if self._codec.tensor_scale:
            self._in_two_sweeps(windows)
        else:
            self._in_one_sweep(windows)

    def _in_one_sweep(self, windows: list[Window]) -> None:
        """While window k is encoded, k - 1 travels to its servers and k - 2 back from them, where they overlap."""
        ahead = 1 if self._overlaps else 0
        sent: deque[_Sent] = deque()
        returned: deque[_Sent] = deque()
        for window in windows:
            sent.append(self._send(window, None))
            if len(sent) > ahead:
                returned.append(self._serve(sent.popleft(), None))
            if len(returned) > ahead:
                self._receive(returned.popleft())
        while sent:
            returned.append(self._serve(sent.popleft(), None))
        while returned:
            self._receive(returned.popleft())

    def _in_two_sweeps(self, windows: list[Window]) -> None:
        """All windows to their servers; then, with the servers' scale known, all of them back."""
        codec, kernels = self._codec, self._kernels
        scale = codec.scale(kernels.measure(self._flat, self._worker), self._flat.numel())
        served = self._layout.served(self._communicator.rank)
        statistics = []

        def measure(one: _Sent) -> None:
            frames, count = one.arrived(self._shelf), one.window.count(self._communicator.rank)
            if count:
                statistics.append(kernels.measure_mean(frames, self._residual_of(one.window), count))

        ahead = 1 if self._overlaps else 0
        sent: list[_Sent] = []
        for window in windows:
            sent.append(self._send(window, scale))
            if len(sent) > ahead:
                measure(sent[-1 - ahead])
        if ahead:
            measure(sent[-1])
        server_scale = codec.scale(codec.merge(statistics), served.stop - served.start) if statistics else scale
        returned: deque[_Sent] = deque()
        for one in sent:
            returned.append(self._serve(one, server_scale))
            if len(returned) > ahead:
                self._receive(returned.popleft())
        while returned:
            self._receive(returned.popleft())

    def _send(self, window: Window, scale: Tensor | None) -> _Sent:
        rows, nbytes = self._layout.ranks, frame_bytes(self._codec, window.columns)
        frames = self._shelf.take_clean(rows, nbytes)
        self._kernels.encode(self._flat, self._worker, window, frames, scale)
        arriving = self._shelf.take(rows, nbytes)
        work = self._communicator.all_to_all_single(arriving, frames, async_op=self._overlaps, log_name="compressed")
        return _Sent(window, work, arriving, frames)

    def _serve(self, sent: _Sent, scale: Tensor | None) -> _Sent:
        frames = sent.arrived(self._shelf)
        count = sent.window.count(self._communicator.rank)
        frame = self._shelf.take_clean(1, frames.shape[1])
        self._kernels.encode_mean(frames, self._residual_of(sent.window), count, frame[0], scale)
        self._shelf.give_back(frames)
        gathered = self._shelf.take(*frames.shape)
        work = self._communicator.all_gather_into_tensor(
            gathered, frame, async_op=self._overlaps, log_name="compressed"
        )
        return _Sent(sent.window, work, gathered, frame)

    def _receive(self, returned: _Sent) -> None:
        frames = returned.arrived(self._shelf)
        if self._setting.raise_not_finite:
            self._verdicts.append(Verdict(statuses(frames).amax()))
        self._kernels.decode(frames, returned.window, self._flat)
        self._shelf.give_back(frames)

    def _residual_of(self, window: Window) -> Tensor | None:
        """The part of the server's residual that this rank's columns of the window have."""
        if self._server is None:
            return None
        return self._server[window.start : window.start + window.count(self._communicator.rank)]

    def _account(self, seconds: float) -> None:
        if self._slot is None:
            return
        report, ranks = self._slot.owner.report, self._layout.ranks
        report.calls += 1
        report.plain_bytes += 2 * (ranks - 1) * self._tensor.nbytes // ranks
        frames = frame_bytes(self._codec, self._layout.shard)
        report.sent_bytes += 2 * (ranks - 1) * frames
        if not self._tensor.is_cuda:
            report.seconds += seconds

    def _report_not_finite(self) -> None:
        if self._deferred and self._slot is not None:
            self._slot.unread = self._verdicts
        else:
            self._raise_for(self._verdicts)

    def _report_earlier(self, slot: Slot) -> None:
        earlier, slot.unread = slot.unread, []
        self._raise_for(earlier)

    def _raise_for(self, verdicts: list[Verdict]) -> None:
        status = max((verdict.read() for verdict in verdicts), default=0)
        if status == 0:
            return
        culprit = status - 1
        key = None if self._slot is None else self._slot.key
        what = f"compressed_all_reduce of {self._tensor.numel()} elements" + ("" if key is None else f" ({key!r})")
        group = f"group {self._communicator.name}"
        if culprit == self._layout.ranks:
            raise NotFinite(f"{what}: the average over {group} is not finite", key=key)
        raise NotFinite(f"{what}: rank {culprit} of {group} had NaN or infinity in its values", rank=culprit, key=key)
