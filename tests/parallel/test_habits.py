"""What training programs do: scale losses, freeze layers half-way, train two models at once, diverge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringway
from ringway.parallel import register_data_parallel_hooks
from ringway.testing import RankContext, RankPool

SMALL_MB = 0.0001  # so that small models have several buckets
Loss = Callable[[nn.Module, Tensor], Tensor]


def _perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def _square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _batches(context: RankContext, seed: int = 0) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=chance) for _ in range(context.world_size)]


def _require_mean(context: RankContext, model: nn.Module, plain: nn.Module, loss: Loss = _square) -> None:
    """One backward of `model` on this rank's batch gives what `plain` gets from all batches."""
    batches = _batches(context)
    model.zero_grad()
    plain.zero_grad()
    loss(model, batches[context.rank]).backward()
    for batch in batches:
        (loss(plain, batch) / context.world_size).backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def _require_alike(tensors: list[Tensor]) -> None:
    whole = torch.cat([tensor.detach().flatten() for tensor in tensors])
    everybody = ringway.allgather_object(whole)
    assert all(torch.equal(one, everybody[0]) for one in everybody)


def frozen_half_way(context: RankContext) -> None:
    """A layer may be frozen for a while, on all ranks or on one."""
    context.start("shm")
    model = _perceptron()
    plain = copy.deepcopy(model)
    handle = register_data_parallel_hooks(model, bucket_mb=SMALL_MB)
    for trained in (True, False, True):
        for net in (model, plain):
            net[2].requires_grad_(trained)
        for _ in range(2):
            _require_mean(context, model, plain)
    model[2].requires_grad_(context.rank == 0)
    model.zero_grad()
    _square(model, _batches(context)[context.rank]).backward()
    _require_alike([p.grad for p in model.parameters()])
    handle.remove()


def two_models_in_one_loss(context: RankContext) -> None:
    context.start("shm")
    first, second = _perceptron(), _perceptron()
    handles = [register_data_parallel_hooks(net, bucket_mb=SMALL_MB) for net in (first, second)]
    both = nn.ModuleList([first, second])
    plain = copy.deepcopy(both)
    for _ in range(3):
        _require_mean(context, both, plain, lambda nets, x: _square(nets[0], x) + _square(nets[1], 2 * x))
    for handle in handles:
        handle.remove()


def scaled_losses(context: RankContext) -> None:
    """All ranks see an overflow on one of them: they skip the same step, and stay equal."""
    context.start("shm")
    model = _perceptron()
    handle = register_data_parallel_hooks(model, bucket_mb=SMALL_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = _square(model, _batches(context, step)[context.rank])
        if (step, context.rank) == (2, 0):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    _require_alike(list(model.parameters()))
    handle.remove()


def not_a_number_through_a_codec(context: RankContext) -> None:
    """Every gradient is then NaN on every rank, and the next step and the residuals are fine. Buckets may be tiny."""
    context.start("shm")
    for codec in ("onebit", "int8", "int4", "fp8", "auto:int8"):
        model = _perceptron()
        handle = register_data_parallel_hooks(model, bucket_mb=SMALL_MB / 10, codec=codec)
        for step in range(4):
            model.zero_grad()
            factor = float("nan") if (step, context.rank) == (2, 0) else 1.0
            (factor * _square(model, _batches(context, step)[context.rank])).backward()
            finite = [bool(p.grad.isfinite().all()) for p in model.parameters()]
            assert finite == [step != 2] * len(finite), (codec, step)
        _require_alike([p.grad for p in model.parameters()])
        handle.remove()


def compiled_with_accumulation(context: RankContext) -> None:
    """no_sync applies where backward runs, not where the compiler traced it."""
    context.start("shm")
    model = _perceptron()
    plain = copy.deepcopy(model)
    handle = register_data_parallel_hooks(model, bucket_mb=SMALL_MB)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    batches = _batches(context)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        with handle.no_sync():
            _square(compiled, batches[context.rank]).backward()
        _square(compiled, batches[context.rank]).backward()
        for batch in batches:
            (2 * _square(plain, batch) / context.world_size).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    handle.remove()


@pytest.mark.parametrize(
    "habit",
    [
        frozen_half_way,
        two_models_in_one_loss,
        scaled_losses,
        not_a_number_through_a_codec,
        compiled_with_accumulation,
    ],
)
def test_habit(pool: RankPool, habit: Any) -> None:
    pool.run(habit, world_size=2)
