"""The three 1-bit optimizers of `ringway.compat.deepspeed` go where DeepSpeed's go: a record of DeepSpeed 0.19.6."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import onebit_trajectories
import pytest
import torch
from torch import nn

from ringway.compat import deepspeed
from ringway.compress import OneBitAdam, OneBitLamb
from ringway.compress import ZeroOneAdam as OwnZeroOneAdam
from ringway.errors import UsageError
from ringway.testing import RankContext, RankPool

RECORD = json.loads(onebit_trajectories.RECORD.read_text())


def _follow(context: RankContext) -> None:
    context.start("shm")
    for name, arguments in onebit_trajectories.ARGUMENTS.items():
        optimizer = getattr(deepspeed, name)
        found = onebit_trajectories.train(optimizer, arguments, context.rank, context.world_size)
        last = found[-1]
        if context.rank == 0:
            for after, expected in zip(found[onebit_trajectories.KEPT], RECORD[name], strict=True):
                for values, recorded in zip(after, expected, strict=True):
                    # Machines differ in the last bits. A wrong step is of the order of the rate, 1e-2.
                    torch.testing.assert_close(values.flatten(), torch.tensor(recorded), rtol=1e-4, atol=1e-5)
        if name != "ZeroOneAdam":  # whose ranks differ between exchanges
            for values in last:
                total = values.clone()
                deepspeed.all_reduce(total)
                torch.testing.assert_close(total / context.world_size, values, rtol=1e-6, atol=1e-6)


def test_trajectories_are_deepspeeds(pool: RankPool) -> None:
    assert set(RECORD) == set(onebit_trajectories.ARGUMENTS)
    pool.run(_follow, world_size=2)


def _without_engine(context: RankContext) -> None:
    """Without an engine, the optimizer averages gradients itself, when the engine would have."""
    context.start("shm")
    for name, arguments in onebit_trajectories.ARGUMENTS.items():
        results = []
        for engine in (SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True), None):
            parameter = nn.Parameter(torch.linspace(-1.0, 1.0, 40))
            optimizer = getattr(deepspeed, name)([parameter], engine, lr=1e-2, **arguments)
            averages = True
            for step in range(10):
                everybody = [torch.sin(torch.arange(40.0) * (step + 1 + rank)) for rank in range(2)]
                mean = (everybody[0] + everybody[1]).mul_(0.5)
                parameter.grad = mean if engine is not None and averages else everybody[context.rank]
                optimizer.step()
                averages = engine is None or engine.enable_backward_allreduce
            results.append(parameter.detach().clone())
        assert torch.equal(*results), name


def _checkpoints(context: RankContext) -> None:
    """A checkpoint keeps the stage and the program's masks, and drops residuals. The engine is told."""
    context.start("shm")

    def trained(name: str, steps: int, **arguments: Any) -> tuple[Any, SimpleNamespace]:
        engine = SimpleNamespace(mpu=None, local_rank=0, pipeline_enable_backward_allreduce=True)
        parameter = nn.Parameter(torch.linspace(-1.0, 1.0, 40))
        optimizer = getattr(deepspeed, name)(
            [{"params": [parameter], "exp_avg_mask": torch.ones(40)}], engine, **arguments
        )
        for step in range(steps):
            parameter.grad = torch.sin(torch.arange(40.0) * (step + 1 + context.rank))
            optimizer.step()
        return optimizer, engine

    lamb, _ = trained("OnebitLamb", 5, freeze_step=2)
    assert len(lamb.get_lamb_coeffs()) == 1
    assert len(lamb.worker_errors) == 1
    later, engine = trained("OnebitLamb", 0, freeze_step=2)
    later.param_groups[0].pop("exp_avg_mask")
    later.load_state_dict(lamb.state_dict())
    assert "exp_avg_mask" not in later.param_groups[0]
    assert (later.lamb_freeze_key, engine.pipeline_enable_backward_allreduce, later.worker_errors) == (True, False, [])
    assert all("scaling_coeff" in state for state in later.state.values())
    again, engine = trained("OnebitLamb", 4, freeze_step=2)
    again.freeze_step = 20
    again.load_state_dict(lamb.state_dict())
    assert (again.lamb_freeze_key, engine.pipeline_enable_backward_allreduce) == (False, True)
    assert all(state["last_factor"] == 1.0 and "scaling_coeff" not in state for state in again.state.values())

    zero_one, _ = trained("ZeroOneAdam", 8, var_freeze_step=4, var_update_scaler=1)
    assert all("worker_error" in state for state in zero_one.state.values())
    later, engine = trained("ZeroOneAdam", 0, var_freeze_step=4)
    later.load_state_dict(zero_one.state_dict())
    assert engine.pipeline_enable_backward_allreduce is False
    assert not any("worker_error" in state or "momentum_accumulator" in state for state in later.state.values())
    empty = deepspeed.OnebitLamb([{"params": [nn.Parameter(torch.ones(3))]}, {"params": [nn.Parameter(torch.ones(0))]}])
    assert len(empty.param_groups) == 1, "parameters without elements are left out"


def test_without_an_engine(pool: RankPool) -> None:
    pool.run(_without_engine, world_size=2)


def test_checkpoints(pool: RankPool) -> None:
    pool.run(_checkpoints, world_size=2)


def _refusals(context: RankContext) -> None:
    context.start("shm")
    parameter = nn.Parameter(torch.zeros(4))
    for optimizer in (deepspeed.OnebitAdam, deepspeed.ZeroOneAdam, deepspeed.OnebitLamb):
        for arguments in ({"amsgrad": True}, {"eps_inside_sqrt": True}, {"max_grad_norm": 1.0}):
            with pytest.raises(UsageError, match=f"{optimizer.__name__}: .* no effect"):
                optimizer([parameter], **arguments)
    for own, arguments in ((OneBitAdam, {"freeze_step": 1}), (OwnZeroOneAdam, {}), (OneBitLamb, {"freeze_step": 1})):
        with pytest.raises(UsageError, match=r"deepspeed.*ringway\.compat\.deepspeed"):
            own([parameter], deepspeed=SimpleNamespace(), **arguments)


def test_what_has_no_effect_is_refused(pool: RankPool) -> None:
    pool.run(_refusals, world_size=1)
