"""MPI through mpi4py, on any wheel of torch.

Collectives are MPI's non-blocking ones. Waits poll them, so that they end at the deadline and on Ctrl-C.
`backends/queue.py` keeps their order and overlaps the asynchronous ones with the program. fp16 and bf16 are exchanged,
summed in fp32 in rank order, rounded once, and gathered: an MPI_Op would round at each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

import ringway._core as _core
from ringway.backends.base import Backend, GroupInfo, Health
from ringway.backends.compose import in_parts, reduced, reduced_share
from ringway.backends.mpi import world as mpi_world
from ringway.backends.mpi.buffers import DATATYPES, as_bytes, as_numbers, as_vector, countable
from ringway.backends.mpi.messages import Message
from ringway.backends.mpi.world import LOCK, MPI, mapped
from ringway.backends.queue import CallQueue, queued
from ringway.backends.tensors import even_splits, overlap
from ringway.call import ALL_REDUCE, ANY_SOURCE, Call, Reduce, dtype_bits, reduces
from ringway.errors import RingwayError, UsageError
from ringway.work import Finishing, Handle

_HALVES = frozenset({torch.float16, torch.bfloat16})
_OPERATIONS: dict[Reduce, Any] = {
    Reduce.SUM: MPI.SUM,
    Reduce.PRODUCT: MPI.PROD,
    Reduce.MIN: MPI.MIN,
    Reduce.MAX: MPI.MAX,
    Reduce.BAND: MPI.BAND,
    Reduce.BOR: MPI.BOR,
    Reduce.BXOR: MPI.BXOR,
}


def _nothing() -> None:
    """For calls that need no copies."""


def _sent_as(parts: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Around a call that MPI gets in these parts."""
    return in_parts() if len(parts) > 1 else nullcontext()


class MpiFastPath(_core.FastPath):
    """Sums in place, as MPI does it itself, without ringway's general path."""

    def __init__(
        self, backend: MpiBackend, comm: Any, queue: CallQueue, record: _core.GroupRecord, health: Health
    ) -> None:
        summed = dtype_bits(dtype for dtype in DATATYPES if reduces(dtype, Reduce.SUM))
        super().__init__(record, backend.rank, backend.size, _core.CPU, 0, summed, 1 << ALL_REDUCE.code)
        self._backend = backend
        self._start = comm.Iallreduce
        self._queue = queue
        self._record = record
        self._health = health

    def run(self, op: int, outputs: Any, inputs: Any, peer: int, async_op: bool, tag: int, reduce: int) -> bool:
        # If the call comes from a signal handler that interrupted one, the general path says why it is refused.
        if self._record.is_starting or not self._queue.take():
            return False
        try:
            token = self.begin(op, outputs, inputs, peer)
            if token == 0:
                return False
            done = False
            try:
                _core.pass_on(self._sum, outputs)
                done = True
            finally:
                self._record.end(token, done)
        except BaseException as error:
            self._health.interrupted_by(error)
            raise
        finally:
            self._record.started(0)
            self._queue.give_back()
        return True

    def _sum(self, tensor: Tensor) -> None:
        with _sent_as(parts := countable(tensor)):
            for part in parts:
                self._sum_part(part, tensor)

    def _sum_part(self, part: Tensor, tensor: Tensor) -> None:
        try:
            with LOCK:
                request = self._start(MPI.IN_PLACE, as_numbers(part), op=MPI.SUM)
                if request.Test():
                    return
            failure = None
        except MPI.Exception as error:
            failure = error
        call = Call(
            ALL_REDUCE,
            (tensor,),
            (tensor,),
            sequence=self._record.collectives - 1,
            group=self._backend.group.name,
            check=self._health.check,
        )
        if failure is not None:
            raise mapped(failure, call)
        self._backend.finish(request, call)


class MpiBackend(Backend):
    """One MPI communicator."""

    name = "mpi"
    devices = ("cpu", "cuda")

    def __init__(self, info: GroupInfo, *, part: bool = False) -> None:
        super().__init__(info)
        self.closed = False
        # The first group that torch makes is its world, which must match MPI's. A `part` of it may come earlier.
        self._comm = mpi_world.connect(info, whole_world=not part and not c10d.is_initialized())
        self.departures = mpi_world.Departures(info)
        self._queue = CallQueue(f"mpi-{info.name}", info.timeout)
        self._takes_cuda: bool | None = None
        self._most_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767

    @property
    def ranks(self) -> Sequence[int]:
        return self.group.ranks

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        if dtype in _HALVES:
            return reduces(dtype, reduce)
        return dtype in DATATYPES and reduce in _OPERATIONS

    def fast_paths(self, record: _core.GroupRecord, health: Health) -> Sequence[_core.FastPath]:
        return (MpiFastPath(self, self._comm, self._queue, record, health),)

    def set_timeout(self, seconds: float) -> None:
        self.group = replace(self.group, timeout=seconds)

    # How every collective runs

    def _submit(self, call: Call, body: Callable[[Call], None]) -> Handle:
        host, before, after = self._hosted(call)

        def run() -> None:
            before()
            body(host)
            after()

        return self._queue.submit(call, run)

    def finish(self, request: Any, call: Call, *keep: Tensor) -> None:
        limit = self.group.timeout if call.timeout is None else call.timeout
        buffers = (call.inputs, call.outputs, keep)
        mpi_world.finish(request, call, time.monotonic() + limit, lambda: self.closed, self.departures, buffers)

    def _start(self, start: Callable[..., Any], call: Call, *arguments: Any, **named: Any) -> Any:
        try:
            with LOCK:
                return start(*arguments, **named)
        except MPI.Exception as error:
            raise mapped(error, call) from None

    def _do(self, start: Callable[..., Any], call: Call, *arguments: Any, **named: Any) -> None:
        self.finish(self._start(start, call, *arguments, **named), call)

    def _hosted(self, call: Call) -> tuple[Call, Callable[[], None], Callable[[], None]]:
        """The call with its CUDA tensors in pinned memory, and the copies before and after it. A CUDA-aware MPI takes
        CUDA tensors, once the work that produces them is done."""
        tensors = [*call.inputs, *call.outputs]
        if not tensors or not tensors[0].is_cuda:
            return call, _nothing, _nothing
        made = torch.cuda.current_stream(tensors[0].device).record_event()
        if self._takes_cuda is None:
            self._takes_cuda = mpi_world.cuda_aware()
        if self._takes_cuda:
            return call, made.synchronize, _nothing
        pinned = {id(t): torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True) for t in tensors}

        def before() -> None:
            made.synchronize()
            for tensor in call.inputs:
                pinned[id(tensor)].copy_(tensor)

        def after() -> None:
            for tensor in call.outputs:
                tensor.copy_(pinned[id(tensor)])

        host = replace(call, inputs=[pinned[id(t)] for t in call.inputs], outputs=[pinned[id(t)] for t in call.outputs])
        return host, before, after

    # Collectives

    @queued
    def broadcast(self, call: Call) -> None:
        self._do(self._comm.Ibcast, call, as_bytes(call.outputs[0]), root=call.peer)

    @queued
    def barrier(self, call: Call) -> None:
        self._do(self._comm.Ibarrier, call)

    @queued
    def all_reduce(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        if source.dtype in _HALVES:

            def gather(share: Tensor, whole: Tensor) -> None:
                request = self._start(self._comm.Iallgather, call, as_bytes(share), as_bytes(whole, self.size))
                self.finish(request, call, share, whole)

            target.copy_(reduced(call, self._exchange(call), gather))
            return
        in_place = source.data_ptr() == target.data_ptr()
        with _sent_as(parts := countable(source)):
            for part, into in zip(parts, countable(target), strict=True):
                given = MPI.IN_PLACE if in_place else as_numbers(part)
                self._do(self._comm.Iallreduce, call, given, as_numbers(into), op=_OPERATIONS[call.reduce])

    def _exchange(self, call: Call) -> Callable[[Tensor, Tensor], None]:
        def exchange(source: Tensor, target: Tensor) -> None:
            shares = as_bytes(source, self.size), as_bytes(target, self.size)
            self.finish(self._start(self._comm.Ialltoall, call, *shares), call, source, target)

        return exchange

    @queued
    def reduce(self, call: Call) -> None:
        at_root = self.rank == call.peer
        source, target = call.inputs[0], call.outputs[0]
        if source.dtype in _HALVES:

            def gather(share: Tensor, whole: Tensor) -> None:
                into = as_bytes(whole, self.size) if at_root else None
                request = self._start(self._comm.Igather, call, as_bytes(share), into, root=call.peer)
                self.finish(request, call, share, whole)

            total = reduced(call, self._exchange(call), gather)
            if at_root:
                target.copy_(total)
            return
        in_place = at_root and source.data_ptr() == target.data_ptr()
        with _sent_as(parts := countable(source)):
            for part, total in zip(parts, countable(target), strict=True):
                given = MPI.IN_PLACE if in_place else as_numbers(part)
                into = as_numbers(total) if at_root else None
                self._do(self._comm.Ireduce, call, given, into, op=_OPERATIONS[call.reduce], root=call.peer)

    @queued
    def reduce_scatter_tensor(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        if source.dtype in _HALVES or len(countable(target)) > 1:
            target.copy_(reduced_share(call, self._exchange(call)).view(target.shape))
            return
        into = torch.empty_like(target) if overlap(source, target) else target
        request = self._start(
            self._comm.Ireduce_scatter_block,
            call,
            as_numbers(source, self.size),
            as_numbers(into),
            op=_OPERATIONS[call.reduce],
        )
        self.finish(request, call, into)
        if into is not target:
            target.copy_(into)

    @queued
    def all_gather_into_tensor(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        if source.data_ptr() == target.data_ptr() + self.rank * source.nbytes:
            given: Any = MPI.IN_PLACE
        else:
            source = source.clone() if overlap(source, target) else source
            given = as_bytes(source)
        request = self._start(self._comm.Iallgather, call, given, as_bytes(target, self.size))
        self.finish(request, call, source)

    @queued
    def gather(self, call: Call) -> None:
        at_root, source = self.rank == call.peer, call.inputs[0]
        gathered = source.new_empty((self.size, source.numel()) if at_root else 0)
        into = as_bytes(gathered, self.size) if at_root else None
        request = self._start(self._comm.Igather, call, as_bytes(source), into, root=call.peer)
        self.finish(request, call, gathered)
        for output, row in zip(call.outputs, gathered, strict=True):
            output.copy_(row.view(output.shape))

    @queued
    def scatter(self, call: Call) -> None:
        at_root, target = self.rank == call.peer, call.outputs[0]
        parts = torch.cat([t.reshape(-1) for t in call.inputs]) if at_root else target.new_empty(0)
        given = as_bytes(parts, self.size) if at_root else None
        request = self._start(self._comm.Iscatter, call, given, as_bytes(target), root=call.peer)
        self.finish(request, call, parts)

    @queued
    def all_to_all_single(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        source = source.clone() if overlap(source, target) else source
        given = as_vector(source, call.input_splits or even_splits(source, self.size))
        into = as_vector(target, call.output_splits or even_splits(target, self.size))
        request = self._start(self._comm.Ialltoallw, call, given, into)
        self.finish(request, call, source)

    # Messages

    def send(self, call: Call) -> Handle:
        host, before, _ = self._hosted(call)
        before()
        start = self._comm.Isend
        request = self._start(start, call, as_bytes(host.inputs[0]), dest=call.peer, tag=self._tag(call))
        return self._message(request, call, host)

    def recv(self, call: Call) -> Handle:
        host, before, after = self._hosted(call)
        before()
        source = MPI.ANY_SOURCE if call.peer == ANY_SOURCE else call.peer
        start = self._comm.Irecv
        request = self._start(start, call, as_bytes(host.outputs[0]), source=source, tag=self._tag(call))
        message = self._message(request, call, host)
        return message if after is _nothing else Finishing(message, after)

    def _message(self, request: Any, call: Call, host: Call) -> Message:
        limit = self.group.timeout if call.timeout is None else call.timeout
        return Message(request, call, time.monotonic() + limit, self, host)

    def _tag(self, call: Call) -> int:
        if not 0 <= call.tag <= self._most_tag:
            raise UsageError(f"{call.describe()}: this MPI takes tags from 0 to {self._most_tag}")
        return call.tag

    # The end

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.departures.forget()
        self._queue.stop(RingwayError(f"the group {self.group.name} was destroyed"))
        with LOCK:
            if not mpi_world.anything_abandoned() and not MPI.Is_finalized():
                self._comm.Free()

    def abort(self) -> None:
        self.closed = True
        self.departures.forget()
        self._queue.stop(RingwayError(f"the group {self.group.name} was aborted"))


def part_of_world(info: GroupInfo) -> MpiBackend:
    """A backend between some ranks of a group that is itself being made."""
    return MpiBackend(info, part=True)
