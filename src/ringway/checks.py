"""What makes a call wrong before anything is sent. Each refusal names the values and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringway.call import (
    ALL_GATHER,
    ALL_GATHER_COALESCED,
    ALL_GATHER_SINGLE,
    ALL_REDUCE_COALESCED,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    GATHER,
    REDUCE_SCATTER,
    REDUCE_SCATTER_COALESCED,
    REDUCE_SCATTER_SINGLE,
    SCATTER,
    Call,
    reduces,
)
from ringway.errors import UsageError


def device_of(call: Call) -> str | None:
    """The device type that all tensors of the call are on; None for a call without tensors."""
    device: torch.device | None = None
    for tensor in (*call.inputs, *call.outputs):
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{call.op.name} takes tensors, not {type(tensor).__name__}")
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise UsageError(
                f"{call.op.name} got tensors on {device} and on {tensor.device}; they must share one device"
            )
    return None if device is None else device.type


def check(call: Call, rank: int) -> None:
    """Raises a UsageError where the call cannot be right on this rank of its group."""
    _check_tensors(call)
    if "reduce" in call.op.agree and call.inputs:
        for dtype in {t.dtype for t in call.inputs}:
            if not reduces(dtype, call.reduce):
                raise UsageError(f"{call.op.name}: ReduceOp.{call.reduce.name} has no meaning for {dtype}")
    rule = _RULES.get(call.op.name)
    if rule is not None:
        rule(call, rank)


def _check_tensors(call: Call) -> None:
    several = call.op is ALL_REDUCE_COALESCED or call.op is ALL_GATHER_COALESCED or call.op is REDUCE_SCATTER_COALESCED
    expected = call.dtype
    for tensor in (*call.inputs, *call.outputs):
        if tensor.layout is not torch.strided:
            raise UsageError(f"{call.op.name} takes dense tensors, not {tensor.layout}; convert with .to_dense()")
        if not several and tensor.dtype is not expected:
            raise UsageError(f"{call.op.name} got tensors of {expected} and {tensor.dtype}; they must share one dtype")


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
    if rank != call.peer:
        if call.outputs:
            raise UsageError(f"gather: only the destination (rank {call.peer} of the group) passes gather_list")
        return
    _count(call, "gather_list", call.outputs, call.size)
    for i, tensor in enumerate(call.outputs):
        _numel(call, f"gather_list[{i}]", tensor, call.inputs[0].numel(), "every rank sends as much")


def _scatter(call: Call, rank: int) -> None:
    if rank != call.peer:
        if call.inputs:
            raise UsageError(f"scatter: only the source (rank {call.peer} of the group) passes scatter_list")
        return
    _count(call, "scatter_list", call.inputs, call.size)
    for i, tensor in enumerate(call.inputs):
        _numel(call, f"scatter_list[{i}]", tensor, call.outputs[0].numel(), "every rank receives as much")


def _all_to_all(call: Call, rank: int) -> None:
    _count(call, "the input list", call.inputs, call.size)
    _count(call, "the output list", call.outputs, call.size)
    _numel(call, f"output {rank}", call.outputs[rank], call.inputs[rank].numel(), "a rank keeps its own share")


def _all_to_all_single(call: Call, rank: int) -> None:
    for what, tensor, splits in (
        ("input", call.inputs[0], call.input_splits),
        ("output", call.outputs[0], call.output_splits),
    ):
        rows = tensor.shape[0] if tensor.dim() else 1
        if splits is None:
            if rows % call.size:
                raise UsageError(
                    f"all_to_all_single: the {what}'s first dimension ({rows}) does not divide by the group's "
                    f"{call.size} ranks; pass {what}_split_sizes"
                )
            continue
        if len(splits) != call.size:
            raise UsageError(f"all_to_all_single: {len(splits)} {what}_split_sizes for {call.size} ranks")
        if any(split < 0 for split in splits) or sum(splits) != rows:
            raise UsageError(
                f"all_to_all_single: {what}_split_sizes {list(splits)} must be non-negative and sum to the "
                f"{what}'s first dimension ({rows})"
            )


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
    ALL_GATHER.name: _all_gather,
    ALL_GATHER_SINGLE.name: _all_gather_single,
    REDUCE_SCATTER.name: _reduce_scatter,
    REDUCE_SCATTER_SINGLE.name: _reduce_scatter_single,
    GATHER.name: _gather,
    SCATTER.name: _scatter,
    ALL_TO_ALL.name: _all_to_all,
    ALL_TO_ALL_SINGLE.name: _all_to_all_single,
    ALL_GATHER_COALESCED.name: _all_gather_coalesced,
    REDUCE_SCATTER_COALESCED.name: _reduce_scatter_coalesced,
}
