"""deepspeed.comm's collectives: its parameters, ringway's functions.

`profiled` adds the last three: `prof=True` logs one call, `log_name` is its label, and `debug` is accepted as in
deepspeed (the logger's own `debug` setting adds the callers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed._symmetric_memory import enable_symm_mem_for_group as _enable_symm_mem

from ringway.api import collectives as api
from ringway.api import groups
from ringway.api import objects as api_objects
from ringway.compat.deepspeed.logging import profiled
from ringway.compat.deepspeed.reduce_op import ReduceOp, torch_op
from ringway.errors import UsageError


@profiled
def broadcast(tensor: Tensor, src: int, group: Any = None, async_op: bool = False, *, label: str | None) -> Any:
    return api.broadcast(tensor, src, group, async_op, log_name=label)


@profiled
def broadcast_object_list(object_list: list[Any], src: int, group: Any = None, device: Any = None) -> None:
    api_objects.broadcast_object_list(object_list, src, group, device)


@profiled
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False, *, label: str | None
) -> Any:
    return api.all_gather(tensor_list, tensor, group, async_op, log_name=label)


@profiled
def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    api_objects.all_gather_object(object_list, obj, group)


@profiled
def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    label: str | None,
) -> Any:
    return api.reduce_scatter_tensor(output_tensor, tensor, torch_op(op), group, async_op, log_name=label)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof=prof, debug=debug)


@profiled
def all_gather_into_tensor(
    output_tensor: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False, *, label: str | None
) -> Any:
    return api.all_gather_into_tensor(output_tensor, tensor, group, async_op, log_name=label)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, debug: Any = None
) -> Any:
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op, debug=debug)


@profiled
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    label: str | None,
) -> Any:
    return api.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op, log_name=label)


@profiled
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
    *,
    label: str | None,
) -> Any:
    return api.all_to_all(output_tensor_list, input_tensor_list, group, async_op, log_name=label)


@profiled
def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, *, label: str | None) -> None:
    api.send(tensor, dst, group, tag, log_name=label)


@profiled
def recv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, *, label: str | None) -> int:
    return api.recv(tensor, src, group, tag, log_name=label)


@profiled
def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, *, label: str | None) -> Any:
    return api.isend(tensor, dst, group, tag, log_name=label)


@profiled
def irecv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, *, label: str | None) -> Any:
    return api.irecv(tensor, src, group, tag, log_name=label)


class P2POp:
    """One message of `batch_isend_irecv`. `op` is this module's isend or irecv, `peer` a global rank."""

    def __init__(self, op: Any, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> None:
        if op not in (isend, irecv):
            raise UsageError("P2POp takes ringway.compat.deepspeed.isend or irecv")
        self.op = "isend" if op is isend else "irecv"
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag


@profiled
def batch_isend_irecv(p2p_op_list: list[P2POp]) -> Any:
    starts = {"isend": api.isend, "irecv": api.irecv}
    return api.batch_isend_irecv(
        [api.P2POp(starts[entry.op], entry.tensor, entry.peer, entry.group, entry.tag) for entry in p2p_op_list]
    )


@profiled
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    *,
    label: str | None,
) -> Any:
    return api.gather(tensor, gather_list, dst, group, async_op, log_name=label)


@profiled
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    *,
    label: str | None,
) -> Any:
    return api.scatter(tensor, scatter_list, src, group, async_op, log_name=label)


@profiled
def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, *, label: str | None) -> Any:
    return api.barrier(group, async_op, device_ids, log_name=label)


@profiled
def monitored_barrier(
    group: Any = None, timeout: Any = None, wait_all_ranks: bool = False, *, label: str | None
) -> None:
    api.monitored_barrier(group, timeout, wait_all_ranks, log_name=label)


@profiled
def reduce(
    tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, *, label: str | None
) -> Any:
    return api.reduce(tensor, dst, torch_op(op), group, async_op, log_name=label)


@profiled
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    label: str | None,
) -> Any:
    return api.reduce_scatter(output, input_list, torch_op(op), group, async_op, log_name=label)


@profiled
def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, *, label: str | None
) -> Any:
    return api.all_reduce(tensor, torch_op(op), group, async_op, log_name=label)


@profiled
def inference_all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Tensor:
    """Reduce in place with the lowest latency, and return the tensor. Never asynchronous."""
    api.inference_all_reduce(tensor, torch_op(op), group)
    return tensor


@profiled
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, *, label: str | None
) -> Any:
    return api.all_reduce_coalesced(tensors, torch_op(op), group, async_op, log_name=label)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """deepspeed's form: output i receives every rank's input i, concatenated, as in all_gather_into_tensor."""
    if len(output_tensors) != len(input_tensors):
        raise UsageError(
            f"all_gather_coalesced: {len(output_tensors)} outputs for {len(input_tensors)} inputs; each input needs one"
        )
    for place, output in enumerate(output_tensors):
        if not output.is_contiguous():
            raise UsageError(f"all_gather_coalesced: output {place} is not contiguous")
    member = api.communicator(group)
    pieces = [output.view(-1).tensor_split(member.size) for output in output_tensors]
    by_rank = [[piece[rank] for piece in pieces] for rank in range(member.size)]
    inputs = [tensor.reshape(-1) for tensor in input_tensors]
    return member.all_gather_coalesced(by_rank, inputs, async_op)


def enable_symm_mem_for_group(group_name: Any) -> None:
    """Enable torch's symmetric memory for one of torch's own (nccl) groups."""
    _require_initialized()
    _enable_symm_mem(group_name)


def _require_initialized() -> None:
    if not groups.is_initialized():
        raise UsageError("deepspeed's backend is not initialized: call init_distributed() first")


def has_all_gather_into_tensor() -> bool:
    _require_initialized()
    return api.has_all_gather_into_tensor()


def has_reduce_scatter_tensor() -> bool:
    _require_initialized()
    return api.has_reduce_scatter_tensor()


def has_all_reduce_coalesced() -> bool:
    _require_initialized()
    return api.has_all_reduce_coalesced()


def has_coalescing_manager() -> bool:
    _require_initialized()
    return api.has_coalescing_manager()
