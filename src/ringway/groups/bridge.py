"""The bridge: a communicator shown to torch as a ProcessGroup.

So `torch.distributed`'s functions, DDP, FSDP, DTensor and functional collectives on one of ringway's groups take the
same path as the user's own calls. Some methods have an old and a new name here: which one torch calls depends on its
version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

import ringway._core as _core
from ringway import call as ops
from ringway.backends.nccl.group import Nccl
from ringway.backends.registry import user_spelling
from ringway.backends.torch.gloo import Gloo
from ringway.call import ALL_REDUCE, ANY_SOURCE, Call, Op, Reduce, parse_reduce
from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.sparse import all_reduce_sparse
from ringway.references import weak_method
from ringway.torch_versions import is_async, untraced
from ringway.work import DONE, Together, Work, WorkHandle, seconds


@untraced
class Bridge(c10d.ProcessGroup):
    """One of ringway's groups, as torch sees it."""

    def __init__(
        self,
        name: str,
        communicator: Communicator,
        torchs: dict[str, Any],
        split: Callable[..., Bridge | None],
        place: tuple[int, int] | None = None,
    ) -> None:
        """`name` is torch's name for the backend. `torchs` are torch's own backends by device, for calls that torch
        makes in C++ and that bypass this class. `split` makes a group of some ranks that shares this one's nccl.
        `place` is the rank and the size for C++ code, if they are not the communicator's."""
        rank, size = place or (communicator.rank, communicator.size)
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = name
        self._collecting: list[Work] | None = None
        self._split = split
        self._connect(communicator)
        # The objects themselves: torch would return another one for gloo, which does not report timeout changes.
        self._torchs = torchs
        custom, nccl = c10d.ProcessGroup.BackendType.CUSTOM, c10d.ProcessGroup.BackendType.NCCL
        self._set_default_backend(custom if "cpu" in torchs else nccl)
        for device, backend in torchs.items():
            self._register_backend(torch.device(device), custom if backend is torchs.get("cpu") else nccl, backend)
            if isinstance(backend, (Gloo, Nccl)):
                backend.timeout_changed = weak_method(communicator.set_timeout)

    def _connect(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.paths = communicator.paths  # for `WorldFastPath`
        communicator.paths.changed = weak_method(self._bind_methods)
        self._bind_methods()

    def _bind_methods(self) -> None:
        """Methods whose calls a native fast path takes are replaced by it, for as long as it is open."""
        calls, streams = self.communicator.calls, self.communicator.paths.streams
        for name, op in _METHODS.items():
            path = streams.get(op.code)
            if path is None:
                self.__dict__.pop(name, None)
            else:
                otherwise = weak_method(MethodType(getattr(type(self), name), self))
                self.__dict__[name] = _core.BridgeMethod(op.code, path, otherwise, calls.fast_failure)

    def __repr__(self) -> str:
        backend, own = user_spelling(self._name), self.communicator
        return f"<ringway group {own.name}: {backend}, rank {own.rank} of {own.size}>"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        # Not the backend's own name: torch assumes that a group named gloo or nccl is its own class.
        return self._name

    @property
    def supports_reconfigure(self) -> bool:
        """torch 2.15 would say yes: it asks the gloo group that it knows behind this one."""
        return False

    def _issue(self, call: Call, opts: Any) -> Work | None:
        call.async_op = is_async(opts)
        call.timeout = seconds(getattr(opts, "timeout", None))
        if self._collecting is not None:
            call.async_op = True
        work = self.communicator.calls.issue(call)
        if self._collecting is not None and work is not None:
            self._collecting.append(work)
        return work

    def _fast(
        self, op: Op, output: Tensor, input: Tensor, opts: Any, peer: int = -1, reduce: Reduce = Reduce.SUM
    ) -> bool:
        """Whether a fast path has done the call. If not, nothing has happened."""
        if reduce is not Reduce.SUM or self._collecting is not None:
            return False
        if is_async(opts) or opts.timeout.days >= 0:
            return False
        return self.communicator.calls.run_fast(op.code, output, input, peer) is True

    @staticmethod
    def _reduction(opts: Any) -> tuple[Reduce, Any]:
        op = getattr(opts, "reduceOp", None)
        return (Reduce.SUM, None) if op is None else parse_reduce(op)

    def allreduce(self, tensors: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        members = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if len(members) > 1:
            return self.allreduce_coalesced(members, opts)
        reduce, factor = self._reduction(opts)
        if members[0].layout is torch.sparse_coo:
            return all_reduce_sparse(self.communicator, members[0], reduce, is_async(opts))
        if self._fast(ALL_REDUCE, members[0], members[0], opts, reduce=reduce):
            return None
        return self._issue(Call(ALL_REDUCE, members, members, reduce, factor), opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work | None:  # type: ignore[override]
        reduce, factor = self._reduction(opts)
        members = list(tensors)
        return self._issue(Call(ops.ALL_REDUCE_COALESCED, members, members, reduce, factor), opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        members = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        if len(members) == 1 and self._fast(ops.BROADCAST, members[0], members[0], opts, root):
            return None
        return self._issue(Call(ops.BROADCAST, members, members, peer=root), opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        members = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reduce, factor = self._reduction(opts)
        return self._issue(Call(ops.REDUCE, members, members, reduce, factor, getattr(opts, "rootRank", 0)), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(inputs) > 1:
            return self.allgather_coalesced(outputs, inputs, opts)
        return self._issue(Call(ops.ALL_GATHER, list(inputs), list(outputs[0])), opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        """torch passes the outputs rank by rank; a call has them input by input."""
        inputs = list(inputs)
        by_input = [row[i] for i in range(len(inputs)) for row in outputs]
        return self._issue(Call(ops.ALL_GATHER_COALESCED, inputs, by_input), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work | None:  # type: ignore[override]
        if self._fast(ops.ALL_GATHER_SINGLE, output, input, opts):
            return None
        return self._issue(Call(ops.ALL_GATHER_SINGLE, [input], [output]), opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        parts = [part for output in outputs for part in _chunks(output, self.size())]
        return self._issue(Call(ops.ALL_GATHER_COALESCED, list(inputs), parts), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        gathered = list(outputs[0]) if outputs else []
        return self._issue(Call(ops.GATHER, list(inputs), gathered, peer=opts.rootRank), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        scattered = list(inputs[0]) if inputs else []
        return self._issue(Call(ops.SCATTER, scattered, list(outputs), peer=opts.rootRank), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        reduce, factor = self._reduction(opts)
        return self._issue(Call(ops.REDUCE_SCATTER, list(inputs[0]), list(outputs), reduce, factor), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work | None:  # type: ignore[override]
        reduce, factor = self._reduction(opts)
        if self._fast(ops.REDUCE_SCATTER_SINGLE, output, input, opts, reduce=reduce):
            return None
        return self._issue(Call(ops.REDUCE_SCATTER_SINGLE, [input], [output], reduce, factor), opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        reduce, factor = self._reduction(opts)
        return self._issue(Call(ops.REDUCE_SCATTER_COALESCED, list(inputs), list(outputs), reduce, factor), opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:  # type: ignore[override]
        return self._issue(Call(ops.ALL_TO_ALL, list(inputs), list(outputs)), opts)

    def all_to_all_single(  # type: ignore[override]
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work | None:
        splits = (list(input_splits) or None, list(output_splits) or None)
        if splits == (None, None) and self._fast(ops.ALL_TO_ALL_SINGLE, output, input, opts):
            return None
        call = Call(ops.ALL_TO_ALL_SINGLE, [input], [output], input_splits=splits[0], output_splits=splits[1])
        return self._issue(call, opts)

    def barrier(self, opts: Any = None) -> Work | None:  # type: ignore[override]
        device = getattr(opts, "device", None)
        named = device is not None and device.type == "cuda" and device.index is not None
        return self._issue(Call(ops.BARRIER, device=device if named else None), opts)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Work | None:  # type: ignore[override]
        return self._issue(Call(ops.SEND, list(tensors), (), peer=peer, tag=tag), None)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Work | None:  # type: ignore[override]
        return self._issue(Call(ops.RECV, (), list(tensors), peer=peer, tag=tag), None)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work | None:  # type: ignore[override]
        return self._issue(Call(ops.RECV, (), list(tensors), peer=ANY_SOURCE, tag=tag), None)

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        backend = self.communicator.devices.coalescing(device)
        if backend is not None and device is not None:
            backend.start_coalescing(device)
        self._collecting = []

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        works, self._collecting = self._collecting or [], None
        backend = self.communicator.devices.coalescing(device)
        if backend is not None and device is not None:
            return Work(backend.end_coalescing(device), (), _unchanged)
        return Work(Together([WorkHandle(work) for work in works]) if works else DONE, (), _unchanged)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Bridge | None:
        """`ranks` are this group's. Every rank of the group calls this."""
        limit = timedelta(seconds=self.communicator.info.timeout) if timeout is None else timeout
        nccl, name = self._torchs.get("cuda"), group_name or f"{self.communicator.name}:split"
        if nccl is None:
            raise UsageError("split_group needs a group with nccl; use new_group")
        return self._split(nccl, list(ranks), name, timeout=limit, options=opts, description=group_desc or "")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.communicator.monitored_barrier(timeout, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """torch calls this from 2.15 on. Before, it calls the method of the backends."""
        if "cpu" in self._torchs:
            self._torchs["cpu"]._set_default_timeout(timeout)
        self.communicator.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        self.communicator.close()

    def abort(self) -> None:
        self.communicator.close(wait=False)

    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


_METHODS = {
    "allreduce": ops.ALL_REDUCE,
    "broadcast": ops.BROADCAST,
    "all_gather_single": ops.ALL_GATHER_SINGLE,
    "_allgather_base": ops.ALL_GATHER_SINGLE,
    "reduce_scatter_single": ops.REDUCE_SCATTER_SINGLE,
    "_reduce_scatter_base": ops.REDUCE_SCATTER_SINGLE,
    "all_to_all_single": ops.ALL_TO_ALL_SINGLE,
    "alltoall_base": ops.ALL_TO_ALL_SINGLE,
    "send": ops.SEND,
    "recv": ops.RECV,
}
"""Those that a fast path may take, by name."""


def _unchanged(error: BaseException | None) -> BaseException | None:
    """For a Work that reports its calls' errors itself."""
    return error


def _chunks(output: Tensor, size: int) -> list[Tensor]:
    """One gathered tensor as a view for each rank."""
    flat = output.view(-1)
    width = flat.numel() // size
    return [flat[i * width : (i + 1) * width] for i in range(size)]
