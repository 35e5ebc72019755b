"""Sums of sparse tensors through dense collectives: every rank gathers all ranks' entries and adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ringway.call import Reduce
from ringway.errors import UsageError, mismatch_error
from ringway.work import DONE, Work


class Gatherer(Protocol):
    """The part of a communicator that a sparse sum needs."""

    name: str
    size: int
    ranks: list[int]

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor, *, log_name: str | None) -> Any: ...


def all_reduce_sparse(communicator: Gatherer, tensor: Tensor, reduce: Reduce, async_op: bool) -> Work | None:
    """Sums sparse COO tensors in place.

    An asynchronous call is also done when it returns, because each step needs the result of the one before.
    """
    if reduce is not Reduce.SUM:
        raise UsageError(f"a sparse all_reduce can only sum, not {reduce.name}; convert with .to_dense()")
    own = tensor.detach().coalesce()
    total = sum_entries(communicator, own.indices(), own.values(), own.shape)
    with torch.no_grad():
        tensor.copy_(total)
    return Work(DONE, [tensor], lambda error: error) if async_op else None


def sum_entries(communicator: Gatherer, indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """The sum over the ranks of the sparse tensors with these entries, coalesced.

    Ranks have different numbers of entries, so they exchange the numbers first, then the entries,
    padded to the longest.
    """
    counts = _counts(communicator, indices, shape)
    all_indices = _gathered(communicator, indices.t(), max(counts))
    all_values = _gathered(communicator, values, max(counts))
    joined_indices = torch.cat([part[:n] for part, n in zip(all_indices, counts, strict=True)])
    joined_values = torch.cat([part[:n] for part, n in zip(all_values, counts, strict=True)])
    return torch.sparse_coo_tensor(joined_indices.t(), joined_values, tuple(shape)).coalesce()


def _counts(communicator: Gatherer, indices: Tensor, shape: Sequence[int]) -> list[int]:
    """The number of entries of each rank. Raises if the ranks' tensors have different shapes."""
    sparse_dim, count = indices.shape
    header = torch.tensor([count, sparse_dim, *shape], device="cpu")
    headers = header.new_empty(communicator.size, header.numel())
    communicator.all_gather_into_tensor(headers, header, log_name="sparse shapes")
    rows = headers.tolist()
    if any(row[1:] != rows[0][1:] for row in rows):
        sides = {
            rank: f"shape {row[2:]}, {row[1]} sparse dimensions"
            for rank, row in zip(communicator.ranks, rows, strict=True)
        }
        raise mismatch_error(communicator.name, sides, what="sum sparse tensors of different shapes", ended=False)
    return [row[0] for row in rows]


def _gathered(communicator: Gatherer, rows: Tensor, longest: int) -> Tensor:
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(communicator.size, *padded.shape)
    if longest:
        communicator.all_gather_into_tensor(gathered, padded, log_name="sparse entries")
    return gathered
