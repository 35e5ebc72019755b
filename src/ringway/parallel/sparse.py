"""Averages sparse gradients: all ranks' rows are gathered, and equal rows are summed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ringway.groups.communicator import Communicator
from ringway.groups.sparse import sum_entries
from ringway.parallel.buckets import Transport


def announced(model: nn.Module, dense_too: bool = False) -> dict[int, bool]:
    """The ids of the parameters that travel as rows, and whether their gradients are dense. They belong to embeddings
    with sparse=True, or to any embedding if `dense_too`."""
    return {
        id(module.weight): not module.sparse
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (module.sparse or dense_too)
    }


def average(
    communicator: Communicator,
    gradient: Tensor | None,
    parameter: Tensor,
    rows_dim: int = 1,
    transport: Transport | None = None,
) -> Tensor:
    """The mean of a sparse gradient over the ranks; None counts as a gradient without rows."""
    travels = Transport.of(communicator.size, None, None) if transport is None else transport
    if gradient is None:
        indices = torch.empty(rows_dim, 0, dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, *parameter.shape[rows_dim:], dtype=parameter.dtype, device=parameter.device)
    else:
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values() * travels.before
    total = sum_entries(communicator, indices, values.to(travels.dtype or values.dtype), parameter.shape)
    return total.to(parameter.dtype) if travels.after == 1.0 else total.to(parameter.dtype) * travels.after


def rows(gradient: Tensor | None) -> Tensor | None:
    """A dense gradient as the rows that are not zero."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    used = gradient.flatten(1).ne(0).any(1).nonzero().view(1, -1)
    return torch.sparse_coo_tensor(used, gradient[used[0]], gradient.shape, is_coalesced=True)
