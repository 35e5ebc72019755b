"""A sparse all_reduce out of dense collectives: everybody learns everybody's entries, and adds them up."""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.call import Reduce
from ringway.communicator import Communicator
from ringway.errors import CollectiveMismatch, UsageError


def all_reduce_sparse(communicator: Communicator, tensor: Tensor, reduce: Reduce) -> None:
    """Sums sparse COO tensors in place. Ranks may have different numbers of entries."""
    if reduce is not Reduce.SUM:
        raise UsageError(f"a sparse all_reduce can only sum, not {reduce.name}; convert with .to_dense()")
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    counts = _entries(communicator, own)
    most = max(counts)
    all_indices = _gathered(communicator, indices.t(), most)
    all_values = _gathered(communicator, values, most)
    total = torch.sparse_coo_tensor(
        torch.cat([part[:count] for part, count in zip(all_indices, counts, strict=True)]).t(),
        torch.cat([part[:count] for part, count in zip(all_values, counts, strict=True)]),
        own.shape,
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _entries(communicator: Communicator, own: Tensor) -> list[int]:
    """How many entries each rank has. Raises where their tensors do not have one shape."""
    header = torch.tensor([own._nnz(), own.sparse_dim(), *own.shape])
    headers = torch.empty(communicator.size * header.numel(), dtype=header.dtype)
    communicator.all_gather_into_tensor(headers, header)
    rows = headers.view(communicator.size, -1).tolist()
    if any(row[1:] != rows[0][1:] for row in rows):
        sides = {rank: f"shape {row[2:]}, {row[1]} sparse dimensions" for rank, row in enumerate(rows)}
        lines = "".join(f"\n  rank {communicator.ranks[rank]}: {side}" for rank, side in sides.items())
        raise CollectiveMismatch(f"ranks called a sparse all_reduce with different tensors{lines}", sides=sides)
    return [row[0] for row in rows]


def _gathered(communicator: Communicator, own: Tensor, most: int) -> Tensor:
    """Every rank's rows, each filled up to `most`."""
    filled = own.new_zeros((most, *own.shape[1:]))
    filled[: own.shape[0]] = own
    gathered = own.new_empty((communicator.size * most, *own.shape[1:]))
    communicator.all_gather_into_tensor(gathered, filled)
    return gathered.view(communicator.size, most, *own.shape[1:])
