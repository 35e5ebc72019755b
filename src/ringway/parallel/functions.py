"""Collectives for autograd: each function's backward is the collective that its gradient needs.

Tensors are of three kinds, and each function turns one kind into another:

    replicated   the same on every rank of the group
    partial      every rank has a summand; the tensor is their sum
    split        every rank has a part along one dimension

    function                        forward                      backward
    copy_to_group                   replicated -> replicated     gradients are partial: all_reduce
    reduce_from_group               partial    -> replicated     copy
    scatter_to_group                replicated -> split          all_gather
    gather_from_group               split      -> replicated     own part; of the sum, with sum_gradients
    reduce_scatter_to_group         partial    -> split          all_gather
    all_to_all_in_group             split      -> split          all_to_all back

Backward functions are written with the same functions, so they can be differentiated again. Inside a compiled graph,
the collectives are torch's functional ones, which the compiler knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.autograd import Function

from ringway.call import ReduceOp
from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.parallel.agreement import member

Group = c10d.ProcessGroup | None
Sizes = Sequence[int] | None

_compiling = torch.compiler.is_dynamo_compiling


def require_all(held: Tensor, otherwise: str) -> None:
    """Raise unless the condition is true everywhere. On a GPU, the device asserts it asynchronously. A compiled graph
    cannot raise errors of ringway's, and asserts it too."""
    if held.is_cuda or _compiling():
        torch._assert_async(held.all(), otherwise)
    elif not held.all():
        raise UsageError(otherwise)


def even_shares(length: int, size: int) -> list[int]:
    """Split a length over the ranks. If it does not divide evenly, the first ranks get one more."""
    return [length // size + (rank < length % size) for rank in range(size)]


def copy_to_group(tensor: Tensor, group: Group = None) -> Tensor:
    """Pass a replicated tensor into split work: it is unchanged, and its gradient is the sum over all ranks."""
    return copy(tensor, member(group, "copy_to_group"))


def reduce_from_group(tensor: Tensor, group: Group = None) -> Tensor:
    """The sum over the ranks. Its gradient goes to each rank unchanged."""
    return reduce(tensor, member(group, "reduce_from_group"))


def scatter_to_group(tensor: Tensor, dim: int = -1, group: Group = None, sizes: Sizes = None) -> Tensor:
    """This rank's part of a replicated tensor along `dim`. `sizes` are all ranks' lengths if they differ."""
    return scatter(tensor, dim, member(group, "scatter_to_group"), sizes)


def gather_from_group(
    tensor: Tensor, dim: int = -1, group: Group = None, sizes: Sizes = None, *, sum_gradients: bool = False
) -> Tensor:
    """Join all ranks' parts along `dim`.

    If the computation that follows is the same on every rank, each rank keeps its part of the gradient. If it is split
    work, whose gradients are partial, `sum_gradients` sums them first.
    """
    return gather(tensor, dim, member(group, "gather_from_group"), sizes, sum_gradients)


def reduce_scatter_to_group(tensor: Tensor, dim: int = -1, group: Group = None, sizes: Sizes = None) -> Tensor:
    """This rank's part, along `dim`, of the sum over the ranks."""
    return reduce_scatter(tensor, dim, member(group, "reduce_scatter_to_group"), sizes)


def all_to_all_in_group(tensor: Tensor, split_dim: int, concat_dim: int, group: Group = None) -> Tensor:
    """Turn a tensor split along `concat_dim` into one split along `split_dim`: for example, from a part of the sequence
    with all heads to the whole sequence with a part of the heads."""
    return exchange(tensor, split_dim, concat_dim, member(group, "all_to_all_in_group"))


# The same on a communicator


def copy(tensor: Tensor, communicator: Communicator) -> Tensor:
    return tensor if communicator.size == 1 else _Copy.apply(tensor, communicator)


def reduce(tensor: Tensor, communicator: Communicator) -> Tensor:
    return tensor if communicator.size == 1 else _Reduce.apply(tensor, communicator)


def scatter(tensor: Tensor, dim: int, communicator: Communicator, sizes: Sizes = None) -> Tensor:
    if communicator.size == 1:
        return tensor
    dim, sizes = _split_of(tensor, dim, sizes, communicator.size, "scatter_to_group")
    return _Scatter.apply(tensor, dim, communicator, sizes)


def gather(
    tensor: Tensor, dim: int, communicator: Communicator, sizes: Sizes = None, sum_gradients: bool = False
) -> Tensor:
    if communicator.size == 1:
        return tensor
    dim = _dimension(tensor, dim, "gather_from_group")
    lengths = list(sizes) if sizes is not None else [tensor.shape[dim]] * communicator.size
    if len(lengths) != communicator.size or lengths[communicator.rank] != tensor.shape[dim]:
        raise UsageError(
            f"gather_from_group: sizes {lengths} do not fit rank {communicator.rank} of {communicator.size}, whose "
            f"part has length {tensor.shape[dim]} in dimension {dim}"
        )
    return _Gather.apply(tensor, dim, communicator, lengths, sum_gradients)


def reduce_scatter(tensor: Tensor, dim: int, communicator: Communicator, sizes: Sizes = None) -> Tensor:
    if communicator.size == 1:
        return tensor
    dim, sizes = _split_of(tensor, dim, sizes, communicator.size, "reduce_scatter_to_group")
    return _ReduceScatter.apply(tensor, dim, communicator, sizes)


def exchange(tensor: Tensor, split_dim: int, concat_dim: int, communicator: Communicator) -> Tensor:
    if communicator.size == 1:
        return tensor
    split_dim, _ = _split_of(tensor, split_dim, None, communicator.size, "all_to_all_in_group")
    concat_dim = _dimension(tensor, concat_dim, "all_to_all_in_group")
    return _AllToAll.apply(tensor, split_dim, concat_dim, communicator)


def _dimension(tensor: Tensor, dim: int, what: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise UsageError(f"{what}: dimension {dim} is out of range for a tensor with {tensor.dim()} dimensions")
    return dim % tensor.dim()


def _split_of(tensor: Tensor, dim: int, sizes: Sizes, ranks: int, what: str) -> tuple[int, list[int]]:
    dim = _dimension(tensor, dim, what)
    length = tensor.shape[dim]
    if sizes is None:
        if length % ranks:
            raise UsageError(
                f"{what}: dimension {dim} has length {length}, which does not divide by the group's {ranks} ranks; "
                "pass sizes, one per rank"
            )
        return dim, [length // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != length:
        raise UsageError(f"{what}: sizes {list(sizes)} must be {ranks} lengths that add up to {length}")
    return dim, list(sizes)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce(gradient, ctx.communicator), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return all_reduced(tensor, communicator, "reduce_from_group")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return copy(gradient, ctx.communicator), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, communicator: Communicator, sizes: list[int]) -> Tensor:
        ctx.dim, ctx.communicator, ctx.sizes = dim, communicator, sizes
        return tensor.split(sizes, dim)[communicator.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather(gradient, ctx.dim, ctx.communicator, ctx.sizes), None, None, None


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, communicator: Communicator, sizes: list[int], sum_gradients: bool
    ) -> Tensor:
        ctx.dim, ctx.communicator, ctx.sizes, ctx.sum_gradients = dim, communicator, sizes, sum_gradients
        return gathered(tensor, dim, communicator, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part = reduce_scatter if ctx.sum_gradients else scatter
        return part(gradient, ctx.dim, ctx.communicator, ctx.sizes), None, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, communicator: Communicator, sizes: list[int]) -> Tensor:
        ctx.dim, ctx.communicator, ctx.sizes = dim, communicator, sizes
        longest = max(sizes)
        parts = torch.stack([_padded(part, dim, longest) for part in tensor.split(sizes, dim)])
        own = _reduce_scattered(parts, communicator)
        return own.narrow(dim, 0, sizes[communicator.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather(gradient, ctx.dim, ctx.communicator, ctx.sizes, True), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split_dim: int, concat_dim: int, communicator: Communicator) -> Tensor:
        ctx.split_dim, ctx.concat_dim, ctx.communicator = split_dim, concat_dim, communicator
        parts = torch.stack(tensor.chunk(communicator.size, split_dim))
        return torch.cat(_exchanged(parts, communicator).unbind(0), concat_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchange(gradient, ctx.concat_dim, ctx.split_dim, ctx.communicator), None, None, None


def gathered(tensor: Tensor, dim: int, communicator: Communicator, sizes: Sequence[int]) -> Tensor:
    """All ranks' parts joined along `dim`; shorter parts are padded for the transfer."""
    parts = _all_gathered(_padded(tensor.detach(), dim, max(sizes)), communicator)
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, sizes, strict=True)], dim)


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    if tensor.shape[dim] == length:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] = length
    longer = tensor.new_zeros(shape)
    longer.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return longer


# The collectives, as functions that return a new tensor


def all_reduced(tensor: Tensor, communicator: Communicator, label: str, op: str = "sum") -> Tensor:
    """The tensor reduced over all ranks. `op` is one of torch's, in lower case."""
    if _compiling():
        return _arrived(_functional.all_reduce(tensor, op, communicator.name))
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    communicator.all_reduce(total, getattr(ReduceOp, op.upper()), log_name=label)
    return total


def _all_gathered(part: Tensor, communicator: Communicator) -> Tensor:
    """All ranks' parts, which have the same shape, along a new first dimension."""
    if _compiling():
        parts = _arrived(_functional.all_gather_into_tensor(part, communicator.size, communicator.name))
        return parts.view(communicator.size, *part.shape)
    parts = part.new_empty(communicator.size, *part.shape)
    communicator.all_gather_into_tensor(parts, part, log_name="gather_from_group")
    return parts


def _reduce_scattered(parts: Tensor, communicator: Communicator) -> Tensor:
    """This rank's entry, along the first dimension, of the sum over all ranks."""
    if _compiling():
        return _arrived(_functional.reduce_scatter_tensor(parts, "sum", communicator.size, communicator.name)).squeeze(
            0
        )
    own = torch.empty_like(parts[0])
    communicator.reduce_scatter_tensor(own, parts, log_name="reduce_scatter_to_group")
    return own


def _exchanged(parts: Tensor, communicator: Communicator) -> Tensor:
    """Entry i, along the first dimension, from rank i, which gets this rank's entry i."""
    if _compiling():
        one_each = [1] * communicator.size
        return _arrived(_functional.all_to_all_single(parts, one_each, one_each, communicator.name))
    arrived = torch.empty_like(parts)
    communicator.all_to_all_single(arrived, parts, log_name="all_to_all_in_group")
    return arrived


_functional = torch.ops._c10d_functional


def _arrived(tensor: Tensor) -> Tensor:
    waited: Tensor = _functional.wait_tensor(tensor)
    return waited
