"""nccl's fast path: calls on plain CUDA tensors go straight to torch. One native step checks, records and compares a
call and has torch start it. An event behind it tells the native core when the device has passed it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as c10d
from torch._C import _distributed_c10d as native

import ringway._core as _core
from ringway.backends.base import GroupInfo, Health
from ringway.backends.nccl.connections import Connections
from ringway.backends.nccl.handles import Works, overdue
from ringway.backends.nccl.open_calls import FastWork, OpenCalls
from ringway.backends.torch.backend import REDUCE_OPS, options_for
from ringway.backends.torch.handles import mapped
from ringway.call import (
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BROADCAST,
    OPS,
    RECV,
    REDUCE_SCATTER_SINGLE,
    SEND,
    Call,
    Op,
    Reduce,
    dtype_bits,
    op_bits,
)
from ringway.errors import RingwayError
from ringway.references import weak_method
from ringway.threads import start
from ringway.torch_versions import set_async

_NOTE_KINDS = 1 << 16
"""A note is a call's number times this, plus the number of its kind."""
_SETTLE_SECONDS = 0.02
"""How long a caller waits for the device before it asks torch's works, and looks whether the group has failed."""
_REDUCTIONS = {
    hash(c10d.ReduceOp(REDUCE_OPS[reduce])): int(reduce)
    for reduce in (Reduce.SUM, Reduce.AVG, Reduce.PRODUCT, Reduce.MIN, Reduce.MAX)
}


class Driver:
    """The CUDA driver's watch of streams. Part of `Process`."""

    library = "libcuda.so.1"

    @cached_property
    def watch(self) -> _core.StreamWatch | None:
        """None without NVIDIA's driver: then there is no fast path."""
        with suppress(RuntimeError):
            return _core.StreamWatch(self.library)
        return None


class NcclFastPath(_core.StreamFastPath):
    """A call is done once torch has issued it and, if it is synchronous, the current stream waits for it. The methods
    with an underscore that are not called here are called by the native side."""

    device = _core.CUDA

    def __init__(
        self,
        info: GroupInfo,
        works: Works,
        connections: Connections,
        group: Any,
        record: _core.GroupRecord,
        health: Health,
        watch: _core.StreamWatch,
        summed: Iterable[torch.dtype],
        averaged: Iterable[torch.dtype],
        moved: Iterable[torch.dtype],
    ) -> None:
        ops = (ALL_REDUCE, BROADCAST, ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE, ALL_TO_ALL_SINGLE, SEND, RECV)
        self.works = works
        self._connections = connections
        self._record = record
        self._health = health
        self._info = info
        self._group = group
        # Weakly: the threads that call these may outlive the group.
        self._calls = _core.StreamCalls(watch, record, weak_method(self._late))
        self.open = OpenCalls(works, record, weak_method(self._failed))
        super().__init__(
            record,
            info.rank,
            info.size,
            self.device,
            dtype_bits(moved),
            dtype_bits(summed),
            dtype_bits(averaged),
            op_bits(ops),
            self._calls,
            self.open.calls,
            FastWork,
            (torch._C._cuda_getCurrentRawStream, torch._C._cuda_getCurrentStream, torch._C._cuda_setStream),
            _REDUCTIONS,
        )
        self._kinds: list[Call] = []
        self._variants: dict[float | None, int] = {}
        self._streams: list[Any] = []
        self._failing = False
        self.set_limit(works.limit or 0.0)
        self.set_timeout(None)

    def set_limit(self, seconds: float) -> None:
        """The deadline of calls from now on, if ringway keeps it."""
        self._calls.limit = seconds

    def set_timeout(self, seconds: float | None) -> None:
        """The deadline that torch keeps for calls from now on; None does not change it."""
        self._timeout = seconds
        self.variant = self._variants.setdefault(seconds, len(self._variants))

    def pending(self) -> int:
        """How many calls the device has not passed."""
        self._sweep()
        return self._calls.pending + len(self.open.calls)

    def settle(self) -> None:
        """Waits a moment for the device, if that can help."""
        self._calls.settle(_SETTLE_SECONDS)

    def fail(self) -> None:
        """The group has failed or ended: its calls end with it."""
        self._calls.fail()
        self.open.fail()
        self.note_open()

    def _sweep(self) -> None:
        self.open.sweep()
        self.note_open()

    def _make_stream(self, device: int) -> tuple[tuple[int, int, int], int]:
        stream = torch.cuda.Stream(device)
        self._streams.append(stream)
        return (stream.stream_id, stream.device_index, stream.device_type), stream.cuda_stream

    def _not_started(
        self, error: BaseException, kind: int, sequence: int, waited: float, outputs: Any, inputs: Any
    ) -> BaseException:
        """What to raise if torch's method raised `error`."""
        if isinstance(error, RuntimeError):  # not a signal handler's
            call = replace(self.named(kind, sequence), inputs=_tensors(inputs), outputs=_tensors(outputs))
            error = mapped(self.works.aborted_with or error, call, waited)
        self._health.interrupted_by(error)
        return error

    def _not_followed(self, kind: int, sequence: int, outputs: Any, why: str) -> BaseException:
        call = replace(self.named(kind, sequence), outputs=_tensors(outputs))
        return RingwayError(f"{call.describe()} failed: {why}")

    def _late(
        self,
        ended: list[tuple[int, int, tuple[int, int, int, bool]]],
        waiting: int | None,
        is_overdue: bool,
        has_open: bool,
        failure: str,
    ) -> None:
        """Calls ended late, or one has waited or been open for long, or the device cannot be asked: the group may have
        failed."""
        if has_open:
            self._sweep()
        if not (ended or failure) and waiting is None:
            return
        error = _device_error(failure) if failure else self.works.error()
        note = ended[0][1] if ended else waiting
        if error is None and is_overdue:
            error, note = overdue(self._noted(waiting), self.works.limit or 0.0), waiting
        for token, _, times in ended:
            self._record.end_on_device(token, error is None, times)
        if failure and self.works.limit is not None:
            self._failed(_device_error(failure), of_device=True)
        elif error is not None:
            self._failed(mapped(error, self._noted(note), 0.0))

    def _noted(self, note: int | None) -> Call:
        """The call that a note is about, for messages."""
        if note is None or note % _NOTE_KINDS >= len(self._kinds):
            return Call(ALL_REDUCE, group=self._info.name, ranks=self._info.ranks)
        return self.named(note % _NOTE_KINDS, note // _NOTE_KINDS)

    def named(self, kind: int, sequence: int) -> Call:
        """A call without its tensors, for messages."""
        return replace(self._kinds[kind], sequence=sequence)

    def _failed(self, error: BaseException, of_device: bool = False) -> None:
        """Called on the threads that watch the device. To explain the error takes seconds, so that has its own."""
        self.works.will_fail(error, of_device)
        if not self._failing:
            self._failing = True
            start("ringway-failed-group", self._explain, error, of_device)

    def _explain(self, error: BaseException, of_device: bool) -> None:
        try:
            if of_device:
                self._health.device_failed(error)
            else:
                self._health.fail(error)
            if self._health.fault is not None:
                self.fail()
        except ReferenceError:  # the group is gone
            pass
        finally:
            self._failing = False

    def _prepare(self, op: int, peer: int, reduce: int, async_op: bool) -> tuple[int, Any, Any] | None:
        """A number for a kind of calls, torch's method that issues them, and its options, made once. None if the
        general path has to make the communicator first."""
        if self._connections.needs(OPS[op], peer):
            return None
        call = Call(
            OPS[op],
            reduce=Reduce(reduce),
            peer=peer,
            group=self._info.name,
            ranks=self._info.ranks,
            timeout=self._timeout,
        )
        method, options = self._prepared(OPS[op], call, peer, REDUCE_OPS[call.reduce])
        set_async(options, async_op)
        self._kinds.append(call)
        return len(self._kinds) - 1, method, options

    def _prepared(self, op: Op, call: Call, root: int, how: Any) -> tuple[Any, Any]:
        group = self._group
        if op is ALL_REDUCE:
            return group.allreduce, options_for(c10d.AllreduceOptions, call, reduceOp=how)
        if op is BROADCAST:
            return group.broadcast, options_for(c10d.BroadcastOptions, call, rootRank=root, rootTensor=0)
        if op is ALL_GATHER_SINGLE:
            return group._allgather_base, options_for(native.AllgatherOptions, call)
        if op is REDUCE_SCATTER_SINGLE:
            return group._reduce_scatter_base, options_for(c10d.ReduceScatterOptions, call, reduceOp=how)
        if op is ALL_TO_ALL_SINGLE:
            return group.alltoall_base, options_for(c10d.AllToAllOptions, call)
        return (group.send if op is SEND else group.recv), None


def _device_error(name: str) -> RingwayError:
    return RingwayError(
        f"CUDA error: {name}. If a kernel or the device failed, this process cannot use its GPU any more: start another"
    )


def _tensors(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, torch.Tensor) else ()
