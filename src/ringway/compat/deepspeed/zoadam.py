"""DeepSpeed's ZeroOneAdam: its constructor and its trajectory.

`ringway.compress.ZeroOneAdam` follows the paper. This class follows DeepSpeed 0.19, step by step:

- the first step of the process changes neither moments nor parameters, but it counts;
- no bias correction; weight decay is added to the update;
- until the variance is frozen, steps that do not update it add the compressed mean of the gradients to the momentum,
  and in a world of one they add nothing;
- afterwards each rank moves alone, and every `local_step_interval` steps the ranks replace what they have moved by the
  compressed mean of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ringway.compat.deepspeed.optimizer import OnebitOptimizer


class ZeroOneAdam(OnebitOptimizer):
    """DeepSpeed's 0/1 Adam. The engine averages gradients for the steps that update the variance. See
    `OnebitOptimizer`."""

    def __init__(
        self,
        params: ParamsT,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            deepspeed,
            cuda_aware,
            comm_backend_name,
            amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=max_grad_norm,
        )
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        self.freeze_key = False
        self.reinitial_error_buffer = False

    def _step(self, gradients: list[tuple[dict[str, Any], Tensor, Tensor]]) -> None:
        for group, parameter, gradient in gradients:
            state = self._state_of(parameter)
            state["step"] += 1
            if self.initialize:
                self._add_gradient(group, gradient, state)
                self._move(group, parameter, state)
                self._count(state)
        if not self.initialize:
            self.initialize = True
            return
        if self._first_state()["step"] > self.var_freeze_step:
            self.freeze_key = True
            self._engine_averages(False)
        if self.freeze_key and not self.reinitial_error_buffer:
            for state in self.state.values():  # from gradients' residuals to those of sums
                for error in ("worker_error", "server_error"):
                    if error in state:
                        state[error].zero_()
            self.reinitial_error_buffer = True

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        if "momentum_accumulator" not in state:  # at first, and after a checkpoint
            state |= {"var_interval": 1, "var_counter": 0, "local_step_interval": 1, "local_step_counter": 0, "lrs": 0}
            state["momentum_accumulator"] = torch.zeros_like(parameter)
        return state

    def _updates_variance(self, state: dict[str, Any]) -> bool:
        return bool(state["step"] % state["var_interval"] == 0)

    def _add_gradient(self, group: dict[str, Any], gradient: Tensor, state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if self.freeze_key:
            state["lrs"] += group["lr"]
        elif self._updates_variance(state):
            if self.deepspeed is None:
                gradient = self._mean(gradient)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        elif self.size == 1:
            return
        else:
            gradient = self._mean_of_parameter(gradient, state)
            self._mask(group, gradient)
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)

    def _move(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        momentum, moved = state["exp_avg"], state["momentum_accumulator"]
        denominator = state["exp_avg_sq"].sqrt() + group["eps"]
        update = momentum / denominator
        if group["weight_decay"] > 0.0:
            update += group["weight_decay"] * parameter
        parameter.add_(-group["lr"] * update)
        if not self.freeze_key:
            return
        moved.add_(-group["lr"] * update)
        if state["step"] % state["local_step_interval"]:
            return
        parameter.add_(-1 * moved)
        moved.mul_(denominator)
        if self.size > 1:
            moved.copy_(self._mean_of_parameter(moved, state))
            self._mask(group, moved)
        momentum.zero_().add_(moved / state["lrs"], alpha=-1)
        parameter.add_(moved / denominator)
        moved.zero_()
        state["lrs"] = 0

    def _count(self, state: dict[str, Any]) -> None:
        """How far apart the next updates of the variance, or the next exchanges, are."""
        if self.freeze_key:
            state["local_step_counter"] += 1
            if state["local_step_counter"] == self.local_step_scaler:
                state["local_step_counter"] = 0
                state["local_step_interval"] = min(self.local_step_clipper, state["local_step_interval"] * 2)
            return
        if self._updates_variance(state):
            state["var_counter"] += 1
            if state["var_counter"] == self.var_update_scaler:
                state["var_counter"] = 0
                state["var_interval"] *= 2
        self._engine_averages((state["step"] + 1) % state["var_interval"] == 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        first = self._first_state()
        frozen = first.get("step", 0) >= self.var_freeze_step
        self._engine_averages(not frozen and (first.get("step", 0) + 1) % first.get("var_interval", 1) == 0)
        self.reinitial_error_buffer = False
        for state in self.state.values():
            state.pop("momentum_accumulator", None)
