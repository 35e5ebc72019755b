"""torch's process groups, called through their own methods.

Options are made once and the methods of the process group are called directly: torch's Python wrappers cost more than
the rest of a small call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as c10d
from torch._C import _distributed_c10d as native

import ringway._core as _core
from ringway.backends.base import Backend, GroupInfo
from ringway.backends.torch.handles import C10dHandle, GlooMessage, mapped
from ringway.call import ANY_SOURCE, BARRIER, Call, Reduce
from ringway.work import Handle


def options_for(kind: Any, call: Call, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    if call.timeout is not None:
        options.timeout = timedelta(seconds=call.timeout)
    return options


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """torch compares shapes although only the element counts matter."""
    return [tensor.view(-1) for tensor in tensors]


REDUCE_OPS: dict[Reduce, Any] = {
    reduce: getattr(c10d.ReduceOp, reduce.name) for reduce in Reduce if reduce is not Reduce.PREMUL_SUM
}


class C10dBackend(Backend):
    """The ops that every process group of torch has, through the group's own methods.

    `group` may be a ProcessGroup or one of torch's backend objects: both have the same methods.
    """

    name = "c10d"
    messages_have_futures = True
    says_when_it_sends: ClassVar[bool] = True

    def __init__(self, info: GroupInfo, group: Any) -> None:
        super().__init__(info)
        self._group = group
        self._plain_all_reduce = {
            reduce: options_for(c10d.AllreduceOptions, Call(BARRIER), reduceOp=op) for reduce, op in REDUCE_OPS.items()
        }

    def _options(self, kind: Any, call: Call, **values: Any) -> Any:
        return options_for(kind, call, **values)

    def _reduce_op(self, call: Call) -> Any:
        if call.reduce is Reduce.PREMUL_SUM:
            return native._make_nccl_premul_sum(call.factor)
        return REDUCE_OPS[call.reduce]

    def _start(self, call: Call, method: Callable[..., Any], *arguments: Any) -> Handle:
        """Every op goes through here: marshal, start, and map what torch raises at once."""
        try:
            work = _core.pass_on(method, *arguments)
        except RuntimeError as error:
            raise mapped(error, call, 0.0) from error
        handle = C10dHandle if call.op.collective or self.messages_have_futures else GlooMessage
        return handle(work, call, self.group.process)

    def broadcast(self, call: Call) -> Handle:
        options = self._options(c10d.BroadcastOptions, call, rootRank=call.peer, rootTensor=0)
        return self._start(call, self._group.broadcast, list(call.outputs), options)

    def all_reduce(self, call: Call) -> Handle:
        if call.timeout is None and call.reduce in self._plain_all_reduce:
            options = self._plain_all_reduce[call.reduce]
        else:
            options = self._options(c10d.AllreduceOptions, call, reduceOp=self._reduce_op(call))
        return self._start(call, self._group.allreduce, list(call.outputs), options)

    def reduce(self, call: Call) -> Handle:
        options = self._options(c10d.ReduceOptions, call, reduceOp=self._reduce_op(call), rootRank=call.peer)
        return self._start(call, self._group.reduce, list(call.outputs), options)

    def all_gather(self, call: Call) -> Handle:
        options = self._options(native.AllgatherOptions, call)
        return self._start(call, self._group.allgather, [_flat(call.outputs)], _flat(call.inputs), options)

    def all_gather_into_tensor(self, call: Call) -> Handle:
        options = self._options(native.AllgatherOptions, call)
        return self._start(call, self._group._allgather_base, *_flat((call.outputs[0], call.inputs[0])), options)

    def gather(self, call: Call) -> Handle:
        outputs = [_flat(call.outputs)] if self.rank == call.peer else []
        options = self._options(c10d.GatherOptions, call, rootRank=call.peer)
        return self._start(call, self._group.gather, outputs, _flat(call.inputs), options)

    def scatter(self, call: Call) -> Handle:
        inputs = [_flat(call.inputs)] if self.rank == call.peer else []
        options = self._options(c10d.ScatterOptions, call, rootRank=call.peer)
        return self._start(call, self._group.scatter, _flat(call.outputs), inputs, options)

    def all_to_all_single(self, call: Call) -> Handle:
        options = self._options(c10d.AllToAllOptions, call)
        splits = list(call.output_splits or ()), list(call.input_splits or ())
        return self._start(call, self._group.alltoall_base, call.outputs[0], call.inputs[0], *splits, options)

    def barrier(self, call: Call) -> Handle:
        return self._start(call, self._group.barrier, self._options(c10d.BarrierOptions, call))

    def send(self, call: Call) -> Handle:
        return self._start(call, self._group.send, list(call.inputs), call.peer, call.tag)

    def recv(self, call: Call) -> Handle:
        outputs = list(call.outputs)
        if call.peer == ANY_SOURCE:
            return self._start(call, self._group.recv_anysource, outputs, call.tag)
        return self._start(call, self._group.recv, outputs, call.peer, call.tag)


class TorchBackend(C10dBackend):
    """Any other torch group (nccl, ucc, torch's own mpi, a third party's). It has every op."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def all_to_all(self, call: Call) -> Handle:
        options = self._options(c10d.AllToAllOptions, call)
        return self._start(call, self._group.alltoall, list(call.outputs), list(call.inputs), options)

    def reduce_scatter(self, call: Call) -> Handle:
        options = self._options(c10d.ReduceScatterOptions, call, reduceOp=self._reduce_op(call))
        return self._start(call, self._group.reduce_scatter, list(call.outputs), [list(call.inputs)], options)

    def reduce_scatter_tensor(self, call: Call) -> Handle:
        options = self._options(c10d.ReduceScatterOptions, call, reduceOp=self._reduce_op(call))
        return self._start(call, self._group._reduce_scatter_base, call.outputs[0], call.inputs[0], options)
