"""What DeepSpeed's three 1-bit optimizers share: constructor arguments, the engine, masks and checkpoints."""

from __future__ import annotations

import abc
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


class OnebitOptimizer(Optimizer, abc.ABC):
    """The base of `OnebitAdam`, `ZeroOneAdam` and `OnebitLamb`.

    `deepspeed` is DeepSpeed's engine, which averages gradients while the optimizer wants it to. Without an engine, the
    optimizer averages them itself. `comm_backend_name` "mpi" takes MPI's world, all others the engine's data-parallel
    group or the world. Arguments that DeepSpeed accepts and does not act on are refused.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        deepspeed: Any,
        cuda_aware: bool,
        comm_backend_name: str,
        **without_effect: Any,
    ) -> None:
        for name, value in without_effect.items():
            if value:
                raise UsageError(f"{type(self).__name__}: {name}={value} has no effect in DeepSpeed; leave it out")
        super().__init__(params, {**defaults, **{name: without_effect[name] for name in ("max_grad_norm",)}})
        self.deepspeed = deepspeed
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
        self._step(list(self._gradients(grads)))
        return loss

    @abc.abstractmethod
    def _step(self, gradients: list[tuple[dict[str, Any], Tensor, Tensor]]) -> None:
        """A step of the parameters that have a gradient: each with its group and the gradient."""

    def _gradients(self, grads: Iterable[Any] | None) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        lists: list[Any] = [None] * len(self.param_groups)
        if grads is not None:
            given = list(grads)
            lists = given if given and isinstance(given[0], list) else [given]
        for group, of_group in zip(self.param_groups, lists, strict=False):
            for place, parameter in enumerate(group["params"]):
                gradient = parameter.grad if of_group is None else of_group[place]
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    raise UsageError(f"{type(self).__name__} does not support sparse gradients")
                yield group, parameter, gradient

    def _engine_averages(self, averages: bool) -> None:
        """Tell the engine whether to average the gradients of the next step."""
        if self.deepspeed is not None:
            prefix = "pipeline_" if self.using_pipeline else ""
            setattr(self.deepspeed, f"{prefix}enable_backward_allreduce", averages)

    def _mean(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        api.all_reduce(gradient, ReduceOp.SUM, self.comm_backend_handle.world_group)
        return gradient.mul_(1 / self.size)

    def _padded_length(self, numel: int) -> int:
        divider = self.size * math.lcm(self.size, 8)
        return -(-numel // divider) * divider

    def _compressed_mean(self, values: Tensor, worker_error: Tensor, server_error: Tensor) -> Tensor:
        local_rank = getattr(self.deepspeed, "local_rank", 0)
        return self.comm_backend_handle.compressed_allreduce(values.clone(), worker_error, server_error, local_rank)

    def _mean_of_parameter(self, values: Tensor, state: dict[str, Any]) -> Tensor:
        """The mean of one parameter's values, with the residuals in its state."""
        if "worker_error" not in state:
            state["tensor_size"] = values.numel()
            state["corrected_tensor_size"] = self._padded_length(values.numel())
            state["server_chunk_size"] = state["corrected_tensor_size"] // self.size
            state["worker_error"] = torch.zeros(state["corrected_tensor_size"], device=values.device)
            state["server_error"] = torch.zeros(state["server_chunk_size"], device=values.device)
        return self._compressed_mean(values, state["worker_error"], state["server_error"])

    @staticmethod
    def _mask(group: dict[str, Any], values: Tensor) -> None:
        """Multiply by the group's `exp_avg_mask`: one bit cannot represent the zeros of elements without gradients."""
        if "exp_avg_mask" in group:
            group["exp_avg_mask"] = group["exp_avg_mask"].to(values.device)
            values.mul_(group["exp_avg_mask"].view_as(values))

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
        for state in self.state.values():
            state.pop("worker_error", None)
            state.pop("server_error", None)

    def _first_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.state[self.param_groups[0]["params"][0]]
        return state
