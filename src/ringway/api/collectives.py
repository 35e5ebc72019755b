"""The collectives as functions, with torch.distributed's names and signatures.

A plain synchronous call goes straight to a fast path of its group (`on_group`; `on_world` if a global rank is named,
which other groups count differently). Otherwise each function finds the communicator of its group and forwards to it.
Under `torch.compile`, those that the compiler can trace forward to torch's own function instead; the others (messages,
barriers, coalesced forms) are not part of a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.call import (
    ALL_GATHER,
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_SINGLE,
    SCATTER,
    SEND,
    ReduceOp,
)
from ringway.errors import UsageError
from ringway.groups.bridge import Bridge
from ringway.groups.communicator import Communicator
from ringway.groups.world import NON_MEMBER, world
from ringway.work import Work

_compiling = torch.compiler.is_dynamo_compiling
find = world.communicator
on_world, on_group = world.fast.run, world.fast.run_on

_SUM = ReduceOp.SUM
_ALL_REDUCE, _BARRIER, _SEND, _RECV = ALL_REDUCE.code, BARRIER.code, SEND.code, RECV.code
_NO_TAG = 0

Group = c10d.ProcessGroup | None


def member_of(group: Any, op: str) -> Communicator | None:
    """The group's communicator. For a rank outside the group, warns as torch does and returns None."""
    if type(group) is Bridge:  # the usual case: `find` takes as long as a small message
        return group.communicator
    if group is not None and group == NON_MEMBER:
        warnings.warn(
            f"Running {op} on global rank {c10d.get_rank()} which does not belong to the given group.", stacklevel=3
        )
        return None
    return find(group)


def communicator(group: Group = None) -> Communicator:
    """ringway's object for a group. Its methods are the collectives, without `group`."""
    return find(group)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Give every rank the tensor of rank `src`, or of the group's rank `group_src`."""
    if _compiling():
        return c10d.broadcast(tensor, src, group, async_op, group_src)
    if not async_op and log_name is None:
        if group is None and group_src is None and type(src) is int and on_world(BROADCAST.code, tensor, tensor, src):
            return None
        if src is None and type(group_src) is int and on_group(group, BROADCAST.code, tensor, tensor, group_src):
            return None
    member = member_of(group, "broadcast")
    return None if member is None else member.broadcast(tensor, src, async_op, group_src, log_name=log_name)


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False, *, log_name: str | None = None
) -> Work | None:
    """Reduce the ranks' tensors with `op`, in place: every rank gets the result."""
    if _compiling():
        return c10d.all_reduce(tensor, op, group, async_op)
    if op is _SUM and not async_op and log_name is None and on_group(group, _ALL_REDUCE, tensor, tensor):
        return None
    member = member_of(group, "all_reduce")
    return None if member is None else member.all_reduce(tensor, op, async_op, log_name=log_name)


def inference_all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None) -> None:
    """The all_reduce with the lowest latency: always synchronous."""
    if _compiling():
        c10d.all_reduce(tensor, op, group)
        return
    if op is _SUM and on_group(group, _ALL_REDUCE, tensor, tensor):
        return
    member = member_of(group, "inference_all_reduce")
    if member is not None:
        member.inference_all_reduce(tensor, op)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Reduce the ranks' tensors with `op`. Rank `dst`, or the group's rank `group_dst`, gets the result."""
    if _compiling():
        return c10d.reduce(tensor, dst, op, group, async_op, group_dst)
    plain = group is None and op is _SUM and group_dst is None and not async_op and log_name is None
    if plain and type(dst) is int and on_world(REDUCE.code, tensor, tensor, dst):
        return None
    member = member_of(group, "reduce")
    return None if member is None else member.reduce(tensor, dst, op, async_op, group_dst, log_name=log_name)


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Give every rank all tensors, in rank order. Their sizes may differ between ranks."""
    if _compiling():
        return c10d.all_gather(tensor_list, tensor, group, async_op)
    if not async_op and log_name is None and on_group(group, ALL_GATHER.code, tensor_list, tensor):
        return None
    member = member_of(group, "all_gather")
    return None if member is None else member.all_gather(tensor_list, tensor, async_op, log_name=log_name)


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Give every rank all tensors, concatenated or stacked in one."""
    if _compiling():
        return c10d.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    if not async_op and log_name is None and on_group(group, ALL_GATHER_SINGLE.code, output_tensor, input_tensor):
        return None
    member = member_of(group, "all_gather_into_tensor")
    if member is None:
        return None
    return member.all_gather_into_tensor(output_tensor, input_tensor, async_op, log_name=log_name)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Give one rank all tensors, in rank order."""
    if _compiling():
        return c10d.gather(tensor, gather_list, dst, group, async_op, group_dst)
    plain = group is None and group_dst is None and not async_op and log_name is None
    if plain and (dst is None or type(dst) is int) and on_world(GATHER.code, gather_list, tensor, dst or 0):
        return None
    member = member_of(group, "gather")
    return None if member is None else member.gather(tensor, gather_list, dst, async_op, group_dst, log_name=log_name)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Give each rank one tensor of the source's list."""
    if _compiling():
        return c10d.scatter(tensor, scatter_list, src, group, async_op, group_src)
    plain = group is None and group_src is None and not async_op and log_name is None
    if plain and (src is None or type(src) is int) and on_world(SCATTER.code, tensor, scatter_list, src or 0):
        return None
    member = member_of(group, "scatter")
    return None if member is None else member.scatter(tensor, scatter_list, src, async_op, group_src, log_name=log_name)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Reduce the ranks' lists with `op`. Each rank gets the result of its own place in the list."""
    if _compiling():
        return c10d.reduce_scatter(output, input_list, op, group, async_op)
    plain = op is _SUM and not async_op and log_name is None
    if plain and on_group(group, REDUCE_SCATTER.code, output, input_list):
        return None
    member = member_of(group, "reduce_scatter")
    return None if member is None else member.reduce_scatter(output, input_list, op, async_op, log_name=log_name)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Reduce the ranks' tensors with `op`. Each rank gets its share of the result."""
    if _compiling():
        return c10d.reduce_scatter_tensor(output, input, op, group, async_op)
    plain = op is _SUM and not async_op and log_name is None
    if plain and on_group(group, REDUCE_SCATTER_SINGLE.code, output, input):
        return None
    member = member_of(group, "reduce_scatter_tensor")
    return None if member is None else member.reduce_scatter_tensor(output, input, op, async_op, log_name=log_name)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Send each rank its tensor of `input_tensor_list`, and receive one from each."""
    if _compiling():
        return c10d.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    member = member_of(group, "all_to_all")
    if member is None:
        return None
    return member.all_to_all(output_tensor_list, input_tensor_list, async_op, log_name=log_name)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Send each rank a part of one tensor, and receive one from each. The sizes split the first dimension."""
    if _compiling():
        return c10d.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
    plain = not (output_split_sizes or input_split_sizes or async_op) and log_name is None
    if plain and on_group(group, ALL_TO_ALL_SINGLE.code, output, input):
        return None
    member = member_of(group, "all_to_all_single")
    if member is None:
        return None
    return member.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op, log_name=log_name)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Reduce several tensors in one call, in place."""
    member = member_of(group, "all_reduce_coalesced")
    return None if member is None else member.all_reduce_coalesced(tensors, op, async_op, log_name=log_name)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    log_name: str | None = None,
) -> Work | None:
    """`output_tensor_lists[r][i]` receives rank r's input i, as in torch."""
    member = member_of(group, "all_gather_coalesced")
    if member is None:
        return None
    return member.all_gather_coalesced(output_tensor_lists, input_tensor_list, async_op, log_name=log_name)


def reduce_scatter_coalesced(
    tensors: Sequence[Tensor], group: Group = None, *, log_name: str | None = None
) -> list[Tensor]:
    """Sum each tensor over the ranks; return this rank's flat share of each."""
    member = member_of(group, "reduce_scatter_coalesced")
    return [] if member is None else member.reduce_scatter_coalesced(tensors, log_name=log_name)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    log_name: str | None = None,
) -> None:
    """Send a message, and wait until the tensor may be used again."""
    plain = group is None and group_dst is None and tag is _NO_TAG and log_name is None
    if plain and type(dst) is int and on_world(_SEND, (), tensor, dst):
        return
    member = member_of(group, "send")
    if member is not None:
        member.send(tensor, dst, tag, group_dst, log_name=log_name)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    log_name: str | None = None,
) -> int:
    """Receive a message, from any rank if none is named. Returns the global rank of the sender; -1 on a rank outside
    the group."""
    plain = group is None and group_src is None and tag is _NO_TAG and log_name is None
    if plain and type(src) is int and on_world(_RECV, tensor, (), src):
        return src
    member = member_of(group, "recv")
    return -1 if member is None else member.recv(tensor, src, tag, group_src, log_name=log_name)


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Send a message. The tensor may be used again once the Work is done."""
    if group is None and type(dst) is int and group_dst is None and tag is _NO_TAG and log_name is None:
        done = on_world(_SEND, (), tensor, dst, True)
        if done:
            return None if done is True else done
    member = member_of(group, "isend")
    return None if member is None else member.isend(tensor, dst, tag, group_dst, log_name=log_name)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Receive a message, from any rank if none is named. The tensor has it once the Work is done."""
    plain = group is None and group_src is None and tag is _NO_TAG and log_name is None
    if plain and type(src) is int:
        done = on_world(_RECV, tensor, (), src, True)
        if done:
            return None if done is True else done
    member = member_of(group, "irecv")
    return None if member is None else member.irecv(tensor, src, tag, group_src, log_name=log_name)


_TORCH_MESSAGES = {isend: c10d.isend, irecv: c10d.irecv}


class P2POp(c10d.P2POp):
    """torch's P2POp. `op` may be ringway's isend or irecv, or torch's."""

    def __new__(cls, op: Any, *args: Any, **kwargs: Any) -> P2POp:
        made: P2POp = super().__new__(cls, _TORCH_MESSAGES.get(op, op), *args, **kwargs)
        return made

    def __init__(
        self,
        op: Any,
        tensor: Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        super().__init__(_TORCH_MESSAGES.get(op, op), tensor, peer, group, tag, group_peer)


def batch_isend_irecv(p2p_op_list: list[c10d.P2POp]) -> list[Work]:
    """Start every message of the list. None blocks another."""
    if not p2p_op_list or not all(isinstance(entry, c10d.P2POp) for entry in p2p_op_list):
        raise UsageError("batch_isend_irecv takes a non-empty list of P2POp")
    if any(entry.group is not p2p_op_list[0].group for entry in p2p_op_list):
        raise UsageError("batch_isend_irecv: all messages must be of one group")
    member = member_of(p2p_op_list[0].group, "batch_isend_irecv")
    if member is None:
        return []
    device = p2p_op_list[0].tensor.device
    backend = member.devices.coalescing(device)
    if backend is None:
        return _started(member, p2p_op_list)
    backend.start_coalescing(device)
    try:
        _started(member, p2p_op_list)
    finally:
        together = backend.end_coalescing(device)
    return [Work(together, (), lambda error: error)]


def _started(member: Communicator, entries: list[c10d.P2POp]) -> list[Work]:
    works = []
    for entry in entries:
        start = member.isend if entry.op is c10d.isend else member.irecv
        work = start(entry.tensor, None, entry.tag, entry.group_peer)
        if work is not None:
            works.append(work)
    return works


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    *,
    log_name: str | None = None,
) -> Work | None:
    """Wait until all ranks of the group have called this."""
    if not async_op and timeout is None and log_name is None and on_group(group, _BARRIER, (), ()):
        return None
    member = member_of(group, "barrier")
    return None if member is None else member.barrier(async_op, device_ids, timeout, log_name=log_name)


def monitored_barrier(
    group: Group = None, timeout: Any = None, wait_all_ranks: bool = False, *, log_name: str | None = None
) -> None:
    """A barrier, on any backend, that names the ranks that did not arrive."""
    member = member_of(group, "monitored_barrier")
    if member is not None:
        member.monitored_barrier(timeout, wait_all_ranks, log_name=log_name)


def has_all_gather_into_tensor() -> bool:
    """True. Programs for DeepSpeed ask."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True. Programs for DeepSpeed ask."""
    return True


def has_all_reduce_coalesced() -> bool:
    """True. Programs for DeepSpeed ask."""
    return True


def has_coalescing_manager() -> bool:
    """Whether this torch has `_coalescing_manager`."""
    return hasattr(c10d, "_coalescing_manager")
