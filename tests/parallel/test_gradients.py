"""Clipping and scaling of gradients on a split model, compared with the whole model on one rank."""

from __future__ import annotations

import copy
import warnings

import pytest
import rank_gradients
import torch
from rank_gradients import PLAN, batch_of, model_of, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_

from ringway.compress import OneBitAdam, ddp_hook
from ringway.errors import UsageError
from ringway.lowcomm import DiLoCo
from ringway.parallel import (
    GradScaler,
    clip_grad_norm_,
    register_data_parallel_hooks,
    register_model_parallel_hooks,
)
from ringway.testing import RankContext, RankPool


def warned(context: RankContext) -> list[str]:
    """The warnings for torch's own functions on a split model, and on one that is not split."""
    context.start("shm")
    caught = []
    for splits in (True, False):
        model = model_of(torch.float32)
        if splits:
            split = register_model_parallel_hooks(model, PLAN)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for ours in (True, False):
            scaler = GradScaler("cpu") if ours else torch.amp.GradScaler("cpu")
            clip = clip_grad_norm_ if ours else torchs_clip_grad_norm_
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                scaler.scale(model(batch_of(0, torch.float32)).mean()).backward()
                scaler.unscale_(optimizer)
                clip(model.parameters(), 1.0)
            caught += [f"{splits} {ours} {one.filename} {one.message}" for one in seen]
    split.remove()
    return caught


def refused(context: RankContext) -> None:
    """Data-parallel hooks over the group that a model is split over would give all ranks rank 0's part."""
    dist = context.start("shm")
    model = model_of(width=8)  # parts of the same shape: nothing else tells them apart
    split = register_model_parallel_hooks(model, PLAN)
    before = whole(split)
    with pytest.raises(UsageError, match=r"'0' is split over the ranks \[0, 1\].*mesh.get_group"):
        register_data_parallel_hooks(model)
    with pytest.raises(UsageError, match="is split over the ranks"):
        register_data_parallel_hooks(copy.deepcopy(model))
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(UsageError, match="is split over the ranks"):
            register_data_parallel_hooks(nn.ParameterList(each.parameters()))
        with pytest.raises(UsageError, match="is split over the ranks"):
            DistributedDataParallel(each)
        hooked = DistributedDataParallel(each, init_sync=False)
        hooked.register_comm_hook(None, ddp_hook("int8"))
        with pytest.raises(UsageError, match="is split over the ranks"):
            hooked(batch_of(0, torch.float64)).sum().backward()
        optimizer = OneBitAdam(each.parameters(), freeze_step=1)
        with pytest.raises(UsageError, match="is split over the ranks"):
            optimizer.step()
        with pytest.raises(UsageError, match="is split over the ranks"):
            DiLoCo(each, optimizer, every=2)
    with pytest.raises(UsageError, match=r"replace the split parameters of '0'.*load_full_state_dict"):
        model.load_state_dict(model.state_dict(), assign=True)
    model.load_state_dict(model.state_dict())
    for own, theirs in zip(whole(split), before, strict=True):
        assert torch.equal(own, theirs)
    alone = [dist.new_group([rank]) for rank in range(2)][context.rank]
    register_data_parallel_hooks(model, alone).remove()
    DistributedDataParallel(model, process_group=alone)
    OneBitAdam(model.parameters(), freeze_step=1, group=alone).step()
    split.remove()
    register_data_parallel_hooks(model).remove()
    register_data_parallel_hooks(copy.deepcopy(model)).remove()
    model.load_state_dict(model.state_dict(), assign=True)


@pytest.mark.parametrize("size", [2, 4])
def test_a_split_model_is_clipped_like_a_whole_one(pool: RankPool, size: int) -> None:
    pool.run(rank_gradients.clipping, world_size=size)


def test_layers_may_be_split_over_different_groups(pool: RankPool) -> None:
    pool.run(rank_gradients.two_groups, world_size=4)


def test_ranks_of_a_split_model_skip_the_same_steps(pool: RankPool) -> None:
    (first, steps), *others = pool.run(rank_gradients.scaling, world_size=3)
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
