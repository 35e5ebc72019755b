"""DeepSpeed 0.19's 1-bit all-reduce among n ranks in one process: its formulas, in the order it applies them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def plus_or_minus_one(values: Tensor) -> Tensor:
    """-1 below zero, otherwise 1."""
    return values.sign().add_(1).bool().float().add_(-0.5).mul_(2.0)


def compress(values: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The signs (as -1 and 1) and the scale of values plus error; the error is updated."""
    values.add_(error)
    scale = torch.linalg.norm(values) / np.sqrt(values.numel())
    error.copy_(values - scale * plus_or_minus_one(values))
    return plus_or_minus_one(values), scale


def step(buffers: list[Tensor], workers: list[Tensor], servers: list[Tensor]) -> Tensor:
    """The average that every rank gets; `workers` and `servers` are each rank's errors, and are updated."""
    size = len(buffers)
    signs, scales = zip(
        *(compress(buffer.clone(), error) for buffer, error in zip(buffers, workers, strict=True)), strict=True
    )
    averaged = []
    for rank, server in enumerate(servers):
        shard = slice(rank * server.numel(), (rank + 1) * server.numel())
        received = torch.stack([sign[shard] for sign in signs])
        average = received.mul_(torch.stack(list(scales)).view(-1, 1).mul_(1 / size)).sum(0)
        sign, scale = compress(average, server)
        averaged.append(sign.mul_(scale))
    return torch.cat(averaged)
