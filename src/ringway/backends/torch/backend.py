"""torch's own backends: gloo as ringway's own group, and any group that torch made, as it is.

Methods of the process group are called directly, with options made once: torch's Python wrappers cost more
than the rest of a small call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as c10d
from torch._C import _distributed_c10d as native

import ringway._core as _core
from ringway.backends.base import Backend, GroupInfo
from ringway.backends.torch.handles import SLICE, Announced, Unannounced, mapped
from ringway.call import ALL_REDUCE, ANY_SOURCE, BARRIER, Call, Reduce, dtype_bits
from ringway.errors import BackendUnavailable
from ringway.launch.ports import address_towards
from ringway.references import keep_for_ever
from ringway.work import Finishing, Handle


def options_for(kind: Any, call: Call, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    if call.timeout is not None:
        options.timeout = timedelta(seconds=call.timeout)
    return options


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """torch compares shapes where only the counts matter."""
    return [tensor.view(-1) for tensor in tensors]


REDUCE_OPS: dict[Reduce, Any] = {
    reduce: getattr(c10d.ReduceOp, reduce.name) for reduce in Reduce if reduce is not Reduce.PREMUL_SUM
}


class C10dBackend(Backend):
    """The ops that every process group of torch has, through the group's own methods.

    `group` may be a ProcessGroup or one of torch's backend objects: both spell the collectives alike.
    """

    name = "c10d"
    announced_messages = True

    def __init__(self, info: GroupInfo, group: Any) -> None:
        super().__init__(info)
        self._group = group
        self._plain_all_reduce = {
            reduce: options_for(c10d.AllreduceOptions, Call(BARRIER), reduceOp=op) for reduce, op in REDUCE_OPS.items()
        }

    def _reduce_op(self, call: Call) -> Any:
        if call.reduce is Reduce.PREMUL_SUM:
            return native._make_nccl_premul_sum(call.factor)
        return REDUCE_OPS[call.reduce]

    def _start(self, call: Call, method: Callable[..., Any], *arguments: Any) -> Handle:
        """Each op is this: marshal, start, and what torch throws at once is one of ours."""
        try:
            work = method(*arguments)
        except RuntimeError as error:
            raise mapped(error, call, 0.0) from error
        announced = call.op.collective or self.announced_messages
        return Announced(work, call) if announced else Unannounced(work, call)

    def broadcast(self, call: Call) -> Handle:
        options = options_for(c10d.BroadcastOptions, call, rootRank=call.peer, rootTensor=0)
        return self._start(call, self._group.broadcast, list(call.outputs), options)

    def all_reduce(self, call: Call) -> Handle:
        if call.timeout is None and call.reduce in self._plain_all_reduce:
            options = self._plain_all_reduce[call.reduce]
        else:
            options = options_for(c10d.AllreduceOptions, call, reduceOp=self._reduce_op(call))
        return self._start(call, self._group.allreduce, list(call.outputs), options)

    def reduce(self, call: Call) -> Handle:
        options = options_for(c10d.ReduceOptions, call, reduceOp=self._reduce_op(call), rootRank=call.peer)
        return self._start(call, self._group.reduce, list(call.outputs), options)

    def all_gather(self, call: Call) -> Handle:
        options = options_for(native.AllgatherOptions, call)
        return self._start(call, self._group.allgather, [_flat(call.outputs)], _flat(call.inputs), options)

    def all_gather_into_tensor(self, call: Call) -> Handle:
        options = options_for(native.AllgatherOptions, call)
        return self._start(call, self._group._allgather_base, *_flat((call.outputs[0], call.inputs[0])), options)

    def gather(self, call: Call) -> Handle:
        outputs = [_flat(call.outputs)] if self.rank == call.peer else []
        options = options_for(c10d.GatherOptions, call, rootRank=call.peer)
        return self._start(call, self._group.gather, outputs, _flat(call.inputs), options)

    def scatter(self, call: Call) -> Handle:
        inputs = [_flat(call.inputs)] if self.rank == call.peer else []
        options = options_for(c10d.ScatterOptions, call, rootRank=call.peer)
        return self._start(call, self._group.scatter, _flat(call.outputs), inputs, options)

    def all_to_all_single(self, call: Call) -> Handle:
        options = options_for(c10d.AllToAllOptions, call)
        splits = list(call.output_splits or ()), list(call.input_splits or ())
        return self._start(call, self._group.alltoall_base, call.outputs[0], call.inputs[0], *splits, options)

    def barrier(self, call: Call) -> Handle:
        return self._start(call, self._group.barrier, options_for(c10d.BarrierOptions, call))

    def send(self, call: Call) -> Handle:
        return self._start(call, self._group.send, list(call.inputs), call.peer, call.tag)

    def recv(self, call: Call) -> Handle:
        outputs = list(call.outputs)
        if call.peer == ANY_SOURCE:
            return self._start(call, self._group.recv_anysource, outputs, call.tag)
        return self._start(call, self._group.recv, outputs, call.peer, call.tag)


class _GlooQuick:
    """The short way of a small all_reduce through gloo."""

    def __init__(self, group: Any, lane: _core.Lane, name: str, dtypes: Iterable[torch.dtype]) -> None:
        self._allreduce = group.allreduce
        self._begin = lane.begin_plain
        self._end = lane.end
        self._check = lane.check
        self._name = name
        self._dtypes = dtype_bits(dtypes)
        self._options = {
            int(reduce): options_for(c10d.AllreduceOptions, Call(BARRIER), reduceOp=op)
            for reduce, op in REDUCE_OPS.items()
        }

    def all_reduce(self, tensor: torch.Tensor, reduce: int) -> int:
        token = self._begin(ALL_REDUCE.code, tensor, reduce, -1, self._dtypes)
        if token == 0:
            return 1
        ok = False
        try:
            work = self._allreduce([tensor], self._options[reduce])
            try:
                work.wait(SLICE)
            except Exception:
                call = Call(ALL_REDUCE, (tensor,), (tensor,), Reduce(reduce), group=self._name, check=self._check)
                Announced(work, call).wait()
            ok = True
        finally:
            self._end(token, ok)
        return 0


class GlooBackend(C10dBackend):
    """gloo. It takes some dtypes only, has no list all_to_all, and its reduce_scatter is an allreduce a rank."""

    name = "gloo"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    announced_messages = False

    _REDUCED = frozenset(
        {
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int8,
            torch.uint8,
            torch.int32,
            torch.int64,
        }
    )
    _MOVED = frozenset({torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64})

    def __init__(self, info: GroupInfo, group: Any = None) -> None:
        if group is None:
            group = self.torch_group = make_gloo(info)
        super().__init__(info, group)

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        return dtype in self._REDUCED and reduce not in (Reduce.AVG, Reduce.PREMUL_SUM)

    def can_move(self, dtype: torch.dtype) -> bool:
        return dtype in self._MOVED

    def send(self, call: Call) -> Handle:
        tensor = call.inputs[0]
        return super().send(replace(call, inputs=(tensor.cpu(),)) if tensor.is_cuda else call)

    def recv(self, call: Call) -> Handle:
        """gloo's messages know host memory only."""
        tensor = call.outputs[0]
        if not tensor.is_cuda:
            return super().recv(call)
        landing = torch.empty(tensor.shape, dtype=tensor.dtype)
        handle = super().recv(replace(call, outputs=(landing,)))
        return Finishing(handle, lambda: _land(tensor, landing))

    def quick(self, lane: _core.Lane) -> _GlooQuick:
        return _GlooQuick(self._group, lane, self.group.name, self._REDUCED)

    def set_timeout(self, seconds: float) -> None:
        if isinstance(self._group, Gloo):
            _TorchsGloo._set_default_timeout(self._group, timedelta(seconds=seconds))  # past the one that tells us

    def close(self) -> None:
        # Whoever holds the last reference joins gloo's threads, which must happen while the interpreter lives.
        # It lasts until what they are at times out: a group with calls that were given up is left to its threads.
        if self.abandoned and self._group is not None:
            keep_for_ever(self._group)
        self._group = self.torch_group = None


def _land(tensor: torch.Tensor, landing: torch.Tensor) -> None:
    tensor.copy_(landing)


class TorchBackend(C10dBackend):
    """Any other group of torch's (nccl, ucc, torch's own mpi, a third party's): every op is its own."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def all_to_all(self, call: Call) -> Handle:
        options = options_for(c10d.AllToAllOptions, call)
        return self._start(call, self._group.alltoall, list(call.outputs), list(call.inputs), options)

    def reduce_scatter(self, call: Call) -> Handle:
        options = options_for(c10d.ReduceScatterOptions, call, reduceOp=self._reduce_op(call))
        return self._start(call, self._group.reduce_scatter, list(call.outputs), [list(call.inputs)], options)

    def reduce_scatter_tensor(self, call: Call) -> Handle:
        options = options_for(c10d.ReduceScatterOptions, call, reduceOp=self._reduce_op(call))
        return self._start(call, self._group._reduce_scatter_base, call.outputs[0], call.inputs[0], options)


_TorchsGloo: Any = c10d.ProcessGroupGloo if c10d.is_gloo_available() else object


class Gloo(_TorchsGloo):  # type: ignore[misc]
    """torch's gloo, which tells when torch gives the group another timeout (`_set_pg_timeout`)."""

    told: Callable[[float], None] | None = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        if self.told is not None:
            self.told(timeout.total_seconds())


def make_gloo(info: GroupInfo, *, loopback: bool = False) -> Any:
    """A gloo of torch's for the group; on the loopback interface only where all its ranks share a host."""
    if not c10d.is_gloo_available():
        raise BackendUnavailable("gloo", "this build of torch has none", remedy="Install a torch wheel with gloo")
    timeout = timedelta(seconds=info.timeout)
    device = _gloo_device(info, loopback or info.size == 1)
    if device is None:
        return Gloo(info.store, info.rank, info.size, timeout)
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timeout
    return Gloo(info.store, info.rank, info.size, options)


def _gloo_device(info: GroupInfo, loopback: bool) -> Any:
    """The interface on the way to the job's store; None leaves it to gloo, which takes the one of the user's
    GLOO_SOCKET_IFNAME, or what this host's name resolves to: often an address that no other host reaches."""
    if loopback:
        return c10d.ProcessGroupGloo.create_device(interface="lo", lazy_init=True)
    store = info.store
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    if "GLOO_SOCKET_IFNAME" in os.environ or not isinstance(store, c10d.TCPStore):
        return None
    towards = address_towards(store.host)
    return None if towards is None else c10d.ProcessGroupGloo.create_device(hostname=towards)
