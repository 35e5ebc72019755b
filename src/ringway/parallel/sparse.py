"""Averages sparse gradients: all ranks' rows are gathered, and equal rows are summed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ringway.groups.communicator import Communicator
from ringway.groups.sparse import sum_entries


def announced(model: nn.Module) -> set[int]:
    """The ids of the parameters whose modules declare sparse gradients."""
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }


def average(communicator: Communicator, gradient: Tensor | None, parameter: Tensor, rows_dim: int = 1) -> Tensor:
    """The mean of a sparse gradient over the ranks; None counts as a gradient without rows."""
    if gradient is None:
        indices = torch.empty(rows_dim, 0, dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, *parameter.shape[rows_dim:], dtype=parameter.dtype, device=parameter.device)
    else:
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values() * (1.0 / communicator.size)
    return sum_entries(communicator, indices, values, parameter.shape)
