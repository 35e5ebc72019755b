"""The average of sparse gradients: everybody's rows are gathered, and equal rows are summed."""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.communicator import Communicator


def average(communicator: Communicator, gradient: Tensor | None, parameter: Tensor, rows_dim: int = 1) -> Tensor:
    """The mean over the ranks of a sparse gradient; None counts as one without rows.

    Ranks have different numbers of rows, so the numbers travel first and the rows are padded to the longest.
    """
    if gradient is None:
        indices = torch.empty(rows_dim, 0, dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, *parameter.shape[rows_dim:], dtype=parameter.dtype, device=parameter.device)
    else:
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values() * (1.0 / communicator.size)
    counts = torch.empty(communicator.size, dtype=torch.int64)
    communicator.all_gather_into_tensor(counts, torch.tensor([indices.shape[1]]), log_name="sparse rows")
    longest = int(counts.max())
    all_indices = _gathered(communicator, indices.t().contiguous(), longest)
    all_values = _gathered(communicator, values, longest)
    lengths = counts.tolist()
    joined_indices = torch.cat([part[:n] for part, n in zip(all_indices, lengths, strict=True)])
    joined_values = torch.cat([part[:n] for part, n in zip(all_values, lengths, strict=True)])
    return torch.sparse_coo_tensor(joined_indices.t(), joined_values, parameter.shape).coalesce()


def _gathered(communicator: Communicator, rows: Tensor, longest: int) -> Tensor:
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(communicator.size, *padded.shape)
    if longest:
        communicator.all_gather_into_tensor(gathered, padded, log_name="sparse gradients")
    return gathered
