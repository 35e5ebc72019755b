"""The compressed all-reduce, written once over a communicator's all_to_all and all_gather.

Two phases, two collectives:

1. Each worker adds its residual, encodes every shard for the rank that serves it, and keeps the encoding error.
   all_to_all_single sends each shard to its server.
2. The server averages what it decodes, adds its own residual, encodes the average, and keeps the encoding error.
   all_gather_into_tensor sends all shards to every rank, which decodes them into the tensor.

With `servers=False` there is one phase: each worker sends its whole encoding to everyone, and every rank averages what
it decodes. There is one lossy encoding instead of two, and a rank sends n - 1 times the whole tensor instead of
2 (n - 1) / n times: as much among 2 ranks, and n / 2 times as much among n.

A large tensor travels in windows (`windows.py`), so that one is encoded while another is on the wire and a third is
decoded. A codec with one scale per tensor knows the scale only after it has seen all the data, so phase 2 starts when
phase 1 has ended.

All ranks run the same steps in the same order, whatever the data: every rank reports a NaN at the end.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ringway.compress.agreement import Agreement, Heading, PendingStatus, count_exchange, spoil_if_different
from ringway.compress.codecs.codec import Codec
from ringway.compress.codecs.onebit import OneBit
from ringway.compress.feedback import Slot
from ringway.compress.kernels.base import Kernels
from ringway.compress.kernels.select import kernels_for
from ringway.compress.outcome import Outcome
from ringway.compress.report import SAMPLE_EVERY
from ringway.compress.windows import (
    Sharding,
    Window,
    clear_spoiled,
    compressed_bytes,
    frame_bytes,
    ring_bytes,
    statuses,
)
from ringway.compress.workspace import BufferPool, Workspace
from ringway.groups.communicator import Communicator
from ringway.work import Work

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
    servers: bool = True

    @property
    def algorithm(self) -> type[AllReduce]:
        return AllReduce if self.servers else GatheredAllReduce


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
        self._sharding = self._sharding_of(tensor.numel())
        self._worker: Tensor | None = None
        self._server: Tensor | None = None
        workspace = Workspace() if slot is None else slot.owner.workspace
        self._pool = workspace.pool(tensor.device)
        self._overlaps = False
        self._agreement = self._agreement_on(tensor.numel())

    def _sharding_of(self, numel: int) -> Sharding:
        return Sharding(numel, self._communicator.size)

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
            self._worker, self._server = self._residuals(slot, device)
            if slot.calls % SAMPLE_EVERY == 0:
                norm = kernels_for(OneBit(None), device, self._kernels.name).measure
                whole = norm(self._flat, self._worker)
                self._exchange()
                slot.owner.report.add_error(norm(self._worker, None), whole)
            else:
                self._exchange()
            slot.calls += 1

    def _residuals(self, slot: Slot, device: torch.device) -> tuple[Tensor, Tensor]:
        return slot.prepare(self._sharding, self._communicator.rank, device)

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
        report, ranks = self._slot.owner.report, self._communicator.size
        report.calls += 1
        report.plain_bytes += ring_bytes(self._tensor.numel(), ranks, self._tensor.element_size())
        report.sent_bytes += compressed_bytes(self._codec, self._tensor.numel(), ranks, self._setting.servers)
        if not self._tensor.is_cuda:
            report.seconds += seconds


class GatheredAllReduce(AllReduce):
    """A compressed all-reduce without servers: one phase."""

    def _sharding_of(self, numel: int) -> Sharding:
        return Sharding(numel, 1)

    def _agreement_on(self, numel: int) -> Agreement:
        return Agreement(self._communicator, "gathered_all_reduce", self._codec, self._tensor.dtype, numel)

    def _residuals(self, slot: Slot, device: torch.device) -> tuple[Tensor, Tensor]:
        return slot.prepare(self._sharding, 1, device)  # rank 0 would be the only server

    def _in_one_sweep(self, windows: list[Window]) -> None:
        """If windows overlap: window k is encoded while k - 1 travels."""
        sent: deque[_Sent] = deque()
        for window in windows:
            sent.append(self._send(window, None))
            if len(sent) > self._overlaps:
                self._receive(sent.popleft())
        while sent:
            self._receive(sent.popleft())

    def _in_two_sweeps(self, windows: list[Window]) -> None:
        """The scale of the whole tensor is known before the first window is sent."""
        scale = self._codec.scale(self._kernels.measure(self._flat, self._worker), self._flat.numel())
        for window in windows:
            self._receive(self._send(window, scale))

    def _send(self, window: Window, scale: Tensor | None) -> _Sent:
        frame = self._pool.take(1, frame_bytes(self._codec, window.columns))
        heading = self._agreement.stamp(frame)
        self._kernels.encode(self._flat, self._worker, window, frame, scale)
        statuses(frame).mul_(1 + self._communicator.rank)
        arriving = self._pool.take(self._communicator.size, frame.shape[1])
        work = self._communicator.all_gather_into_tensor(
            arriving, frame, async_op=self._overlaps, log_name="compressed"
        )
        return _Sent(window, work, arriving, frame, heading)

    def _receive(self, returned: _Sent) -> None:
        frames, window = self._arrived(returned, last=True), returned.window
        count = window.count(0)
        self._kernels.decode_mean(frames, count, self._flat[window.start : window.start + count])
        self._pool.give_back(frames)
