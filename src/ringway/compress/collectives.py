"""The compressed all-reduce, written once over a communicator's all_to_all and all_gather.

Two phases, two collectives:

1. Each worker adds its residual, encodes every shard for the rank that serves it, and keeps the encoding error.
   all_to_all_single sends each shard to its server.
2. The server averages what it decodes, adds its own residual, encodes the average, and keeps the encoding error.
   all_gather_into_tensor sends all shards to every rank, which decodes them into the tensor.

A large tensor travels in windows (`windows.py`), so that one is encoded while another is on the wire and a third is
decoded. A codec with one scale per tensor knows the scale only after it has seen all the data, so phase 2 starts when
phase 1 has ended.

All ranks run the same steps in the same order, whatever the data: every rank reports a NaN at the end.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.compress.agreement import Agreement, Heading, PendingStatus, count_exchange, spoil_if_different
from ringway.compress.auto import measured_forecast
from ringway.compress.codecs.codec import Codec, get_codec
from ringway.compress.codecs.onebit import OneBit
from ringway.compress.feedback import ErrorFeedback, Slot, as_slot, is_outside
from ringway.compress.kernels.base import VALUE_DTYPES, Kernels
from ringway.compress.kernels.select import kernels_for
from ringway.compress.outcome import Outcome, PlainStatus
from ringway.compress.report import SAMPLE_EVERY
from ringway.compress.windows import Sharding, Window, clear_spoiled, frame_bytes
from ringway.compress.workspace import BufferPool, Workspace
from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.world import world
from ringway.work import Work

CPU_WINDOW_BYTES = 1 << 20
"""Size of a window on the CPU, in the codec's bytes: small enough that encoding overlaps with the wire, large enough to
be worth two collectives. The best of the sizes tried over 1 Gbit/s, for both onebit and int8."""
CUDA_WINDOW = 1 << 28
"""Size of a window on a GPU, in elements. The launches of a window cost more than it gains unless it is large."""

OVERLAPPING = 4
"""Windows overlap from this many on, for a codec with at least one byte per element. A window's frames take memory
twice, sent and received, and at most three overlapping windows are in flight: 6 / 4 bytes per element."""


@dataclass(frozen=True)
class Split:
    """Minimum number of windows for a codec with at least one byte per element, for tensors of at least `elements`
    elements: a single window would need more than 2 bytes per element."""

    windows: int
    elements: int


CPU_SPLIT = Split(OVERLAPPING, 1 << 16)
CUDA_SPLIT = Split(2, 1 << 24)
"""On a GPU every window costs launches, so there are few, and they do not overlap: 2 / 2 bytes per element."""


@dataclass(frozen=True)
class Setting:
    """The options of one compressed all-reduce."""

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

    `feedback` is an `ErrorFeedback`, one of its slots (`feedback["layer1"]`), or None for no feedback, in which case
    the result is biased. `group` defaults to the feedback's group. `codec="auto"` (or `"auto:int8"`) compresses only
    where that is faster (see `auto`). With `async_op` the call returns a Work; the first asynchronous call creates a
    group, so every rank must make it at the same point.

    NaN or infinity on any rank raises `NotFinite` on every rank. With `not_finite="propagate"` the tensor becomes NaN
    at those places instead, for programs that check for it (a gradient scaler). Residuals stay valid. On a GPU, an
    asynchronous call reports it at the next call with the same feedback.

    `kernels` forces `reference`, `native` or `triton`; `window` is the number of elements that travel together.
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
    """The number of elements whose encoding takes `CPU_WINDOW_BYTES`."""
    sample = 1 << 20
    return CPU_WINDOW_BYTES * sample // max(1, codec.nbytes(sample))


def _split_auto(codec: str | Codec) -> tuple[bool, str | Codec]:
    """Whether the caller asked for "auto", and the codec to compress with: "auto" means "auto:onebit"."""
    if isinstance(codec, str) and codec.partition(":")[0] == "auto":
        return True, codec.partition(":")[2] or "onebit"
    return False, codec


def _all_reduce_where_it_helps(
    tensor: Tensor, slot: Slot | None, communicator: Communicator, setting: Setting, async_op: bool
) -> Work | None:
    """Compress if the measured link and codec predict that it is faster; otherwise send plain."""
    if slot is None:
        raise UsageError("codec='auto' needs an ErrorFeedback, which stores the measured times")
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
    return plain_all_reduce(tensor, slot, communicator, setting.raise_not_finite, async_op)


def plain_all_reduce(
    tensor: Tensor, slot: Slot, communicator: Communicator, raise_not_finite: bool, async_op: bool
) -> Work | None:
    """Average `tensor` uncompressed, and report values that are not finite as a compressed call does."""
    if not raise_not_finite:
        return communicator.all_reduce(tensor, c10d.ReduceOp.AVG, async_op=async_op, log_name="left plain")
    if async_op:
        return _submit(tensor, slot, lambda own: _run_plain(tensor, slot, own, deferred=tensor.is_cuda))
    _run_plain(tensor, slot, communicator, deferred=False)
    return None


def _run_plain(tensor: Tensor, slot: Slot, communicator: Communicator, deferred: bool) -> None:
    outcome = Outcome(slot, communicator, tensor.numel(), waits=not deferred)
    outcome.report_earlier()
    ranks = communicator.size
    sound = torch.isfinite(tensor).all()
    culprit = torch.where(sound, 0, ranks - communicator.rank).to(torch.int32)  # the maximum is the lowest rank's
    communicator.all_reduce(tensor, c10d.ReduceOp.AVG, log_name="left plain")
    communicator.all_reduce(culprit, c10d.ReduceOp.MAX, log_name="left plain")
    overflow = torch.where(torch.isfinite(tensor).all(), 0, 1 + ranks)
    outcome.add(PlainStatus(torch.where(culprit > 0, 1 + ranks - culprit, overflow)))
    outcome.report()


def _start(
    tensor: Tensor, slot: Slot | None, communicator: Communicator, setting: Setting, async_op: bool
) -> Work | None:
    """Run a compressed all-reduce now, or submit it to the feedback's background thread or stream."""
    if not async_op:
        if slot is not None:
            slot.settle()
        # Frames and residuals are reused across calls, and a tensor created in inference mode cannot be written outside
        # it. So every call runs in inference mode, whatever mode the caller is in.
        with torch.inference_mode():
            AllReduce(tensor, slot, communicator, setting).run()
        return None
    if slot is None:
        raise UsageError("an asynchronous compressed_all_reduce needs an ErrorFeedback, which runs its steps")
    return _submit(tensor, slot, lambda own: AllReduce(tensor, slot, own, setting, deferred=tensor.is_cuda).run())


def _submit(tensor: Tensor, slot: Slot, job: Callable[[Communicator], None]) -> Work:
    background = slot.owner.background(tensor.device)
    work = background.submit(job, [tensor])
    slot.pending = background.latest
    return work


def _group_of(slot: Slot | None, group: c10d.ProcessGroup | None) -> c10d.ProcessGroup | None:
    if slot is None:
        return group
    if group is not None and group is not slot.owner.group:
        theirs = world.communicator(slot.owner.group)
        if theirs is not world.communicator(group):
            raise UsageError(
                f"the feedback belongs to group {theirs.name}, the call uses {world.communicator(group).name}: "
                "residuals belong to one group; create an ErrorFeedback(group) for each"
            )
    return slot.owner.group


def _check(tensor: Tensor, not_finite: str) -> None:
    if tensor.dtype not in VALUE_DTYPES or tensor.layout is not torch.strided:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES)
        raise UsageError(f"a compressed collective takes dense tensors of {names}, not {tensor.dtype} {tensor.layout}")
    if not_finite not in ("raise", "propagate"):
        raise UsageError(f"not_finite= must be 'raise' or 'propagate', not {not_finite!r}")


@dataclass
class _Sent:
    """A window whose frames are on the wire."""

    window: Window
    work: Work | None
    frames: Tensor
    held: Tensor
    """Memory that must stay allocated until the work is done."""
    heading: Heading
    """What the header of every received frame must be."""
    arrived: bool = False

    def wait(self, pool: BufferPool) -> None:
        """Wait for the received frames, and return the sent ones to the pool."""
        if self.work is not None:
            self.work.wait()
        pool.give_back(self.held)
        self.arrived = True


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
        waits = not deferred and (setting.raise_not_finite or slot is None)
        self._outcome = Outcome(slot, communicator, tensor.numel(), waits)
        self._sharding = Sharding(tensor.numel(), communicator.size)
        self._worker: Tensor | None = None
        self._server: Tensor | None = None
        workspace = Workspace() if slot is None else slot.owner.workspace
        self._pool = workspace.pool(tensor.device)
        self._overlaps = False
        self._agreement = self._agreement_on(tensor.numel())

    def _agreement_on(self, numel: int) -> Agreement:
        return Agreement(self._communicator, "compressed_all_reduce", self._codec, self._tensor.dtype, numel)

    def use_residuals(self, worker: Tensor, server: Tensor, numel: int) -> None:
        """Use residuals that the caller keeps, instead of a slot's. Of the tensor's elements, the first `numel` are
        real, and the rest is padding."""
        self._worker, self._server = worker, server
        self._agreement = self._agreement_on(numel)

    def run(self) -> None:
        if self._flat.numel() == 0:
            count_exchange(self._communicator)
            return
        began = time.perf_counter()
        if self._slot is None:
            self._exchange()
        else:
            self._with_residuals(self._slot)
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat.view(self._tensor.shape))
        self._account(time.perf_counter() - began)
        self._outcome.report()

    def _with_residuals(self, slot: Slot) -> None:
        with slot.lock:
            self._outcome.report_earlier()
            device = self._flat.device
            self._worker, self._server = slot.prepare(self._sharding, self._communicator.rank, device)
            if slot.calls % SAMPLE_EVERY == 0:
                norm = kernels_for(OneBit(None), device, self._kernels.name).measure
                whole = norm(self._flat, self._worker)
                self._exchange()
                slot.owner.report.add_error(norm(self._worker, None), whole)
            else:
                self._exchange()
            slot.calls += 1

    def _exchange(self) -> None:
        try:
            self._in_windows()
        except BaseException:
            count_exchange(self._communicator)
            raise

    def _in_windows(self) -> None:
        window, numel = self._setting.window, self._sharding.numel
        split = self._setting.split
        heavy = numel >= split.elements and self._codec.nbytes(numel) >= numel
        if heavy:
            window = min(window, -(-numel // split.windows))
        columns = -(-window // self._sharding.ranks)
        columns = -(-columns // self._codec.granule) * self._codec.granule
        windows = self._sharding.windows(columns)
        self._overlaps = len(windows) >= (OVERLAPPING if heavy else 2)
        if self._codec.tensor_scale:
            self._in_two_sweeps(windows)
        else:
            self._in_one_sweep(windows)

    def _in_one_sweep(self, windows: list[Window]) -> None:
        """If windows overlap: window k is encoded while k - 1 travels to its servers and k - 2 travels back."""
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
        """Send all windows to their servers; then, with the servers' scale known, send all of them back."""
        codec, kernels = self._codec, self._kernels
        scale = codec.scale(kernels.measure(self._flat, self._worker), self._flat.numel())
        served = self._sharding.served(self._communicator.rank)
        statistics = []

        def measure(one: _Sent) -> None:
            frames, count = self._arrived(one), one.window.count(self._communicator.rank)
            if count:
                clear_spoiled(frames)
                statistics.append(kernels.measure_mean(frames, self._residual_of(one.window), count))

        ahead = 1 if self._overlaps else 0
        sent: list[_Sent] = []
        for window in windows:
            sent.append(self._send(window, scale))
            if len(sent) > ahead:
                measure(sent[-1 - ahead])
        if ahead:
            measure(sent[-1])
        if statistics:
            server_scale = codec.scale(codec.merge(statistics), served.stop - served.start)
        else:  # it serves no elements; this rank's own scale may not be finite, and would be taken for the average's
            server_scale = torch.zeros_like(scale)
        returned: deque[_Sent] = deque()
        for one in sent:
            returned.append(self._serve(one, server_scale))
            if len(returned) > ahead:
                self._receive(returned.popleft())
        while returned:
            self._receive(returned.popleft())

    def _send(self, window: Window, scale: Tensor | None) -> _Sent:
        rows, nbytes = self._sharding.ranks, frame_bytes(self._codec, window.columns)
        frames = self._pool.take(rows, nbytes)
        heading = self._agreement.stamp(frames)
        self._kernels.encode(self._flat, self._worker, window, frames, scale)
        arriving = self._pool.take(rows, nbytes)
        work = self._communicator.all_to_all_single(arriving, frames, async_op=self._overlaps, log_name="compressed")
        return _Sent(window, work, arriving, frames, heading)

    def _serve(self, sent: _Sent, scale: Tensor | None) -> _Sent:
        frames = self._arrived(sent)
        count = sent.window.count(self._communicator.rank)
        frame = self._pool.take(1, frames.shape[1])
        heading = self._agreement.stamp(frame)
        self._kernels.encode_mean(frames, self._residual_of(sent.window), count, frame[0], scale)
        self._pool.give_back(frames)
        gathered = self._pool.take(*frames.shape)
        work = self._communicator.all_gather_into_tensor(
            gathered, frame, async_op=self._overlaps, log_name="compressed"
        )
        return _Sent(sent.window, work, gathered, frame, heading)

    def _receive(self, returned: _Sent) -> None:
        frames = self._arrived(returned, last=True)
        self._kernels.decode(frames, returned.window, self._flat)
        self._pool.give_back(frames)

    def _arrived(self, sent: _Sent, last: bool = False) -> Tensor:
        """The received frames, checked to belong to this call. The last phase's also say whether values were not
        finite."""
        if sent.arrived:
            return sent.frames
        sent.wait(self._pool)
        status = PendingStatus(sent.frames, sent.heading, self._agreement, last and self._setting.raise_not_finite)
        if sent.frames.is_cuda:
            spoil_if_different(sent.frames, sent.heading)
            self._outcome.add(status)
        else:
            self._outcome.status = max(self._outcome.status, status.read())
        return sent.frames

    def _residual_of(self, window: Window) -> Tensor | None:
        """The slice of the server's residual that belongs to this rank's columns of the window."""
        if self._server is None:
            return None
        return self._server[window.start : window.start + window.count(self._communicator.rank)]

    def _account(self, seconds: float) -> None:
        if self._slot is None:
            return
        report, ranks = self._slot.owner.report, self._sharding.ranks
        report.calls += 1
        report.plain_bytes += 2 * (ranks - 1) * self._tensor.nbytes // ranks
        frames = frame_bytes(self._codec, self._sharding.shard)
        report.sent_bytes += 2 * (ranks - 1) * frames
        if not self._tensor.is_cuda:
            report.seconds += seconds
