"""Rejects invalid calls before anything is sent. Each error names the wrong values and the right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from ringway import call as ops
from ringway.call import ANY_SOURCE, Call, Op, reduces
from ringway.errors import UsageError

T = TypeVar("T")

_PLAIN = frozenset({Tensor, Parameter})
_OVERLAPS = 1  # torch's code for "yes"; it also has one for "too hard to determine"


def admit(call: Call) -> str | None:
    """Prepares the call's tensors, and returns the device type that all of them are on; None for a call without
    tensors. Tensors that require a gradient are detached, because a collective writes data and is not part of the
    graph. The result of a functional collective is awaited and replaced by the tensor it holds."""
    device: torch.device | None = None
    strange = False
    for tensor in (*call.inputs, *call.outputs):
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{call.op.name} takes tensors, not {type(tensor).__name__}")
        strange = strange or tensor.requires_grad or type(tensor) not in _PLAIN
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise UsageError(
                f"{call.op.name} got tensors on {device} and on {tensor.device}; they must share one device"
            )
    if strange:
        # By identity, because an input that is its own output must stay one tensor.
        admitted = {id(t): _with_memory(call, t).detach() for t in (*call.inputs, *call.outputs)}
        call.inputs = [admitted[id(tensor)] for tensor in call.inputs]
        call.outputs = [admitted[id(tensor)] for tensor in call.outputs]
    return None if device is None else device.type


def _with_memory(call: Call, tensor: Tensor) -> Tensor:
    """Rejects tensor subclasses without memory, such as wrappers: a backend that read their memory would crash."""
    if type(tensor) in _PLAIN or tensor.device.type == "meta":
        return tensor
    # Imported here to keep `import ringway` fast; a program that has such a tensor has already imported it.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        held: Tensor = tensor.trigger_wait()
        return _with_memory(call, held)
    kind = type(tensor).__name__
    if isinstance(tensor, FakeTensor):
        raise UsageError(f"{call.op.name} got a {kind}, which has a shape but no data")
    if not torch._C._has_storage(tensor) or (tensor.numel() and tensor.data_ptr() == 0):
        raise UsageError(
            f"{call.op.name} got a {kind}, which has no memory of its own; pass the tensors it holds, "
            "such as to_local() of a DTensor"
        )
    return tensor


def listed(op: Op, name: str, tensors: Iterable[T]) -> list[T]:
    """A copy of the list: the caller may change the original while the call is in flight."""
    try:
        return list(tensors)
    except TypeError:
        raise UsageError(f"{op.name}: {name} is a list, not {type(tensors).__name__}") from None


def check(call: Call, rank: int) -> None:
    """Raises a UsageError if the call is invalid on this rank of its group."""
    if "root" in call.op.agree or not call.op.collective:
        _check_peer(call, rank)
    _check_tensors(call)
    if "reduce" in call.op.agree and call.inputs:
        for dtype in {t.dtype for t in call.inputs}:
            if not reduces(dtype, call.reduce):
                raise UsageError(f"{call.op.name}: ReduceOp.{call.reduce.name} has no meaning for {dtype}")
    rule = _RULES.get(call.op.name)
    if rule is not None:
        rule(call, rank)


def _check_peer(call: Call, rank: int) -> None:
    """Calls that come from torch's own functions carry whatever rank their caller wrote."""
    if call.op is ops.RECV and call.peer == ANY_SOURCE:
        return
    what = "the root" if call.op.collective else "the destination" if call.op is ops.SEND else "the source"
    if not 0 <= call.peer < call.size:
        raise UsageError(
            f"{call.op.name}: {what} is rank {call.peer} of the group {call.group}, "
            f"whose ranks are 0 to {call.size - 1}"
        )
    if call.peer == rank and not call.op.collective:
        raise UsageError(f"{call.op.name}: {what} is this rank itself")


def _check_tensors(call: Call) -> None:
    several = (
        call.op is ops.ALL_REDUCE_COALESCED
        or call.op is ops.ALL_GATHER_COALESCED
        or call.op is ops.REDUCE_SCATTER_COALESCED
    )
    expected = call.dtype
    for tensor in (*call.inputs, *call.outputs):
        if tensor.layout is not torch.strided:
            raise UsageError(f"{call.op.name} takes dense tensors, not {tensor.layout}; convert with .to_dense()")
        if tensor.is_nested:
            raise UsageError(f"{call.op.name} takes dense tensors, not nested ones; pass the tensors of .unbind()")
        if not several and tensor.dtype is not expected:
            raise UsageError(f"{call.op.name} got tensors of {expected} and {tensor.dtype}; they must share one dtype")
    for output in call.outputs:
        if not output.is_contiguous() and torch._debug_has_internal_overlap(output) == _OVERLAPS:
            raise UsageError(
                f"{call.op.name}: an output of shape {tuple(output.shape)} and strides {output.stride()} has elements "
                "that share memory (it was expanded?); pass output.contiguous()"
            )


def _count(call: Call, what: str, tensors: Sequence[Tensor], expected: int) -> None:
    if len(tensors) != expected:
        raise UsageError(
            f"{call.op.name}: {what} has {len(tensors)} tensors, and the group has {expected} ranks: one each is needed"
        )


def _numel(call: Call, what: str, tensor: Tensor, expected: int, why: str) -> None:
    if tensor.numel() != expected:
        raise UsageError(f"{call.op.name}: {what} has {tensor.numel()} elements, and {expected} are needed ({why})")


def _all_gather(call: Call, rank: int) -> None:
    _count(call, "the output list", call.outputs, call.size)
    _numel(call, f"output {rank}", call.outputs[rank], call.inputs[0].numel(), "it receives this rank's own input")


def _all_gather_single(call: Call, rank: int) -> None:
    expected = call.inputs[0].numel() * call.size
    _numel(call, "the output", call.outputs[0], expected, f"{call.size} ranks × {call.inputs[0].numel()}")


def _reduce_scatter(call: Call, rank: int) -> None:
    _count(call, "the input list", call.inputs, call.size)
    _numel(call, "the output", call.outputs[0], call.inputs[rank].numel(), f"it receives share {rank}")


def _reduce_scatter_single(call: Call, rank: int) -> None:
    expected = call.outputs[0].numel() * call.size
    _numel(call, "the input", call.inputs[0], expected, f"{call.size} ranks × {call.outputs[0].numel()}")


def _gather(call: Call, rank: int) -> None:
    expected = call.inputs[0].numel()
    _list_of_root(call, rank, "destination", "gather_list", call.outputs, expected, "every rank sends as much")


def _scatter(call: Call, rank: int) -> None:
    expected = call.outputs[0].numel()
    _list_of_root(call, rank, "source", "scatter_list", call.inputs, expected, "every rank receives as much")


def _list_of_root(
    call: Call, rank: int, root: str, name: str, tensors: Sequence[Tensor], expected: int, reason: str
) -> None:
    if rank != call.peer:
        if tensors:
            raise UsageError(f"{call.op.name}: only the {root} (rank {call.peer} of the group) passes {name}")
        return
    _count(call, name, tensors, call.size)
    for i, tensor in enumerate(tensors):
        _numel(call, f"{name}[{i}]", tensor, expected, reason)


def _all_to_all(call: Call, rank: int) -> None:
    _count(call, "the input list", call.inputs, call.size)
    _count(call, "the output list", call.outputs, call.size)
    _numel(call, f"output {rank}", call.outputs[rank], call.inputs[rank].numel(), "a rank keeps its own share")


def _all_to_all_single(call: Call, rank: int) -> None:
    sent = _own_share(call, rank, "input", call.inputs[0], call.input_splits)
    kept = _own_share(call, rank, "output", call.outputs[0], call.output_splits)
    if sent != kept:
        raise UsageError(
            f"all_to_all_single: this rank's own share has {sent} elements in the input and {kept} in the output; "
            "a rank keeps its own share"
        )


def _own_share(call: Call, rank: int, what: str, tensor: Tensor, splits: Sequence[int] | None) -> int:
    """How many elements of one side stay on this rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None:
        if rows % call.size:
            raise UsageError(
                f"all_to_all_single: the {what}'s first dimension ({rows}) does not divide by the group's "
                f"{call.size} ranks; pass {what}_split_sizes"
            )
        return tensor.numel() // call.size
    if len(splits) != call.size:
        raise UsageError(f"all_to_all_single: {len(splits)} {what}_split_sizes for {call.size} ranks")
    if any(split < 0 for split in splits) or sum(splits) != rows:
        raise UsageError(
            f"all_to_all_single: {what}_split_sizes {list(splits)} must be non-negative and sum to the "
            f"{what}'s first dimension ({rows})"
        )
    return splits[rank] * (tensor.numel() // rows) if rows else 0


def _all_gather_coalesced(call: Call, rank: int) -> None:
    if len(call.outputs) != len(call.inputs) * call.size:
        raise UsageError(
            f"all_gather_coalesced: {len(call.outputs)} outputs for {len(call.inputs)} inputs on {call.size} ranks"
        )
    for i, tensor in enumerate(call.inputs):
        _numel(call, f"output {i} of rank {rank}", call.outputs[i * call.size + rank], tensor.numel(), "as the input")


def _reduce_scatter_coalesced(call: Call, rank: int) -> None:
    if len(call.outputs) != len(call.inputs):
        raise UsageError(f"reduce_scatter_coalesced: {len(call.outputs)} outputs for {len(call.inputs)} inputs")
    for i, (tensor, output) in enumerate(zip(call.inputs, call.outputs, strict=True)):
        _numel(call, f"input {i}", tensor, output.numel() * call.size, f"{call.size} ranks × {output.numel()}")


_RULES: dict[str, Callable[[Call, int], None]] = {
    ops.ALL_GATHER.name: _all_gather,
    ops.ALL_GATHER_SINGLE.name: _all_gather_single,
    ops.REDUCE_SCATTER.name: _reduce_scatter,
    ops.REDUCE_SCATTER_SINGLE.name: _reduce_scatter_single,
    ops.GATHER.name: _gather,
    ops.SCATTER.name: _scatter,
    ops.ALL_TO_ALL.name: _all_to_all,
    ops.ALL_TO_ALL_SINGLE.name: _all_to_all_single,
    ops.ALL_GATHER_COALESCED.name: _all_gather_coalesced,
    ops.REDUCE_SCATTER_COALESCED.name: _reduce_scatter_coalesced,
}
