"""1-bit LAMB (arXiv 2104.06069): LAMB that communicates its momentum, compressed, instead of its gradient.

Stage 1 lasts `freeze_step` steps: LAMB on plainly averaged gradients, which also keeps a moving average c of each
parameter's LAMB coefficient. In stage 2 the variance v and c are frozen, and the momenta are averaged in compressed
form, as in 1-bit Adam. LAMB's coefficient must still follow the variance, so each rank reconstructs the average
gradient from two momenta, keeps a fresh variance w of it, and scales c by a factor:

    gradient = (m - beta1 * m_before) / (1 - beta1)
    w <- beta2 * w + (1 - beta2) * gradient^2
    factor = max((sqrt(v) + eps) / (sqrt(w) + eps)), between factor_min and factor_max, and within factor_threshold of
             the last one. With weight decay, only the momentum's share of the update is scaled.
    x <- x - lr * c * factor * update

Momenta of different parameters differ in size by orders of magnitude. Before they travel as one tensor, each is scaled
to their mean size (`scaling_coeff`), so a scale that two of them share fits both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ringway.compress.codecs.codec import Codec
from ringway.compress.optimizers.base import CompressedOptimizer, refuse_without_effect
from ringway.compress.optimizers.batch import Batch
from ringway.errors import UsageError


class OneBitLamb(CompressedOptimizer):
    """1-bit LAMB. It averages over the group itself: do not wrap the model in DistributedDataParallel, except under
    `no_sync()`, and start from the same parameters on every rank.

    The arguments have DeepSpeed's names and defaults. `cuda_aware` and `comm_backend_name` have no effect: the exchange
    runs on `group`. An engine as `deepspeed` is refused. `weight_decay` is part of the update that LAMB scales, as in
    DeepSpeed; `bias_correction` and `eps_inside_sqrt` have their usual meaning (DeepSpeed ignores both).
    1 / (1 - `coeff_beta`) should not exceed `freeze_step`: the average of the coefficients starts from zero. `codec`,
    checkpoints, NaN and GradScaler: see `OneBitAdam`.
    """

    _fuses_tensor_scales = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        codec: str | Codec = "onebit",
        group: c10d.ProcessGroup | None = None,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        residual_dtype: torch.dtype = torch.float32,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        deepspeed: object = None,
    ) -> None:
        refuse_without_effect("OneBitLamb", amsgrad, max_grad_norm, deepspeed)
        if freeze_step < 1:
            raise UsageError(f"OneBitLamb: freeze_step={freeze_step}, but the variance needs at least one step")
        if not (0 < min_coeff <= max_coeff and 0 < factor_min <= factor_max and factor_threshold >= 0):
            raise UsageError(
                f"OneBitLamb: invalid min_coeff={min_coeff}, max_coeff={max_coeff}, factor_min={factor_min}, "
                f"factor_max={factor_max} or factor_threshold={factor_threshold}"
            )
        if not 0 <= coeff_beta < 1:
            raise UsageError(f"OneBitLamb: coeff_beta={coeff_beta} is not in [0, 1)")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(
            params,
            defaults,
            codec=codec,
            group=group,
            residual_dtype=residual_dtype,
            eps_inside_sqrt=eps_inside_sqrt,
        )
        self.freeze_step = freeze_step
        self.coeff_beta = coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        self._coefficients: list[float] = []

    def get_lamb_coeffs(self) -> list[float]:
        """The LAMB coefficients of the latest step, one for each parameter that it changed."""
        return list(self._coefficients)

    def _compresses(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        return bool(self.state.get(parameter, {}).get("step", 0) >= self.freeze_step)

    def _prepare_bucket(self, parameters: list[Tensor]) -> None:
        """Start stage 2: scale the momenta to their mean size, and the fresh variance from the frozen one."""
        missing = [parameter for parameter in parameters if "scaling_coeff" not in self.state[parameter]]
        sizes = [float(torch.linalg.vector_norm(self.state[p]["exp_avg"])) / max(p.numel(), 1) ** 0.5 for p in missing]
        for parameter, size in zip(missing, sizes, strict=True):
            state = self.state[parameter]
            state["scaling_coeff"] = sum(sizes) / len(sizes) / size if size else 1.0
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()

    def _fill_compressed(self, batch: Batch) -> None:
        for parameter, view in batch.views():
            state = self.state[parameter]
            torch.lerp(state["exp_avg"], view, 1 - batch.group["betas"][0], out=view)
            view.mul_(state["scaling_coeff"])

    def _step(self) -> None:
        self._coefficients.clear()
        super()._step()

    def _apply(self, batch: Batch) -> None:
        group, views = batch.group, batch.views()
        parameters, averages = [parameter for parameter, _ in views], [view for _, view in views]
        states = self._count_step(parameters)
        for state in states:
            state.setdefault("lamb_coeff_freeze", 0.0)
            state.setdefault("last_factor", 1.0)
        if batch.slot is None:
            self._update_moments(group, states, averages)
        else:
            self._take_momenta(group, states, averages)
        counts = [min(state["step"], self.freeze_step) for state in states]
        denominators = self._denominators(group, [state["exp_avg_sq"] for state in states], counts)
        updates = torch._foreach_div([state["exp_avg"] for state in states], denominators)
        if group["bias_correction"]:
            torch._foreach_div_(updates, [1 - group["betas"][0] ** state["step"] for state in states])
        momentum_norms = _floats(torch._foreach_norm(updates))
        if group["weight_decay"]:
            torch._foreach_add_(updates, torch._foreach_mul(parameters, group["weight_decay"]))
        update_norms = _floats(torch._foreach_norm(updates))
        if batch.slot is None:
            coefficients = self._warm_up(group, parameters, states, update_norms)
        else:
            shares = [m / u if u else 1.0 for m, u in zip(momentum_norms, update_norms, strict=True)]
            coefficients = self._scaled(group, states, denominators, shares)
        self._coefficients += coefficients
        torch._foreach_mul_(updates, [-float(group["lr"]) * coefficient for coefficient in coefficients])
        torch._foreach_add_(parameters, updates)

    def _take_momenta(self, group: dict[str, Any], states: list[dict[str, Any]], averages: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for state, average in zip(states, averages, strict=True):
            average.div_(state["scaling_coeff"]).masked_fill_(state["exp_avg_sq"] == 0, 0.0)
            gradient = (average - beta1 * state["exp_avg"]).div_(1 - beta1)
            state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            state["exp_avg"].copy_(average)

    def _warm_up(
        self, group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Any]], update_norms: list[float]
    ) -> list[float]:
        """LAMB's coefficients, and their moving averages."""
        coefficients = []
        for state, weight, update in zip(states, _floats(torch._foreach_norm(parameters)), update_norms, strict=True):
            coefficient = 1.0
            if weight and update:
                coefficient = min(max(weight / update, group["min_coeff"]), group["max_coeff"])
                state["lamb_coeff_freeze"] += (1 - self.coeff_beta) * (coefficient - state["lamb_coeff_freeze"])
            coefficients.append(coefficient)
        return coefficients

    def _scaled(
        self, group: dict[str, Any], states: list[dict[str, Any]], denominators: list[Tensor], shares: list[float]
    ) -> list[float]:
        """The frozen coefficients, scaled by how much the variance has changed since."""
        fresh = [state["exp_avg_sq_fresh"] for state in states]
        real = self._denominators(group, fresh, [state["step"] for state in states])
        ratios = [
            (frozen / now).masked_fill_(state["exp_avg_sq"] == 0, 0.0).amax()
            for state, frozen, now in zip(states, denominators, real, strict=True)
        ]
        coefficients = []
        for state, ratio, share in zip(states, _floats(ratios), shares, strict=True):
            share, last = min(share, 1.0), state["last_factor"]
            factor = ratio * share + (1 - share) if group["weight_decay"] else ratio
            factor = min(max(factor, self.factor_min), self.factor_max)
            factor = min(max(factor, last * (1 - self.factor_threshold)), last * (1 + self.factor_threshold))
            state["last_factor"] = factor
            coefficients.append(state["lamb_coeff_freeze"] * factor)
        return coefficients


def _floats(scalars: Any) -> list[float]:
    """Scalars of one device, read in one transfer."""
    found: list[float] = torch.stack([scalar.to(torch.float32) for scalar in scalars]).tolist()
    return found
