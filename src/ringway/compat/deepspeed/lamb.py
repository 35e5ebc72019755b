"""DeepSpeed's OnebitLamb: its constructor and its trajectory.

`ringway.compress.OneBitLamb` follows the paper. This class follows DeepSpeed 0.19, step by step:

- the first step of the process changes neither moments nor parameters, but it counts;
- no bias correction;
- all momenta travel as one tensor with one scale. Its padding keeps what the last exchange left there;
- nothing is compressed in a world of one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ringway.compat.deepspeed.optimizer import OnebitOptimizer


class OnebitLamb(OnebitOptimizer):
    """DeepSpeed's 1-bit LAMB. The engine averages gradients until the variance is frozen. Parameters without elements
    are left out. See `OnebitOptimizer`."""

    def __init__(
        self,
        params: ParamsT,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(
            _without_empty(params),
            defaults,
            deepspeed,
            cuda_aware,
            comm_backend_name,
            amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=max_grad_norm,
        )
        self.freeze_step = freeze_step
        self.coeff_beta = coeff_beta
        self.factor_max = factor_max
        self.factor_min = factor_min
        self.factor_threshold = factor_threshold
        self.lamb_freeze_key = False
        self.lamb_coeffs: list[float] = []
        self.worker_errors: list[Tensor] = []
        self.server_errors: list[Tensor] = []
        self._padding: Tensor | None = None

    def get_lamb_coeffs(self) -> list[float]:
        """The coefficients of the latest step."""
        return list(self.lamb_coeffs)

    def _members(self) -> list[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
        return [(group, p, self.state[p]) for group in self.param_groups for p in group["params"]]

    def _step(self, gradients: list[tuple[dict[str, Any], Tensor, Tensor]]) -> None:
        self.lamb_coeffs = []
        frozen = self.lamb_freeze_key
        before = [state["exp_avg"].clone() for _, _, state in self._members()] if frozen else []
        if frozen:
            self._scale_momenta()
        last: dict[str, Any] | None = None
        for group, parameter, gradient in gradients:
            last = self._state_of(parameter)
            last["step"] += 1
            if not self.initialize:
                continue
            if frozen:
                last["exp_avg"].mul_(group["betas"][0]).add_(gradient, alpha=1 - group["betas"][0])
                last["exp_avg"].mul_(last["scaling_coeff"])
            else:
                self._move(group, parameter, gradient, last)
        if not self.initialize:
            self.initialize = True
            return
        if frozen:
            if self.size > 1:
                self._exchange([state["exp_avg"] for _, _, state in self._members()])
            for member, momentum in zip(self._members(), before, strict=True):
                self._move_frozen(*member, momentum)
        elif last is not None and last["step"] >= self.freeze_step:
            self._freeze(True)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state |= {"step": 0, "lamb_coeff_freeze": 0.0, "last_factor": 1.0}
            for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"):
                state[name] = torch.zeros_like(parameter)
        return state

    def _move(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        """A step before the variance is frozen: LAMB's."""
        beta1, beta2 = group["betas"]
        if self.deepspeed is None:
            gradient = self._mean(gradient)
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if state["step"] == self.freeze_step:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        if group["weight_decay"] > 0.0:
            update += group["weight_decay"] * parameter
        weight_norm, update_norm = _norm(parameter), _norm(update)
        coefficient = 1.0
        if weight_norm != 0 and update_norm != 0:
            coefficient = _clip((weight_norm / update_norm).item(), group["min_coeff"], group["max_coeff"])
        if coefficient != 1.0:
            state["lamb_coeff_freeze"] *= self.coeff_beta
            state["lamb_coeff_freeze"] += (1 - self.coeff_beta) * coefficient
        self._descend(group, parameter, update, coefficient)

    def _scale_momenta(self) -> None:
        """At the end of the warm-up, choose for each momentum a factor that gives all of them the same size."""
        members = self._members()
        if "scaling_coeff" in members[0][2]:
            return
        sizes = [
            (torch.linalg.vector_norm(state["exp_avg"]) / math.sqrt(parameter.numel())).item()
            for _, parameter, state in members
        ]
        mean = sum(sizes) / len(sizes)
        for (_, _, state), size in zip(members, sizes, strict=True):
            state["scaling_coeff"] = mean / size

    def _exchange(self, momenta: list[Tensor]) -> None:
        """Replace all momenta by their compressed mean."""
        numel = sum(momentum.numel() for momentum in momenta)
        length = self._padded_length(numel)
        device = momenta[0].device
        if self._padding is None:
            self._padding = torch.zeros(length - numel, device=device)
        if not self.worker_errors:
            self.worker_errors.append(torch.zeros(length, device=device))
            self.server_errors.append(torch.zeros(length // self.size, device=device))
        flat = torch.cat([*(momentum.flatten() for momentum in momenta), self._padding])
        mean = self._compressed_mean(flat, self.worker_errors[0], self.server_errors[0])
        *parts, self._padding = mean.split([*(momentum.numel() for momentum in momenta), length - numel])
        for momentum, part in zip(momenta, parts, strict=True):
            momentum.copy_(part.view_as(momentum))

    def _move_frozen(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], momentum_before: Tensor
    ) -> None:
        """A step with the frozen variance. The fresh one, which goes on with the gradient that the momenta imply, says
        how far the frozen coefficient has to be corrected."""
        beta1, beta2 = group["betas"]
        momentum, fresh = state["exp_avg"], state["exp_avg_sq_fresh"]
        momentum.div_(state["scaling_coeff"])
        self._mask(group, momentum)
        implied = (momentum - momentum_before * beta1) / (1 - beta1)
        fresh.mul_(beta2).addcmul_(implied, implied, value=1 - beta2)
        denominator = state["exp_avg_sq"].sqrt() + group["eps"]
        plain = momentum / denominator
        update = plain + group["weight_decay"] * parameter if group["weight_decay"] > 0.0 else plain
        factor = (denominator / (fresh.sqrt() + group["eps"])).max().item()
        if group["weight_decay"] > 0.0:
            share = min(1.0, (_norm(plain) / _norm(update)).item())
            factor = factor * share + (1.0 - share)
        factor = _clip(factor, self.factor_min, self.factor_max)
        last = state["last_factor"]
        factor = _clip(factor, last * (1.0 - self.factor_threshold), last * (1.0 + self.factor_threshold))
        state["last_factor"] = factor
        self._descend(group, parameter, update, state["lamb_coeff_freeze"] * factor)

    def _descend(self, group: dict[str, Any], parameter: Tensor, update: Tensor, coefficient: float) -> None:
        self.lamb_coeffs.append(coefficient)
        parameter.add_(-group["lr"] * coefficient * update)

    def _freeze(self, frozen: bool) -> None:
        """Begin or end the stage with compression."""
        self.lamb_freeze_key = frozen
        self._engine_averages(not frozen)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        frozen = self._first_state().get("step", 0) >= self.freeze_step
        if frozen != self.lamb_freeze_key:
            self._freeze(frozen)
        if not frozen:
            for state in self.state.values():
                state |= {"lamb_coeff_freeze": 0.0, "last_factor": 1.0}
                state.pop("scaling_coeff", None)
        self.worker_errors, self.server_errors, self._padding = [], [], None


def _norm(values: Tensor) -> Tensor:
    return values.pow(2).sum().sqrt()


def _clip(value: float, lowest: float, highest: float) -> float:
    return max(lowest, min(value, highest))


def _without_empty(params: ParamsT) -> ParamsT:
    """The parameters that have elements, and the groups that have any of these."""
    given: list[Any] = list(params)
    if not given or not isinstance(given[0], dict):
        return [p for p in given if p.numel()]
    groups = [{**group, "params": [p for p in group["params"] if p.numel()]} for group in given]
    return [group for group in groups if group["params"]]
