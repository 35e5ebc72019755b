"""1-bit Adam (arXiv 2102.02888): Adam that communicates its momentum, compressed, instead of its gradient.

Stage 1 lasts `freeze_step` steps: Adam on plainly averaged gradients. In stage 2 the variance is frozen, each rank adds
its own gradient to the momentum, and the momenta are averaged in compressed form, with error feedback. A frozen
variance makes the update linear in the momentum, so errors cancel over the steps. Plain Adam would divide them by a
variance that contains them.

Each parameter counts its own steps, so one that is unfrozen or added later starts with stage 1.
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


class OneBitAdam(CompressedOptimizer):
    """1-bit Adam. It averages over the group itself: do not wrap the model in DistributedDataParallel, except under
    `no_sync()`, and start from the same parameters on every rank.

    Set `freeze_step` to the step at which the variance has settled: the paper takes 15 to 25 % of all steps.
    `weight_decay` is decoupled, as in AdamW. With `bias_correction`, stage 1 is exactly AdamW. Any codec works; with a
    codec that has one scale per tensor, each parameter travels alone, as in DeepSpeed. `codec` must not be "auto",
    because the step number decides between the stages. The state holds this rank's residuals; if another rank's state
    is loaded, residuals start from zero, with a warning.

    For DeepSpeed's own trajectory, or to use it in DeepSpeed's engine, take `ringway.compat.deepspeed.OnebitAdam`.
    Arguments of DeepSpeed's constructor are accepted by name: `cuda_aware` and `comm_backend_name` have no effect,
    because the exchange runs on `group`; all others that ringway does not act on are refused.

    A param group may have DeepSpeed's `exp_avg_mask`, by which compressed momenta are multiplied. Elements that never
    had a gradient need none: they are left unchanged.

    A gradient that is NaN or infinite on any rank raises `NotFinite` on every rank, before anything has changed. With
    torch's `GradScaler`, all ranks skip such a step instead.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
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
        refuse_without_effect("OneBitAdam", amsgrad, max_grad_norm, deepspeed)
        if freeze_step < 1:
            raise UsageError(f"OneBitAdam: freeze_step={freeze_step}, but the variance needs at least one step")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
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

    def _compresses(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        return bool(self.state.get(parameter, {}).get("step", 0) >= self.freeze_step)

    def _fill_compressed(self, batch: Batch) -> None:
        for parameter, view in batch.views():
            torch.lerp(self.state[parameter]["exp_avg"], view, 1 - batch.group["betas"][0], out=view)

    def _apply(self, batch: Batch) -> None:
        views = batch.views()
        parameters, averages = [parameter for parameter, _ in views], [view for _, view in views]
        states = self._count_step(parameters)
        if batch.slot is None:
            self._update_moments(batch.group, states, averages)
        else:
            for state, average in zip(states, averages, strict=True):
                state["exp_avg"].copy_(average.masked_fill_(state["exp_avg_sq"] == 0, 0.0))
                if "exp_avg_mask" in batch.group:
                    mask = batch.group["exp_avg_mask"]
                    state["exp_avg"].mul_(mask.to(average.device).view_as(average))
        counts = [min(state["step"], self.freeze_step) for state in states]
        self._descend(batch.group, parameters, states, counts)
