"""nccl's fast path: synchronous calls on plain CUDA tensors go straight to torch, with an event behind each.

The device watch waits for the event, so the recorder learns when the device has passed the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as c10d
from torch._C import _distributed_c10d as native

import ringway._core as _core
from ringway.backends.base import GroupInfo, Health
from ringway.backends.nccl.handles import OnStream, Works
from ringway.backends.torch.backend import REDUCE_OPS, options_for
from ringway.backends.torch.handles import mapped
from ringway.call import (
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BROADCAST,
    OPS,
    REDUCE_SCATTER_SINGLE,
    Call,
    Op,
    Reduce,
    dtype_bits,
    op_bits,
)

Issue = Callable[[Any, Any], Any]
_KNOWN_STREAMS = 256
"""torch has about a hundred streams, but a program may bring a new one for each call."""


def _synchronous(kind: Any, call: Call, **values: Any) -> Any:
    """Options with which torch runs a call on the current stream."""
    options = options_for(kind, call, **values)
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


class _Stream:
    """A stream of the program, and events that are free again."""

    def __init__(self, index: int) -> None:
        self.stream = torch.cuda.current_stream(index)
        self.spare: list[Any] = []


class _Pending(OnStream):
    """A call on the fast path. It owns its event, so the event can be reused."""

    def __init__(self, path: NcclFastPath, call: Call, token: int, on: _Stream) -> None:
        event = on.spare.pop() if on.spare else torch.cuda.Event()
        super().__init__(path.works, call, path.record.collectives - 1, 0, on.stream, event, captured=False)
        self._spare = on.spare
        self._path = path
        self._token = token

    def outcome(self) -> BaseException | None:
        error = super().outcome()
        if error is None:
            self._spare.append(self._event)
        return error

    def ended(self, error: BaseException | None) -> None:
        self._path.record.end(self._token, error is None)
        if error is not None:
            self._path.health.failed(error)


class NcclFastPath(_core.FastPath):
    """A call is done once torch has issued it and the current stream waits for it."""

    device = _core.CUDA

    def __init__(
        self,
        info: GroupInfo,
        works: Works,
        group: Any,
        record: _core.GroupRecord,
        health: Health,
        summed: Iterable[torch.dtype],
        moved: Iterable[torch.dtype],
    ) -> None:
        ops = (ALL_REDUCE, BROADCAST, ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE, ALL_TO_ALL_SINGLE)
        super().__init__(record, info.rank, info.size, self.device, dtype_bits(moved), dtype_bits(summed), op_bits(ops))
        self.works = works
        self.record = record
        self.health = health
        self._info = info
        self._group = group
        self._streams: dict[tuple[int, int], _Stream] = {}
        self.set_timeout(None)

    def set_timeout(self, seconds: float | None) -> None:
        """The deadline that torch keeps for calls from now on; None leaves it as it is."""
        self._timeout = seconds
        self._known: dict[tuple[int, int], tuple[Call, Issue]] = {}

    def run(self, op: int, outputs: Any, inputs: Any, peer: int, tag: int, wait: bool) -> bool:
        # In a coalesced block, and while another call starts, the general path decides.
        if self.works.coalesced is not None or self.record.is_starting:
            return False
        try:
            return self._run(op, outputs, inputs, peer)
        except BaseException as error:
            self.health.interrupted_by(error)
            raise
        finally:
            self.record.started()

    def _run(self, op: int, outputs: Any, inputs: Any, peer: int) -> bool:
        token = self.begin(op, outputs, inputs, peer)
        if token == 0:
            return False
        known = self._known.get((op, peer))
        if known is None:
            known = self._known[op, peer] = self._prepared(OPS[op], peer)
        call, issue = known
        began = time.monotonic()
        try:
            work = _core.pass_on(issue, outputs, inputs)
            captured = torch.cuda.is_current_stream_capturing()
            if work is not None:  # a torch that does not run it on the current stream
                work.wait()
            if captured:  # the graph runs it at each replay
                self.record.end(token, True)
            else:
                pending = _Pending(self, call, token, self._stream(outputs.get_device()))
                pending.number = self.works.issued(None, pending if work is None else work)
                self.works.watch.add(pending.line, pending, pending.ended, self.record.keeps_times)
        except BaseException as error:
            self.record.end(token, False)
            if not isinstance(error, Exception):
                raise
            call = replace(call, inputs=(inputs,), outputs=(outputs,), sequence=self.record.collectives - 1)
            raise mapped(self.works.aborted_with or error, call, time.monotonic() - began) from error
        return True

    def _prepared(self, op: Op, root: int) -> tuple[Call, Issue]:
        """A call without its tensors, for messages, and the function that issues it with torch's options made once."""
        call = Call(op, peer=root, group=self._info.name, ranks=self._info.ranks, timeout=self._timeout)
        group, total = self._group, REDUCE_OPS[Reduce.SUM]
        if op is ALL_REDUCE:
            options = _synchronous(c10d.AllreduceOptions, call, reduceOp=total)
            return call, lambda tensor, _: group.allreduce([tensor], options)
        if op is BROADCAST:
            options = _synchronous(c10d.BroadcastOptions, call, rootRank=root, rootTensor=0)
            return call, lambda tensor, _: group.broadcast([tensor], options)
        if op is ALL_GATHER_SINGLE:
            options = _synchronous(native.AllgatherOptions, call)
            return call, lambda output, input: group._allgather_base(output, input, options)
        if op is REDUCE_SCATTER_SINGLE:
            options = _synchronous(c10d.ReduceScatterOptions, call, reduceOp=total)
            return call, lambda output, input: group._reduce_scatter_base(output, input, options)
        options = _synchronous(c10d.AllToAllOptions, call)
        return call, lambda output, input: group.alltoall_base(output, input, [], [], options)

    def _stream(self, index: int) -> _Stream:
        """The current stream of the device. Asking torch for the stream object takes longer than all the rest."""
        raw = torch._C._cuda_getCurrentRawStream(index)
        known = self._streams.get((index, raw))
        if known is None:
            if len(self._streams) >= _KNOWN_STREAMS:
                self._streams.clear()
            known = self._streams[index, raw] = _Stream(index)
        return known
