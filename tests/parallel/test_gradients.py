"""Clipping and scaling of gradients on a split model, compared with the whole model on one rank."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_

from ringway.compress import OneBitAdam, ddp_hook
from ringway.errors import UsageError
from ringway.parallel import (
    GradScaler,
    clip_grad_norm_,
    register_data_parallel_hooks,
    register_model_parallel_hooks,
)
from ringway.testing import RankContext, RankPool

PLAN = {"0": "column", "2": "row"}


def _model(dtype: torch.dtype = torch.float64, width: int = 9) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4)).to(dtype)


def _batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 10 * torch.randn(5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def _whole(split: Any) -> list[Tensor]:
    return list(split.full_state_dict().values())


def clipping(context: RankContext) -> None:
    dist = context.start("shm")
    world = list(range(context.world_size))
    # With 4 ranks: two data-parallel copies of a model that is split over two ranks each.
    pairs = [world] if context.world_size < 4 else [world[:2], world[2:]]
    mine = next(pair for pair in pairs if context.rank in pair)
    groups = [dist.new_group(pair) for pair in pairs]
    group = groups[pairs.index(mine)]
    for norm_type in (2.0, float("inf")) if len(pairs) > 1 else (2.0, 1.0, 3.0, float("inf")):
        alone, model = _model(), _model()
        split = register_model_parallel_hooks(model, PLAN, group)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (alone, model)]
        for step in range(3):
            norms = []
            for each, optimizer, clip in zip(
                (alone, model), optimizers, (torchs_clip_grad_norm_, clip_grad_norm_), strict=True
            ):
                optimizer.zero_grad()
                each(_batch(step)).square().sum().backward()
                norms.append(clip(each.parameters(), 1.0, norm_type))
                optimizer.step()
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-12, atol=0)
            for own, theirs in zip(_whole(split), alone.state_dict().values(), strict=True):
                torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-12)
        # A NaN on one rank is in every rank's norm.
        model.zero_grad()
        model(_batch(0)).sum().backward()
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


def scaling(context: RankContext) -> tuple[list[float], int]:
    """An infinity in the part of one rank: all ranks skip that step."""
    context.start("shm")
    model = _model(torch.float32)
    split = register_model_parallel_hooks(model, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2)
    steps = 0
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(_batch(step, torch.float32)).square().mean()).backward()
        if step == 3 and context.rank == 1:
            model[0].weight.grad[0, 0] = float("inf")
        if step % 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
        before = model[2].bias.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        steps += int(not torch.equal(before, model[2].bias))
    split.remove()
    return [scaler.get_scale(), *model[2].bias.tolist()], steps


def warned(context: RankContext) -> list[str]:
    """The warnings for torch's own functions on a split model, and on one that is not split."""
    context.start("shm")
    caught = []
    for splits in (True, False):
        model = _model(torch.float32)
        if splits:
            split = register_model_parallel_hooks(model, PLAN)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for ours in (True, False):
            scaler = GradScaler("cpu") if ours else torch.amp.GradScaler("cpu")
            clip = clip_grad_norm_ if ours else torchs_clip_grad_norm_
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                scaler.scale(model(_batch(0, torch.float32)).mean()).backward()
                scaler.unscale_(optimizer)
                clip(model.parameters(), 1.0)
            caught += [f"{splits} {ours} {one.filename} {one.message}" for one in seen]
    split.remove()
    return caught


def refused(context: RankContext) -> None:
    """Data-parallel hooks over the group that a model is split over would give all ranks rank 0's part."""
    dist = context.start("shm")
    model = _model(width=8)  # parts of the same shape: nothing else tells them apart
    split = register_model_parallel_hooks(model, PLAN)
    before = _whole(split)
    with pytest.raises(UsageError, match=r"'0' is split over the ranks \[0, 1\].*mesh.get_group"):
        register_data_parallel_hooks(model)
    with pytest.raises(UsageError, match="is split over the ranks"):
        register_data_parallel_hooks(copy.deepcopy(model))
    with pytest.raises(UsageError, match="is split over the ranks"):
        register_data_parallel_hooks(nn.ParameterList(model.parameters()))
    with pytest.raises(UsageError, match="is split over the ranks"):
        DistributedDataParallel(model)
    hooked = DistributedDataParallel(model, init_sync=False)
    hooked.register_comm_hook(None, ddp_hook("int8"))
    with pytest.raises(UsageError, match="is split over the ranks"):
        hooked(_batch(0, torch.float64)).sum().backward()
    optimizer = OneBitAdam(model.parameters(), freeze_step=1)
    with pytest.raises(UsageError, match="is split over the ranks"):
        optimizer.step()
    for own, theirs in zip(_whole(split), before, strict=True):
        assert torch.equal(own, theirs)
    alone = [dist.new_group([rank]) for rank in range(2)][context.rank]
    register_data_parallel_hooks(model, alone).remove()
    DistributedDataParallel(model, process_group=alone)
    OneBitAdam(model.parameters(), freeze_step=1, group=alone).step()
    split.remove()
    register_data_parallel_hooks(model).remove()


@pytest.mark.parametrize("size", [2, 4])
def test_a_split_model_is_clipped_like_a_whole_one(pool: RankPool, size: int) -> None:
    pool.run(clipping, world_size=size)


def test_ranks_of_a_split_model_skip_the_same_steps(pool: RankPool) -> None:
    (first, steps), *others = pool.run(scaling, world_size=3)
    assert steps == 7
    assert all(other == (first, steps) for other in others)


def test_torchs_own_functions_on_split_parameters_are_warned_about(pool: RankPool) -> None:
    for caught in pool.run(warned, world_size=2):
        assert len(caught) == 2, caught
        assert all(one.startswith(f"True False {__file__}") for one in caught), caught
        assert "ringway.parallel.GradScaler" in caught[0]
        assert "ringway.parallel.clip_grad_norm_" in caught[1]


def test_data_parallel_hooks_over_the_model_parallel_group_are_refused(pool: RankPool) -> None:
    pool.run(refused, world_size=2)
