"""`ringway.compat.deepspeed.OnebitAdam` makes DeepSpeed's steps: its formulas, for all ranks in one process."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import deepspeed_formulas
import pytest
import torch
from torch import Tensor, nn

from ringway.compat.deepspeed import OnebitAdam
from ringway.compress import OneBitAdam
from ringway.errors import UsageError
from ringway.testing import RankContext, RankPool

SHAPES = ((37,), (5, 7), (2, 16))
"""Two that are padded, one that is not."""
MASKED = 1
STEPS, FREEZE = 9, 4


def _gradients(rank: int, step: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=chance) for shape in SHAPES]


def _mask() -> Tensor:
    return (torch.arange(math.prod(SHAPES[MASKED])) % 3 > 0).float()


class Simulation:
    """DeepSpeed's optimizer on `size` ranks: all of them hold the same parameters."""

    def __init__(self, size: int, parameters: list[Tensor], lr: float, decay: float) -> None:
        self.size, self.parameters, self.lr, self.decay = size, [p.clone() for p in parameters], lr, decay
        self.momenta = [[torch.zeros_like(p) for p in parameters] for _ in range(size)]
        self.variances = [torch.zeros_like(p) for p in parameters]
        multiple = size * math.lcm(size, 8)
        lengths = [-(-p.numel() // multiple) * multiple for p in parameters]
        self.workers = [[torch.zeros(n) for _ in range(size)] for n in lengths]
        self.servers = [[torch.zeros(n // size) for _ in range(size)] for n in lengths]

    def step(self, number: int) -> None:
        if number == 1:
            return  # DeepSpeed's first step only allocates
        everybody = [_gradients(rank, number) for rank in range(self.size)]
        for place, parameter in enumerate(self.parameters):
            momenta = [of_rank[place] for of_rank in self.momenta]
            if number <= FREEZE:
                mean = torch.stack([of_rank[place] for of_rank in everybody]).sum(0).mul_(1 / self.size)
                for momentum in momenta:
                    momentum.mul_(0.9).add_(mean, alpha=1 - 0.9)
                self.variances[place].mul_(0.999).addcmul_(mean, mean, value=1 - 0.999)
            else:
                for momentum, of_rank in zip(momenta, everybody, strict=True):
                    momentum.mul_(0.9).add_(of_rank[place], alpha=1 - 0.9)
                if self.size > 1:
                    self._compress(place, momenta)
                if place == MASKED:
                    for momentum in momenta:
                        momentum.mul_(_mask().view_as(momentum))
            update = momenta[0] / (self.variances[place].sqrt() + 1e-8)
            update += self.decay * parameter
            parameter.add_(-self.lr * update)

    def _compress(self, place: int, momenta: list[Tensor]) -> None:
        length = self.workers[place][0].numel()
        padded = [nn.functional.pad(momentum.flatten(), (0, length - momentum.numel())) for momentum in momenta]
        average = deepspeed_formulas.step(padded, self.workers[place], self.servers[place])
        for momentum in momenta:
            momentum.copy_(average[: momentum.numel()].view_as(momentum))


def _optimizer(parameters: list[Tensor], **arguments: Any) -> OnebitAdam:
    groups = [
        {"params": [parameter], **({"exp_avg_mask": _mask()} if place == MASKED else {})}
        for place, parameter in enumerate(parameters)
    ]
    return OnebitAdam(groups, lr=1e-2, weight_decay=0.01, freeze_step=FREEZE, **arguments)


def _trajectory(context: RankContext) -> None:
    context.start("shm")
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in SHAPES]
    simulation = Simulation(context.world_size, start, 1e-2, 0.01)
    parameters = [nn.Parameter(value.clone()) for value in start]
    optimizer = _optimizer(parameters)
    for number in range(1, STEPS + 1):
        for parameter, gradient in zip(parameters, _gradients(context.rank, number), strict=True):
            parameter.grad = gradient
        optimizer.step()
        simulation.step(number)
        for place, (parameter, expected) in enumerate(zip(parameters, simulation.parameters, strict=True)):
            assert torch.equal(parameter, expected), (number, place)
        assert optimizer.adam_freeze_key == (number >= FREEZE)
    if context.world_size == 1:
        assert "worker_error" not in optimizer.state[parameters[0]], "nothing is compressed"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_are_deepspeeds_to_the_bit(pool: RankPool, ranks: int) -> None:
    pool.run(_trajectory, world_size=ranks)


def _engine(context: RankContext) -> None:
    """With an engine, gradients arrive averaged until it is told to stop; checkpoints; `non_freeze`; `grads`."""
    context.start("shm")
    engine = SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = OnebitAdam([parameter], engine, lr=1.0, freeze_step=2)
    local = torch.tensor([1.0, 2.0, 3.0, 4.0]) + context.rank
    optimizer.step(grads=[local])
    assert torch.equal(parameter, torch.zeros(4)), "the first step"
    optimizer.step(grads=[[local]])
    assert torch.equal(optimizer.state[parameter]["exp_avg"], local * (1 - 0.9)), "not averaged a second time"
    assert engine.enable_backward_allreduce is False
    optimizer.step(grads=[local])
    assert "worker_error" in optimizer.state[parameter]
    saved = optimizer.state_dict()
    other = OnebitAdam([nn.Parameter(torch.zeros(4))], engine, freeze_step=2)
    engine.enable_backward_allreduce = True
    other.load_state_dict(saved)
    assert (other.adam_freeze_key, engine.enable_backward_allreduce) == (True, False)
    assert not any("worker_error" in state for state in other.state.values()), "residuals start from zero"
    early = OnebitAdam([nn.Parameter(torch.zeros(4))], engine, freeze_step=100)
    early.adam_freeze_key = True
    early.load_state_dict(saved)
    assert (early.adam_freeze_key, engine.enable_backward_allreduce) == (False, True)

    pipeline = SimpleNamespace(mpu=None, pipeline_enable_backward_allreduce=True)
    kept = nn.Parameter(torch.zeros(4))
    optimizer = OnebitAdam([{"params": [kept], "non_freeze": True}], pipeline, freeze_step=1)
    for _ in range(2):
        optimizer.step(grads=[local])
    assert pipeline.pipeline_enable_backward_allreduce is False
    before = optimizer.state[kept]["exp_avg_sq"].clone()
    optimizer.step(grads=[local])
    assert not torch.equal(optimizer.state[kept]["exp_avg_sq"], before), "its variance goes on"
    for arguments in ({"amsgrad": True}, {"eps_inside_sqrt": True}, {"max_grad_norm": 1.0}):
        with pytest.raises(UsageError, match="no effect"):
            OnebitAdam([parameter], **arguments)


def test_engine_and_checkpoints(pool: RankPool) -> None:
    pool.run(_engine, world_size=2)


def _own_optimizer(context: RankContext) -> None:
    """ringway's own takes DeepSpeed's arguments and mask, and refuses what has no effect."""
    context.start("shm")
    parameter = nn.Parameter(torch.zeros(8))
    mask = torch.tensor([1.0, 0.0] * 4)
    optimizer = OneBitAdam(
        [{"params": [parameter], "exp_avg_mask": mask}],
        lr=0.1,
        freeze_step=1,
        eps_inside_sqrt=True,
        cuda_aware=False,
        comm_backend_name="nccl",
        deepspeed=None,
    )
    for _ in range(3):
        parameter.grad = torch.arange(8.0) - 3.5
        optimizer.step()
    momentum = optimizer.state[parameter]["exp_avg"]
    assert torch.equal(momentum.ne(0).float(), mask)
    with pytest.raises(UsageError, match="max_grad_norm"):
        OneBitAdam([parameter], freeze_step=1, max_grad_norm=1.0)


def test_ringways_own_takes_deepspeeds_arguments(pool: RankPool) -> None:
    pool.run(_own_optimizer, world_size=2)
