"""nccl's fast path: calls on plain CUDA tensors go straight to torch. The native core records an event behind each, and
learns without the interpreter's lock when the device has passed it."""

from __future__ import annotations

import time
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
from ringway.backends.nccl.handles import Works, overdue
from ringway.backends.nccl.open_calls import FastWork, Issue, Kind, OpenCalls
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
from ringway.errors import RingwayError
from ringway.references import weak_method
from ringway.work import Work

_NOTE_KINDS = 1 << 16
"""A note is a call's number times this, plus the number of its kind."""
_SETTLE_SECONDS = 0.02
"""How long a caller waits for the device before it asks torch's works, and looks whether the group has failed."""


class Driver:
    """The CUDA driver's watch of streams. Part of `Process`."""

    library = "libcuda.so.1"

    @cached_property
    def watch(self) -> _core.StreamWatch | None:
        """None without NVIDIA's driver: then there is no fast path."""
        with suppress(RuntimeError):
            return _core.StreamWatch(self.library)
        return None


class NcclFastPath(_core.FastPath):
    """A call is done once torch has issued it and, if it is synchronous, the current stream waits for it."""

    device = _core.CUDA

    def __init__(
        self,
        info: GroupInfo,
        works: Works,
        group: Any,
        record: _core.GroupRecord,
        health: Health,
        watch: _core.StreamWatch,
        summed: Iterable[torch.dtype],
        moved: Iterable[torch.dtype],
    ) -> None:
        ops = (ALL_REDUCE, BROADCAST, ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE, ALL_TO_ALL_SINGLE)
        super().__init__(record, info.rank, info.size, self.device, dtype_bits(moved), dtype_bits(summed), op_bits(ops))
        self.works = works
        self._record = record
        self._health = health
        self._info = info
        self._group = group
        # Weakly: the threads that call these may outlive the group.
        self._calls = _core.StreamCalls(watch, record, weak_method(self._late))
        self.open = OpenCalls(works, record, weak_method(self._failed))
        self._kinds: list[Kind] = []
        self._by_timeout: dict[float | None, dict[tuple[int, int, int, bool], Kind]] = {}
        self.set_limit(works.limit or 0.0)
        self.set_timeout(None)

    def set_limit(self, seconds: float) -> None:
        """The deadline of calls from now on, if ringway keeps it."""
        self._calls.limit = seconds

    def set_timeout(self, seconds: float | None) -> None:
        """The deadline that torch keeps for calls from now on; None leaves it as it is."""
        self._timeout = seconds
        self._known = self._by_timeout.setdefault(seconds, {})

    def pending(self) -> int:
        """How many calls the device has not passed."""
        self.open.sweep()
        return self._calls.pending + len(self.open)

    def settle(self) -> None:
        """Waits a moment for the device, if that can help."""
        self._calls.settle(_SETTLE_SECONDS)

    def fail(self) -> None:
        """The group has failed or ended: its calls end with it."""
        self._calls.fail()
        self.open.fail()

    def run(self, op: int, outputs: Any, inputs: Any, peer: int, tag: int, wait: bool) -> bool:
        # In a coalesced block, and while another call starts, the general path decides.
        if self.works.coalesced is not None or self._record.is_starting:
            return False
        try:
            token = self.begin(op, outputs, inputs, peer, Reduce.SUM)
            if token == 0:
                return False
            kind = self._known.get((op, peer, Reduce.SUM, False)) or self._kind(op, peer, Reduce.SUM, False)
            self._issue(kind, token, outputs, inputs)
            return True
        except BaseException as error:
            self._health.interrupted_by(error)
            raise
        finally:
            self._record.started()

    def start(self, op: int, outputs: Any, inputs: Any, peer: int, reduce: Reduce) -> Work | None:
        if reduce is not Reduce.SUM and not (reduce is Reduce.AVG and outputs.is_floating_point()):
            return None
        if self.works.coalesced is not None or self._record.is_starting:
            return None
        # The logger and the trace want to know at once when a call ends, and a captured call never ends.
        if self._record.keeps_times or torch.cuda.is_current_stream_capturing():
            return None
        try:
            token = self.begin(op, outputs, inputs, peer, reduce)
            if token == 0:
                return None
            kind = self._known.get((op, peer, reduce, True)) or self._kind(op, peer, reduce, True)
            return self._issue(kind, token, outputs, inputs)
        except BaseException as error:
            self._health.interrupted_by(error)
            raise
        finally:
            self._record.started()

    def _issue(self, kind: Kind, token: int, outputs: Any, inputs: Any) -> Work | None:
        """Issues a call. Returns the Work of an asynchronous one."""
        began, sequence = time.monotonic(), self._record.collectives - 1
        try:
            place: Any = None if kind.async_op else _place(outputs)
            work = _core.pass_on(kind.issue, outputs, inputs)
            if kind.async_op:
                found = FastWork(self, kind, sequence, token, work, outputs)
                self.open.add(found)
                return found
            if work is not None:  # a torch that does not run it on the current stream
                work.wait()
        except BaseException as error:
            if token not in self.open:
                self._record.end(token, False)
            if not isinstance(error, RuntimeError):  # not torch's, but a signal handler's
                raise
            call = replace(kind.call, inputs=(inputs,), outputs=(outputs,), sequence=sequence)
            raise mapped(self.works.aborted_with or error, call, time.monotonic() - began) from error
        self._follow(kind, sequence, token, outputs, place)
        return None

    def waited(self, work: FastWork) -> None:
        """The current stream has waited for an asynchronous call, and reports its end from now on."""
        place = _place(work.outputs)
        if self.open.take(work.token):
            self._follow(work.kind, work.sequence, work.token, work.outputs, place)

    def _follow(self, kind: Kind, sequence: int, token: int, outputs: Any, place: tuple[int, int]) -> None:
        try:
            if not self._calls.follow(token, sequence * _NOTE_KINDS + kind.number, *place):
                self._record.end(token, True)  # the graph runs it at each replay
        except RuntimeError as error:
            self._record.end(token, False)
            call = replace(kind.call, outputs=(outputs,), sequence=sequence)
            raise RingwayError(f"{call.describe()} failed: {error}") from error

    def _late(self, ended: list[tuple[int, int]], waiting: int | None, is_overdue: bool, failure: str) -> None:
        """Calls ended late, or one has waited for long, or the device cannot be asked: the group may have failed."""
        error = RingwayError(f"CUDA error: {failure}") if failure else self.works.error()
        note = ended[0][1] if ended else waiting
        if error is None and is_overdue:
            error, note = overdue(self._named(waiting), self.works.limit or 0.0), waiting
        for token, _ in ended:
            self._record.end(token, error is None)
        if error is not None:
            self._failed(mapped(error, self._named(note), 0.0))

    def _named(self, note: int | None) -> Call:
        """The call that a note is about, for messages."""
        if note is None or note % _NOTE_KINDS >= len(self._kinds):
            return Call(ALL_REDUCE, group=self._info.name, ranks=self._info.ranks)
        return replace(self._kinds[note % _NOTE_KINDS].call, sequence=note // _NOTE_KINDS)

    def _failed(self, error: BaseException) -> None:
        self.works.will_fail(error)
        self._health.failed(error)
        if self._health.fault is not None:
            self.fail()

    def _kind(self, op: int, peer: int, reduce: Reduce, async_op: bool) -> Kind:
        made = Kind(len(self._kinds), async_op, *self._prepared(OPS[op], peer, reduce, async_op))
        self._kinds.append(made)
        self._known[op, peer, reduce, async_op] = made
        return made

    def _prepared(self, op: Op, root: int, reduce: Reduce, async_op: bool) -> tuple[Call, Issue]:
        """A call without its tensors, and the function that issues it with torch's options made once."""
        call = Call(op, reduce=reduce, peer=root, group=self._info.name, ranks=self._info.ranks, timeout=self._timeout)
        group, how = self._group, REDUCE_OPS[reduce]

        def options(kind: Any, **values: Any) -> Any:
            made = options_for(kind, call, **values)
            if hasattr(made, "asyncOp"):
                made.asyncOp = async_op  # torch runs a synchronous call on the current stream
            return made

        if op is ALL_REDUCE:
            given = options(c10d.AllreduceOptions, reduceOp=how)
            return call, lambda tensor, _: group.allreduce([tensor], given)
        if op is BROADCAST:
            given = options(c10d.BroadcastOptions, rootRank=root, rootTensor=0)
            return call, lambda tensor, _: group.broadcast([tensor], given)
        if op is ALL_GATHER_SINGLE:
            given = options(native.AllgatherOptions)
            return call, lambda output, input: group._allgather_base(output, input, given)
        if op is REDUCE_SCATTER_SINGLE:
            given = options(c10d.ReduceScatterOptions, reduceOp=how)
            return call, lambda output, input: group._reduce_scatter_base(output, input, given)
        given = options(c10d.AllToAllOptions)
        return call, lambda output, input: group.alltoall_base(output, input, [], [], given)


def _place(tensor: Any) -> tuple[int, int]:
    """A tensor's device, and the current stream there."""
    device = tensor.get_device()
    return device, torch._C._cuda_getCurrentRawStream(device)
