"""A model for tests of elastic jobs, and what a world with given ranks makes of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SECONDS = 100.0
"""Until a job counts as hung: much longer than it takes."""


class Sum(nn.Module):
    """Its gradients are the inputs. It counts its forward passes, which a repeated step must not count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.two = nn.Parameter(torch.ones(40_000, dtype=torch.float64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        self.passes += 1
        return (self.one * values).sum() + (self.two * values[0]).sum()


def values_of(step: int, rank: int) -> Tensor:
    return torch.randint(-8, 9, (3,), generator=torch.Generator().manual_seed(1000 * step + rank)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def contents_of(model: Sum, optimizer: torch.optim.Optimizer) -> list[float]:
    momentum = [optimizer.state[p]["momentum_buffer"] for p in (model.one, model.two) if p in optimizer.state]
    return [float(value) for tensor in (model.one, model.two, *momentum) for value in tensor.detach()[:3]] + [
        float(model.passes)
    ]


def simulated(sizes: list[int]) -> list[float]:
    """The end of a world that had `sizes[step]` ranks in each step."""
    model = Sum()
    optimizer = optimizer_of(model)
    for step, size in enumerate(sizes):
        model.passes += 1
        optimizer.zero_grad()
        mean = sum(values_of(step, rank) / size for rank in range(size))
        assert isinstance(mean, Tensor)
        model.one.grad, model.two.grad = mean, mean[0].expand(40_000).contiguous()
        optimizer.step()
    return contents_of(model, optimizer)
