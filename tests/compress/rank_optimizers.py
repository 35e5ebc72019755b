"""What the ranks of the tests of `ZeroOneAdam` and `OneBitLamb` run."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as c10d
from optimizer_simulation import Adam01, Lamb
from torch import Tensor, nn

from ringway.compress import OneBitLamb, ZeroOneAdam
from ringway.errors import NotFinite, UsageError
from ringway.observe.recorder import recent_calls
from ringway.testing import RankContext

NUMEL = 300
POLICY: dict[str, Any] = {
    "var_freeze_step": 12,
    "var_update_scaler": 2,
    "local_step_scaler": 8,
    "local_step_clipper": 4,
}
LAMB: dict[str, Any] = {"freeze_step": 8, "coeff_beta": 0.8, "factor_threshold": 0.05}


def values_of(rank: int, step: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank)) + 0.1


def rate_of(step: int) -> float:
    """Warms up from zero, is zero again now and then, and decays."""
    return 0.0 if step in (0, 9, 31) else 0.01 * min(1.0, step / 5) * 0.98**step


def _close(found: Tensor, right: np.ndarray, what: str, encoded: bool) -> None:
    """Equal. Of values that were `encoded`, 1 % may differ: one that is within rounding error of an edge of the codec
    is encoded differently in float64."""
    assert found.numel() == right.size
    wrong = np.abs(found.detach().double().numpy() - right) > 1e-4 * np.abs(right) + 1e-5
    allowed = 0.01 * right.size if encoded else 0
    assert wrong.sum() <= allowed, f"{what}: {wrong.sum()} of {right.size} elements differ"


def _latest() -> int:
    """When this process made its latest call."""
    return max((call.issued_ns for call in recent_calls(4)), default=0)


def zero_one_adam_follows_the_paper(context: RankContext) -> None:
    context.start("shm")
    for spec, block, bias, inside, decay in (
        ("onebit:64", 64, True, False, 0.0),
        ("onebit:tensor", None, False, True, 0.1),
        ("int8:64", 64, True, False, 0.1),
    ):
        options = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": decay, "bias_correction": bias}
        options |= {"eps_inside_sqrt": inside, **POLICY}
        weights = nn.Parameter(values_of(0, 999))
        optimizer = ZeroOneAdam([weights], codec=spec, **options)
        start, name = weights.detach().double().numpy(), spec.partition(":")[0]
        simulated = Adam01(context.world_size, start, name, block, **options)
        for step in range(48):
            given = [values_of(rank, step) for rank in range(context.world_size)]
            if step < 10:
                for one in given:
                    one[:7] = 0.0  # no variance yet
            weights.grad, lr = given[context.rank], rate_of(step)
            optimizer.param_groups[0]["lr"] = lr
            before = _latest()
            optimizer.step()
            simulated.step(np.stack([one.double().numpy() for one in given]), lr)
            what = f"{spec} step {step} ({simulated.rounds[-1]})"
            assert (_latest() == before) == (simulated.rounds[-1] == "local"), f"{what}: a local step sends nothing"
            _close(weights, simulated.x[context.rank], what, "compressed" in simulated.rounds)
            if simulated.rounds[-1] != "local":
                everyones = [torch.empty(NUMEL) for _ in range(context.world_size)]
                c10d.all_gather(everyones, weights.detach())
                assert all(torch.equal(one, everyones[0]) for one in everyones), f"{what}: replicas differ"
        assert {"plain", "compressed", "local"} == set(simulated.rounds)
        assert optimizer.feedback.report.calls == simulated.rounds.count("compressed")


def onebit_lamb_follows_the_paper(context: RankContext) -> None:
    context.start("shm")
    for spec, block, bias, decay in (("onebit:64", 64, True, 0.0), ("onebit:tensor", None, False, 0.1)):
        options = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": decay, "bias_correction": bias, **LAMB}
        options |= {"max_coeff": 10.0, "min_coeff": 0.01, "factor_max": 4.0, "factor_min": 0.5}
        parameters = [nn.Parameter(values_of(0, 990 + i, numel)) for i, numel in enumerate((200, 40, 120))]
        optimizer = OneBitLamb(parameters, codec=spec, **options)
        starts = [parameter.detach().double().numpy() for parameter in parameters]
        simulated = Lamb(context.world_size, starts, spec.partition(":")[0], block, **options)
        for step in range(40):
            everyones = []
            for number, parameter in enumerate(parameters):
                size = 10.0 ** (number - 1) * (3.0 if step > 20 else 1.0)  # momenta of different sizes that change
                given = [size * values_of(rank, 10 * step + number, parameter.numel()) for rank in range(2)]
                parameter.grad = given[context.rank]
                everyones.append(np.stack([one.double().numpy() for one in given]))
            optimizer.param_groups[0]["lr"] = rate_of(step + 1)
            optimizer.step()
            simulated.step(everyones, rate_of(step + 1))
            for number, parameter in enumerate(parameters):
                what = f"{spec} step {step} parameter {number}"
                _close(parameter, simulated.x[number], what, step >= LAMB["freeze_step"])
        assert optimizer.feedback.report.calls == 32, "one exchange a step, whatever the codec's scale"
        assert np.ptp(simulated.factor) > 0 or min(simulated.factor) < 1, "the factor has moved"
        torch.testing.assert_close(
            optimizer.get_lamb_coeffs(),
            [a * f for a, f in zip(simulated.average, simulated.factor, strict=True)],
            rtol=1e-3,
            atol=1e-6,
        )


def _made(kind: str, parameters: list[nn.Parameter], **more: Any) -> Any:
    if kind == "lamb":
        return OneBitLamb(parameters, lr=1e-2, weight_decay=0.01, codec="onebit:64", **LAMB, **more)
    return ZeroOneAdam(parameters, lr=1e-2, weight_decay=0.01, codec="onebit:64", **POLICY, **more)


def resumes_to_the_bit(context: RankContext, kind: str) -> None:
    """Saved and loaded after every step, between exchanges too. Moments are fp32 whatever the parameters' dtype."""
    context.start("shm")

    def trained(resume: bool) -> list[Tensor]:
        parameters = [nn.Parameter(torch.ones(NUMEL)), nn.Parameter(torch.ones(77).to(torch.bfloat16))]
        optimizer = _made(kind, parameters)
        for step in range(42):
            for number, parameter in enumerate(parameters):
                given = values_of(context.rank, 10 * step + number, parameter.numel()).to(parameter.dtype)
                parameter.grad = None if (step + number) % 3 == 2 else given
            optimizer.step()
            if resume:
                saved = io.BytesIO()
                torch.save(optimizer.state_dict(), saved)
                saved.seek(0)
                optimizer = _made(kind, parameters)
                optimizer.load_state_dict(torch.load(saved, weights_only=True))
        return [parameter.detach() for parameter in parameters]

    for straight, resumed in zip(trained(False), trained(True), strict=True):
        assert torch.equal(straight, resumed)


def scaler_and_nan(context: RankContext, kind: str) -> None:
    """All ranks skip, or raise, together. In a step without communication, rank 1 leaves its gradients out."""
    context.start("shm")
    for scaled in (True, False):
        weights = nn.Parameter(torch.ones(NUMEL))
        optimizer = _made(kind, [weights])
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000) if scaled else None
        raised = []
        for step in range(40):
            weights.grad = values_of(context.rank, step)
            if scaler is not None:
                weights.grad *= scaler.scale(torch.ones(()))
            if step in (1, 6, 22, 33) and context.rank == 1:
                weights.grad[3] = float("inf")
            try:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update(8.0)
            except NotFinite as error:
                raised.append((step, error.rank))
        if kind == "lamb":
            assert raised == ([] if scaled else [(step, 1) for step in (1, 6, 22, 33)])
            assert optimizer.state[weights]["step"] == 36
        else:  # steps 22 and 33 are local: the exchanges after them raise
            assert raised == ([] if scaled else [(step, 1) for step in (1, 6, 23, 34)]), raised
            assert torch.isfinite(weights).all()
        everyones = [None] * context.world_size
        c10d.all_gather_object(everyones, (optimizer.state[weights]["step"], raised))
        assert everyones[0] == everyones[1]


def parameters_wait_for_gradients(context: RankContext) -> None:
    """Between exchanges: a parameter without a gradient on any rank stays. One that some rank lacks moves as if that
    rank's gradients were zero."""
    context.start("shm")
    twins = [[nn.Parameter(torch.ones(NUMEL)) for _ in range(3)] for _ in range(2)]
    optimizers = [_made("zero_one", parameters) for parameters in twins]
    unchanged = None
    for step in range(40):
        for which, parameters in enumerate(twins):
            for number, parameter in enumerate(parameters):
                parameter.grad = values_of(context.rank, 10 * step + number)
            if step >= 20:
                parameters[0].grad = None
            if step in (20, 21, 25, 26) and context.rank == 1:
                parameters[1].grad = torch.zeros(NUMEL) if which else None
        if step == 20:
            unchanged = twins[0][0].detach().clone()
        for optimizer in optimizers:
            optimizer.step()
    assert unchanged is not None
    assert torch.equal(twins[0][0], unchanged)
    states = [optimizer.state[parameters[1]] for optimizer, parameters in zip(optimizers, twins, strict=True)]
    torch.testing.assert_close(twins[0][1], twins[1][1])
    torch.testing.assert_close(states[0]["exp_avg"], states[1]["exp_avg"])
    everyones = [torch.empty(NUMEL) for _ in range(context.world_size)]
    c10d.all_gather(everyones, twins[0][1].detach())
    assert torch.equal(everyones[0], everyones[1]), "the last step exchanged"


def deepspeed_checkpoints_load(context: RankContext) -> None:
    """The keys that DeepSpeed writes, those of its own exchange among them."""
    context.start("shm")
    for kind, steps in (("zero_one", 12), ("zero_one", 32), ("lamb", 5), ("lamb", 20)):
        weights = nn.Parameter(torch.ones(NUMEL))
        optimizer = _made(kind, [weights])
        for step in range(steps):
            weights.grad = values_of(context.rank, step)
            optimizer.step()
        theirs = copy.deepcopy(optimizer.state_dict())
        del theirs["feedback"]
        state, padded = theirs["state"][0], 320
        for own in ("bucket", "anchor", "waiting"):
            state.pop(own, None)
        state |= {"worker_error": torch.ones(padded), "server_error": torch.ones(padded // 2)}
        if kind == "zero_one":
            state |= {"momentum_accumulator": torch.ones(NUMEL), "lrs": 3.0, "tensor_size": NUMEL}
            state |= {"corrected_tensor_size": padded, "server_chunk_size": padded // 2}
        elif steps == 5:
            state["exp_avg_sq_fresh"] = torch.zeros(NUMEL)
        theirs["param_groups"][0]["exp_avg_mask"] = torch.ones(NUMEL)
        optimizer.feedback.reset()
        again = nn.Parameter(weights.detach().clone())
        resumed = _made(kind, [again])
        resumed.load_state_dict(theirs)
        assert not {"worker_error", "server_error", "tensor_size"} & set(resumed.state[again])
        for step in range(steps, steps + 8):
            for parameter, through in ((weights, optimizer), (again, resumed)):
                parameter.grad = values_of(context.rank, step)
                through.step()
        assert torch.equal(weights, again), (kind, steps)


def arguments_of_deepspeed(context: RankContext) -> None:
    context.start("shm")
    parameter = nn.Parameter(torch.ones(4))
    common: dict[str, Any] = {"deepspeed": None, "cuda_aware": True, "comm_backend_name": "mpi", "amsgrad": False}
    ZeroOneAdam(
        [parameter], var_freeze_step=4, var_update_scaler=2, local_step_scaler=3, local_step_clipper=2, **common
    )
    OneBitLamb(
        [parameter], freeze_step=4, coeff_beta=0.9, factor_max=4.0, factor_min=0.5, factor_threshold=0.1, **common
    )
    for optimizer in (ZeroOneAdam, OneBitLamb):
        with pytest.raises(UsageError, match="take an engine"):
            optimizer([parameter], deepspeed=object())
        with pytest.raises(UsageError, match="amsgrad"):
            optimizer([parameter], amsgrad=True)
        with pytest.raises(UsageError, match=r"max_grad_norm=1\.0 would have no effect"):
            optimizer([parameter], max_grad_norm=1.0)
        with pytest.raises(UsageError, match="lr=-1"):
            optimizer([parameter], lr=-1.0)
    for wrong in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"):
        with pytest.raises(UsageError, match=wrong):
            ZeroOneAdam([parameter], **{wrong: 0})  # type: ignore[arg-type]
    for invalid in ({"freeze_step": 0}, {"coeff_beta": 1.0}, {"factor_min": 5.0}, {"min_coeff": 0.0}):
        with pytest.raises(UsageError):
            OneBitLamb([parameter], **invalid)
