"""What the ranks of the tests of clipping and scaling run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_

from ringway.errors import UsageError
from ringway.parallel import Column, GradScaler, clip_grad_norm_, register_model_parallel_hooks
from ringway.testing import RankContext

PLAN = {"0": "column", "2": "row"}


def model_of(dtype: torch.dtype = torch.float64, width: int = 9) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4)).to(dtype)


def batch_of(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 10 * torch.randn(5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def whole(split: Any) -> list[Tensor]:
    return [value.cpu() for value in split.full_state_dict().values()]


def clipping(context: RankContext, backend: str = "shm", device: str = "cpu") -> None:
    """Norms and weights of a split model are those of the whole model on one rank's CPU, in float64."""
    dist = context.start(backend)
    world = list(range(context.world_size))
    # With 4 ranks: two data-parallel copies of a model that is split over two ranks each.
    pairs = [world] if context.world_size < 4 else [world[:2], world[2:]]
    mine = next(pair for pair in pairs if context.rank in pair)
    groups = [dist.new_group(pair) for pair in pairs]
    group = groups[pairs.index(mine)]
    clips: Any = (torchs_clip_grad_norm_, clip_grad_norm_)
    for norm_type in (2.0, float("inf")) if len(pairs) > 1 else (2.0, 1.0, 3.0, float("inf")):
        alone, model = model_of(), model_of().to(device)
        split = register_model_parallel_hooks(model, PLAN, group)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (alone, model)]
        for step in range(3):
            norms = []
            for each, optimizer, clip in zip((alone, model), optimizers, clips, strict=True):
                optimizer.zero_grad()
                each(batch_of(step).to(each[0].weight.device)).square().sum().backward()
                norms.append(clip(each.parameters(), 1.0, norm_type))
                optimizer.step()
            torch.testing.assert_close(norms[1].cpu(), norms[0], rtol=1e-12, atol=0)
            for own, theirs in zip(whole(split), alone.state_dict().values(), strict=True):
                torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-12)
        # A copy of the model is split too, and so is a copy of the copy.
        twin = copy.deepcopy(copy.deepcopy(model))
        twin.zero_grad()
        twin(batch_of(0).to(device)).square().sum().backward()
        alone.zero_grad()
        alone(batch_of(0)).square().sum().backward()
        norms = [clip(each.parameters(), 1.0, norm_type) for clip, each in zip(clips, (alone, twin), strict=True)]
        torch.testing.assert_close(norms[1].cpu(), norms[0], rtol=1e-12, atol=0)
        # A NaN on one rank is in every rank's norm.
        model.zero_grad()
        model(batch_of(0).to(device)).sum().backward()
        if context.rank == mine[1]:
            model[0].weight.grad[0, 0] = float("nan")
        with pytest.raises(RuntimeError, match="not finite"):
            clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
    with pytest.raises(UsageError, match="norm_type"):
        clip_grad_norm_(model.parameters(), 1.0, 0)
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0
    gradient = nn.Parameter(torch.ones(2))
    gradient.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(gradient, 1.0) == 5
    torch.testing.assert_close(gradient.grad, torch.tensor([0.6, 0.8]))


def scaling(context: RankContext, backend: str = "shm", device: str = "cpu") -> tuple[list[float], int]:
    """An infinity in the part of one rank: all ranks skip that step. The weights follow the whole model in float64."""
    context.start(backend)
    alone, model = model_of(), model_of(torch.float32).to(device)
    split = register_model_parallel_hooks(model, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    reference = torch.optim.SGD(alone.parameters(), 1e-3)
    scaler = GradScaler(device, init_scale=256.0, growth_interval=2)
    steps = 0
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(batch_of(step, torch.float32).to(device)).square().mean()).backward()
        if step == 3 and context.rank == 1:
            model[0].weight.grad[0, 0] = float("inf")
        if step % 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
        before = model[2].bias.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        steps += int(not torch.equal(before, model[2].bias))
        if step != 3:
            reference.zero_grad()
            alone(batch_of(step)).square().mean().backward()
            if step % 2:
                torchs_clip_grad_norm_(alone.parameters(), 1.0)
            reference.step()
    for own, theirs in zip(whole(split), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5, check_dtype=False)
    split.remove()
    return [scaler.get_scale(), *model[2].bias.tolist()], steps


def two_groups(context: RankContext) -> None:
    """Layers that are split over different groups: the norm counts each part once, and one infinity reaches all."""
    dist = context.start("shm")
    rows = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][context.rank // 2]
    columns = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][context.rank % 2]
    for groups in ((rows, columns), (columns, rows)):
        alone, model = model_of(), model_of()
        for layer, group in zip(("0", "2"), groups, strict=True):
            register_model_parallel_hooks(model, {layer: Column(gather_output=True)}, group)
        for norm_type in (2.0, float("inf")):
            for each in (alone, model):
                each.zero_grad()
                each(batch_of(0)).square().sum().backward()
            norm = clip_grad_norm_(model.parameters(), 1.0, norm_type)
            torch.testing.assert_close(
                norm, torchs_clip_grad_norm_(alone.parameters(), 1.0, norm_type), rtol=1e-12, atol=0
            )
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = GradScaler("cpu", init_scale=256.0)
        for guilty in range(context.world_size):
            optimizer.zero_grad()
            scaler.scale(model(batch_of(0)).square().mean()).backward()
            if context.rank == guilty:
                model[0].weight.grad[0, 0] = float("inf")
            before = model[2].weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model[2].weight), guilty
