"""The short way of synchronous calls on plain CUDA tensors: torch's own method, and an event behind it.

The event stands for the call in the device watch, by which the recorder learns that the device has passed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch._C import _distributed_c10d as native

import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.backends.nccl.handles import OnStream, Works
from ringway.backends.torch.backend import REDUCE_OPS, options_for
from ringway.backends.torch.handles import mapped
from ringway.call import (
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BROADCAST,
    REDUCE_SCATTER_SINGLE,
    Call,
    Reduce,
    dtype_bits,
)

_SUM = int(Reduce.SUM)
_KNOWN_STREAMS = 256
"""torch has about a hundred; a program may bring one of its own for each call."""


class _Stream:
    """A stream of the program's, and events that nothing stands behind any more."""

    def __init__(self, index: int) -> None:
        self.stream = torch.cuda.current_stream(index)
        self.spare: list[Any] = []


class _Standing(OnStream):
    """A call that went the short way. Nobody else has its event, so that is used again."""

    def __init__(self, quick: NcclQuick, call: Call, token: int, number: int, on: _Stream) -> None:
        event = on.spare.pop() if on.spare else torch.cuda.Event()
        super().__init__(quick.works, call, quick.lane.collectives - 1, number, on.stream, event, captured=False)
        self._spare = on.spare
        self._quick = quick
        self._token = token

    def outcome(self) -> BaseException | None:
        error = super().outcome()
        if error is None:
            self._spare.append(self._event)
        return error

    def told(self, error: BaseException | None) -> None:
        self._quick.lane.end(self._token, error is None)
        if error is not None:
            self._quick.failed(error)


class NcclQuick:
    """Each op returns 0 when the collective is issued and the current stream stands behind it, and 1 when the call is
    none for a short cut: then nothing has happened."""

    device = _core.CUDA

    def __init__(
        self,
        info: GroupInfo,
        works: Works,
        group: Any,
        lane: _core.Lane,
        summed: Iterable[torch.dtype],
        moved: Iterable[torch.dtype],
        limit: float | None,
    ) -> None:
        self.works = works
        self.lane = lane
        self.failed: Callable[[BaseException], None] = lambda error: None
        self._info = info
        self._size = info.size
        self._group = group
        self._summed = dtype_bits(summed)
        self._moved = dtype_bits(moved)
        self._begin = lane.begin_shares
        self._streams: dict[tuple[int, int], _Stream] = {}
        self.set_timeout(limit)

    def set_timeout(self, seconds: float | None) -> None:
        total = REDUCE_OPS[Reduce.SUM]
        self._timeout = seconds
        self._all_reduce = self._spelled(Call(ALL_REDUCE), c10d.AllreduceOptions, reduceOp=total)
        self._all_gather = self._spelled(Call(ALL_GATHER_SINGLE), native.AllgatherOptions)
        self._reduce_scatter = self._spelled(Call(REDUCE_SCATTER_SINGLE), c10d.ReduceScatterOptions, reduceOp=total)
        self._all_to_all = self._spelled(Call(ALL_TO_ALL_SINGLE), c10d.AllToAllOptions)
        self._broadcasts: dict[int, tuple[Call, Any]] = {}

    def _spelled(self, call: Call, kind: Any, **values: Any) -> tuple[Call, Any]:
        """A call without its tensors, for us and for torch."""
        call = replace(call, group=self._info.name, ranks=self._info.ranks, timeout=self._timeout)
        return call, options_for(kind, call, **values)

    def broadcast(self, tensor: Tensor, root: int) -> int:
        token = self._begin(BROADCAST.code, tensor, tensor, 1, 1, _SUM, root, self._moved, self.device)
        if token == 0:
            return 1
        known = self._broadcasts
        if root not in known:
            known[root] = self._spelled(Call(BROADCAST, peer=root), c10d.BroadcastOptions, rootRank=root, rootTensor=0)
        call, options = known[root]
        return self._run(token, call, tensor, self._group.broadcast, [tensor], options)

    def all_reduce(self, tensor: Tensor, reduce: int) -> int:
        if reduce != _SUM:
            return 1
        token = self._begin(ALL_REDUCE.code, tensor, tensor, 1, 1, _SUM, -1, self._summed, self.device)
        if token == 0:
            return 1
        call, options = self._all_reduce
        return self._run(token, call, tensor, self._group.allreduce, [tensor], options)

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> int:
        op = ALL_GATHER_SINGLE.code
        token = self._begin(op, output, input, self._size, 1, _SUM, -1, self._moved, self.device)
        if token == 0:
            return 1
        call, options = self._all_gather
        return self._run(token, call, output, self._group._allgather_base, output, input, options)

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor, reduce: int) -> int:
        if reduce != _SUM:
            return 1
        op = REDUCE_SCATTER_SINGLE.code
        token = self._begin(op, input, output, self._size, 1, _SUM, -1, self._summed, self.device)
        if token == 0:
            return 1
        call, options = self._reduce_scatter
        return self._run(token, call, input, self._group._reduce_scatter_base, output, input, options)

    def all_to_all_single(self, output: Tensor, input: Tensor) -> int:
        op = ALL_TO_ALL_SINGLE.code
        token = self._begin(op, input, output, 1, self._size, _SUM, -1, self._moved, self.device)
        if token == 0:
            return 1
        call, options = self._all_to_all
        return self._run(token, call, input, self._group.alltoall_base, output, input, [], [], options)

    def _run(self, token: int, call: Call, tensor: Tensor, method: Callable[..., Any], *arguments: Any) -> int:
        began = time.monotonic()
        try:
            work = method(*arguments)
            captured = torch.cuda.is_current_stream_capturing()
            number = -1 if captured else self.works.issued(None, work)
            work.wait()
            if captured:  # it was written down, and runs whenever the graph is replayed
                self.lane.end(token, True)
            else:
                standing = _Standing(self, call, token, number, self._stream(tensor.get_device()))
                self.works.watch.add(standing.line, standing, standing.told, self.lane.keeps_times)
        except BaseException as error:
            self.lane.end(token, False)
            if not isinstance(error, Exception):
                raise
            call = replace(call, inputs=(tensor,), sequence=self.lane.collectives - 1)
            raise mapped(error, call, time.monotonic() - began) from error
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
