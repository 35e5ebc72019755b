"""The short way of synchronous calls on plain CUDA tensors: torch's own method, and an event behind it.

The event stands for the call in the device watch, by which the recorder learns that the device has passed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as c10d
from torch import Tensor
from torch._C import _distributed_c10d as native

from ringway import _core
from ringway.backends.base import GroupInfo
from ringway.backends.c10d import REDUCE_OPS, options_for
from ringway.backends.c10d_work import mapped
from ringway.backends.device_watch import device_watch
from ringway.backends.nccl_work import Communicating, OnStream
from ringway.call import (
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BROADCAST,
    DTYPE_CODE,
    REDUCE_SCATTER_SINGLE,
    Call,
    Reduce,
)
from ringway.errors import CommTimeout, PeerLost

_SHORT = (BROADCAST, ALL_REDUCE, ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE, ALL_TO_ALL_SINGLE)
_SUM = int(Reduce.SUM)
_KNOWN_STREAMS = 256
"""torch has about a hundred; a program may bring one of its own for each call."""


class Issuing(Communicating, Protocol):
    """The backend, which keeps the last work of each way."""

    group: GroupInfo
    size: int

    def issued(self, way: None, work: Any) -> int: ...


class _Stream:
    """A stream of the program's, and events that nothing stands behind any more."""

    def __init__(self, index: int) -> None:
        self.stream = torch.cuda.current_stream(index)
        self.spare: list[Any] = []


class _Standing(OnStream):
    """A call that went the short way. Nobody else has its event, so that is used again."""

    def __init__(self, quick: NcclQuick, call: Call, token: int, number: int, on: _Stream) -> None:
        event = on.spare.pop() if on.spare else torch.cuda.Event()
        super().__init__(quick.backend, call, quick.lane.collectives - 1, number, on.stream, event, captured=False)
        self._spare = on.spare
        self._quick = quick
        self._token = token

    def outcome(self) -> BaseException | None:
        error = super().outcome()
        if error is None:
            self._spare.append(self._event)
        return error

    def told(self, error: BaseException | None) -> None:
        self._quick.ended(self._token, error)


class NcclQuick:
    """Each op returns 0 when the collective is issued and the current stream stands behind it, and 1 when the call is
    none for a short cut: then nothing has happened."""

    device = _core.CUDA

    def __init__(
        self,
        backend: Issuing,
        group: Any,
        lane: _core.Lane,
        summed: Iterable[torch.dtype],
        moved: Iterable[torch.dtype],
        limit: float | None,
    ) -> None:
        self.backend = backend
        self.lane = lane
        self._group = group
        self._size = backend.size
        self._calls = {op.code: Call(op, group=backend.group.name) for op in _SHORT}
        self._summed = _bits(summed)
        self._moved = _bits(moved)
        self._begin = lane.begin_shares
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._failed = False
        self.set_timeout(limit)

    def set_timeout(self, seconds: float | None) -> None:
        self._limit = Call(ALL_REDUCE, timeout=seconds)
        total = REDUCE_OPS[Reduce.SUM]
        self._of_broadcast: dict[int, Any] = {}
        self._of_all_reduce = options_for(c10d.AllreduceOptions, self._limit, reduceOp=total)
        self._of_all_gather = options_for(native.AllgatherOptions, self._limit)
        self._of_reduce_scatter = options_for(c10d.ReduceScatterOptions, self._limit, reduceOp=total)
        self._of_all_to_all = options_for(c10d.AllToAllOptions, self._limit)

    def broadcast(self, tensor: Tensor, root: int) -> int:
        token = self._begin(BROADCAST.code, tensor, tensor, 1, _SUM, root, self._moved, self.device)
        if token == 0:
            return 1
        options = self._of_broadcast.get(root)
        if options is None:
            options = options_for(c10d.BroadcastOptions, self._limit, rootRank=root, rootTensor=0)
            self._of_broadcast[root] = options
        return self._run(BROADCAST.code, token, tensor, self._group.broadcast, [tensor], options)

    def all_reduce(self, tensor: Tensor, reduce: int) -> int:
        if reduce != _SUM:
            return 1
        token = self._begin(ALL_REDUCE.code, tensor, tensor, 1, _SUM, -1, self._summed, self.device)
        if token == 0:
            return 1
        return self._run(ALL_REDUCE.code, token, tensor, self._group.allreduce, [tensor], self._of_all_reduce)

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> int:
        op = ALL_GATHER_SINGLE.code
        token = self._begin(op, output, input, self._size, _SUM, -1, self._moved, self.device)
        if token == 0:
            return 1
        return self._run(op, token, output, self._group._allgather_base, output, input, self._of_all_gather)

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor, reduce: int) -> int:
        if reduce != _SUM:
            return 1
        op = REDUCE_SCATTER_SINGLE.code
        token = self._begin(op, input, output, self._size, _SUM, -1, self._summed, self.device)
        if token == 0:
            return 1
        return self._run(op, token, output, self._group._reduce_scatter_base, output, input, self._of_reduce_scatter)

    def all_to_all_single(self, output: Tensor, input: Tensor) -> int:
        if not (_divides(output, self._size) and _divides(input, self._size)):
            return 1
        op = ALL_TO_ALL_SINGLE.code
        token = self._begin(op, input, output, 1, _SUM, -1, self._moved, self.device)
        if token == 0:
            return 1
        return self._run(op, token, output, self._group.alltoall_base, output, input, [], [], self._of_all_to_all)

    def _run(self, op: int, token: int, tensor: Tensor, method: Callable[..., Any], *arguments: Any) -> int:
        began = time.monotonic()
        try:
            if self._failed:
                self.lane.check()
            work = method(*arguments)
            work.wait()
        except BaseException as error:
            self.lane.end(token, False)
            if isinstance(error, Exception):
                call = replace(self._calls[op], sequence=self.lane.collectives - 1)
                raise mapped(error, call, time.monotonic() - began) from error
            raise
        if torch.cuda.is_current_stream_capturing():  # it was written down, and runs whenever the graph is replayed
            self.lane.end(token, True)
            return 0
        number = self.backend.issued(None, work)
        standing = _Standing(self, self._calls[op], token, number, self._stream(tensor.get_device()))
        device_watch.add(standing.line, standing, standing.told, self.lane.keeps_times)
        return 0

    def _stream(self, index: int) -> _Stream:
        """The current stream of the device. To ask torch for the stream itself takes longer than all else here."""
        raw = torch._C._cuda_getCurrentRawStream(index)
        known = self._streams.get((index, raw))
        if known is None:
            if len(self._streams) >= _KNOWN_STREAMS:
                self._streams.clear()
            known = self._streams[index, raw] = _Stream(index)
        return known

    def ended(self, token: int, error: BaseException | None) -> None:
        """What the device did with a call that was issued. What ends the group, its next call raises."""
        self.lane.end(token, error is None)
        if isinstance(error, (CommTimeout, PeerLost)) and not self._failed:
            self._failed = True
            self.lane.fail(error)


def _bits(dtypes: Iterable[torch.dtype]) -> int:
    return sum(1 << DTYPE_CODE[dtype] for dtype in dtypes)


def _divides(tensor: Tensor, size: int) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.shape[0] % size == 0
