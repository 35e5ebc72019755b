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

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ringway.api import collectives as api
from ringway.call import ReduceOp
from ringway.compat.compressed import MpiBackend, NcclBackend
from ringway.errors import UsageError


class OnebitAdam(Optimizer):
    """DeepSpeed's 1-bit Adam.

    `deepspeed` is DeepSpeed's engine, which averages gradients until the variance is frozen; this class then turns that
    off. Without an engine, the optimizer averages them itself. `comm_backend_name` "mpi" takes MPI's world, all others
    the engine's data-parallel group or the world. Arguments that DeepSpeed accepts and does not act on are refused.
    """

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
        for name, value in (
            ("amsgrad", amsgrad),
            ("eps_inside_sqrt", eps_inside_sqrt),
            ("max_grad_norm", max_grad_norm),
        ):
            if value:
                raise UsageError(f"OnebitAdam: {name}={value} has no effect in DeepSpeed; leave it out")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.deepspeed = deepspeed
        self.freeze_step = freeze_step
        self.adam_freeze_key = False
        self.initialize = False
        self.comm_backend_name = comm_backend_name
        self.using_pipeline = hasattr(deepspeed, "pipeline_enable_backward_allreduce")
        # The reference kernels have DeepSpeed's bits.
        self.comm_backend_handle: MpiBackend | NcclBackend = (
            MpiBackend(cuda_aware, kernels="reference")
            if comm_backend_name == "mpi"
            else NcclBackend(getattr(deepspeed, "mpu", None), kernels="reference")
        )
        self.size = self.comm_backend_handle.size

    @torch._disable_dynamo  # the compiler cannot trace the collectives
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, grads: Iterable[Any] | None = None
    ) -> float | None:
        """One step. `grads` replaces the parameters' gradients: a list in their order, or one list for each group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        last: dict[str, Any] | None = None
        for group, parameter, gradient in self._gradients(grads):
            if gradient.is_sparse:
                raise UsageError("OnebitAdam does not support sparse gradients")
            last = self._state_of(parameter)
            last["step"] += 1
            if self.initialize:
                self._move(group, parameter, gradient, last)
        if not self.initialize:
            self.initialize = True
        elif not self.adam_freeze_key and last is not None and last["step"] >= self.freeze_step:
            self._freeze(True)
        return loss

    def _gradients(self, grads: Iterable[Any] | None) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        lists: list[Any] = [None] * len(self.param_groups)
        if grads is not None:
            given = list(grads)
            lists = given if given and isinstance(given[0], list) else [given]
        for group, of_group in zip(self.param_groups, lists, strict=False):
            for place, parameter in enumerate(group["params"]):
                gradient = parameter.grad if of_group is None else of_group[place]
                if gradient is not None:
                    yield group, parameter, gradient

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
            gradient = gradient.clone()
            api.all_reduce(gradient, ReduceOp.SUM, self.comm_backend_handle.world_group)
            gradient.mul_(1 / self.size)
        momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        if not frozen:
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        else:
            if self.size > 1:
                momentum.copy_(self._averaged(momentum, state))
            if "exp_avg_mask" in group:
                group["exp_avg_mask"] = group["exp_avg_mask"].to(momentum.device)
                momentum.mul_(group["exp_avg_mask"].view_as(momentum))
        update = momentum / (variance.sqrt() + group["eps"])
        if group["weight_decay"] > 0.0:
            update += group["weight_decay"] * parameter
        parameter.add_(-group["lr"] * update)

    def _averaged(self, momentum: Tensor, state: dict[str, Any]) -> Tensor:
        if "worker_error" not in state:
            numel = momentum.numel()
            divider = self.size * math.lcm(self.size, 8)
            padded = -(-numel // divider) * divider
            state["tensor_size"], state["corrected_tensor_size"] = numel, padded
            state["server_chunk_size"] = padded // self.size
            state["worker_error"] = torch.zeros(padded, device=momentum.device)
            state["server_error"] = torch.zeros(padded // self.size, device=momentum.device)
        return self.comm_backend_handle.compressed_allreduce(
            momentum.clone(), state["worker_error"], state["server_error"], getattr(self.deepspeed, "local_rank", 0)
        )

    def _freeze(self, frozen: bool) -> None:
        """Begin or end the stage with compression. The engine averages gradients in the other one."""
        self.adam_freeze_key = frozen
        if self.deepspeed is not None:
            prefix = "pipeline_" if self.using_pipeline else ""
            setattr(self.deepspeed, f"{prefix}enable_backward_allreduce", not frozen)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class or of DeepSpeed's. As in DeepSpeed, `exp_avg_mask` stays the program's, and
        residuals start from zero."""
        own = dict(state_dict)
        own["param_groups"] = [
            {
                **{key: value for key, value in saved.items() if key != "exp_avg_mask"},
                **{key: group[key] for key in ("exp_avg_mask",) if key in group},
            }
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        super().load_state_dict(own)
        first = self.state[self.param_groups[0]["params"][0]]
        frozen = first.get("step", 0) >= self.freeze_step
        if frozen != self.adam_freeze_key:
            self._freeze(frozen)
        for state in self.state.values():
            state.pop("worker_error", None)
            state.pop("server_error", None)
