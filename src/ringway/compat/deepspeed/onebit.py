"""DeepSpeed's OnebitAdam: its constructor and its trajectory.

`ringway.compress.OneBitAdam` follows the paper and AdamW. This class follows DeepSpeed 0.19, step by step, for programs
whose results must be DeepSpeed's:

- the first step of the process changes neither moments nor parameters;
- no bias correction; weight decay is added to the update;
- the variance is frozen for all parameters at once, after the step at which the last parameter reaches `freeze_step`;
- each tensor travels alone, with one scale, whose mean includes the padding;
- nothing is compressed in a world of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ringway.compat.deepspeed.optimizer import OnebitOptimizer


class OnebitAdam(OnebitOptimizer):
    """DeepSpeed's 1-bit Adam. The engine averages gradients until the variance is frozen. See `OnebitOptimizer`."""

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
        self.freeze_step = freeze_step
        self.adam_freeze_key = False

    def _step(self, gradients: list[tuple[dict[str, Any], Tensor, Tensor]]) -> None:
        last: dict[str, Any] | None = None
        for group, parameter, gradient in gradients:
            last = self._state_of(parameter)
            last["step"] += 1
            if self.initialize:
                self._move(group, parameter, gradient, last)
        if not self.initialize:
            self.initialize = True
        elif not self.adam_freeze_key and last is not None and last["step"] >= self.freeze_step:
            self._freeze(True)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def _move(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        frozen = self.adam_freeze_key and not group.get("non_freeze", False)
        if not frozen and (self.deepspeed is None or self.adam_freeze_key):
            gradient = self._mean(gradient)
        momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        if not frozen:
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        else:
            if self.size > 1:
                momentum.copy_(self._mean_of_parameter(momentum, state))
            self._mask(group, momentum)
        update = momentum / (variance.sqrt() + group["eps"])
        if group["weight_decay"] > 0.0:
            update += group["weight_decay"] * parameter
        parameter.add_(-group["lr"] * update)

    def _freeze(self, frozen: bool) -> None:
        """Begin or end the stage with compression."""
        self.adam_freeze_key = frozen
        self._engine_averages(not frozen)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        frozen = self._first_state().get("step", 0) >= self.freeze_step
        if frozen != self.adam_freeze_key:
            self._freeze(frozen)
