"""1-bit Adam (arXiv 2102.02888): Adam that communicates its momentum, compressed, instead of its gradient.

Stage 1 lasts `freeze_step` steps: Adam on plainly averaged gradients. In stage 2 the variance is frozen, each rank adds
its own gradient to the momentum, and the momenta are averaged in compressed form, with error feedback. A frozen
variance makes the update linear in the momentum, so errors cancel over the steps. Plain Adam would divide them by a
variance that contains them.

A one-bit codec cannot represent zero. A parameter element that never had a gradient has a frozen variance of zero, and
any momentum divided by it would explode. These elements are left unchanged.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ringway.compress.codecs.codec import Codec, get_codec
from ringway.compress.collectives import compressed_all_reduce
from ringway.compress.feedback import ErrorFeedback
from ringway.errors import UsageError
from ringway.groups.world import world


@dataclass
class _Bucket:
    """Parameters whose moments are contiguous in memory, so that they travel together."""

    key: str
    parameters: list[Tensor]
    momentum: Tensor
    variance: Tensor

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]


class OneBitAdam(Optimizer):
    """1-bit Adam. It averages over the group itself: do not wrap the model in DistributedDataParallel, except under
    `no_sync()`, and start from the same parameters on every rank.

    Set `freeze_step` to the step at which the variance has settled: the paper takes 15 to 25 % of all steps.
    `weight_decay` is decoupled, as in AdamW. With `bias_correction`, stage 1 is exactly AdamW. Any codec works; with a
    codec that has one scale per tensor, each parameter travels alone, as in DeepSpeed. `codec` must not be "auto",
    because the step number decides between the stages. The state holds this rank's residuals; if another rank's state
    is loaded, residuals start from zero, with a warning.
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
        residual_dtype: torch.dtype = torch.float32,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise UsageError(f"OneBitAdam: invalid lr={lr}, betas={betas}, eps={eps} or weight_decay={weight_decay}")
        if freeze_step < 1:
            raise UsageError(f"OneBitAdam: freeze_step={freeze_step}, but the variance needs at least one step")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "step": 0,
        }
        super().__init__(params, defaults)
        self.freeze_step = freeze_step
        self.codec = get_codec(codec)
        self.group = group
        self.feedback = ErrorFeedback(group, residual_dtype=residual_dtype)
        self._buckets: list[list[_Bucket]] | None = None

    @property
    def compressing(self) -> bool:
        """Whether the next step belongs to stage 2."""
        return any(group["step"] >= self.freeze_step for group in self.param_groups)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._buckets is None:
            self._buckets = [self._arrange(index, group) for index, group in enumerate(self.param_groups)]
        for group, buckets in zip(self.param_groups, self._buckets, strict=True):
            group["step"] += 1
            for bucket in buckets:
                gradient = _flat_gradient(bucket)
                if group["step"] <= self.freeze_step:
                    self._average_gradient(bucket, gradient, group)
                else:
                    self._average_momentum(bucket, gradient, group)
                self._update(bucket, group)
        return loss

    def _arrange(self, index: int, group: dict[str, Any]) -> list[_Bucket]:
        """Join a group's moments: all of a device, or each parameter alone if the scale spans a tensor."""
        by_place: dict[Any, list[Tensor]] = {}
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter.numel():
                alone = (parameter.device, place) if self.codec.tensor_scale else parameter.device
                by_place.setdefault(alone, []).append(parameter)
        return [
            self._bucket(f"group{index}.{number}", parameters) for number, parameters in enumerate(by_place.values())
        ]

    def _bucket(self, key: str, parameters: list[Tensor]) -> _Bucket:
        numel = sum(parameter.numel() for parameter in parameters)
        flat = [torch.zeros(numel, dtype=torch.float32, device=parameters[0].device) for _ in range(2)]
        bucket = _Bucket(key, parameters, *flat)
        for name, whole in (("exp_avg", bucket.momentum), ("exp_avg_sq", bucket.variance)):
            for parameter, view in zip(parameters, bucket.views(whole), strict=True):
                if name in self.state[parameter]:
                    view.copy_(self.state[parameter][name])
                self.state[parameter][name] = view
        return bucket

    def _average_gradient(self, bucket: _Bucket, gradient: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        world.communicator(self.group).all_reduce(gradient, c10d.ReduceOp.AVG)
        bucket.momentum.lerp_(gradient, 1 - beta1)
        bucket.variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _average_momentum(self, bucket: _Bucket, gradient: Tensor, group: dict[str, Any]) -> None:
        bucket.momentum.lerp_(gradient, 1 - group["betas"][0])
        compressed_all_reduce(bucket.momentum, self.feedback[bucket.key], self.codec)
        bucket.momentum.masked_fill_(bucket.variance == 0, 0.0)

    def _update(self, bucket: _Bucket, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        first = second = 1.0
        if group["bias_correction"]:
            first = 1 - beta1 ** group["step"]
            second = 1 - beta2 ** min(group["step"], self.freeze_step)
        denominator = bucket.variance.sqrt().div_(math.sqrt(second)).add_(group["eps"])
        change = (bucket.momentum / denominator).mul_(-group["lr"] / first)
        for parameter, part in zip(bucket.parameters, bucket.views(change), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(part.to(parameter.dtype))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters can be added at any time: a group counts its own steps, so a new one starts with stage 1."""
        super().add_param_group(param_group)
        self._buckets = None  # moments are joined again; existing values are kept

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "feedback": self.feedback.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        feedback = state.pop("feedback", None)
        super().load_state_dict(state)
        self._take_moments(state)
        self._buckets = None
        communicator = world.communicator(self.group)
        self.feedback.reset()
        if feedback is None:
            return
        whose = feedback["rank"], feedback["world_size"]
        if whose == (communicator.rank, communicator.size):
            self.feedback.load_state_dict(feedback)
        else:
            warnings.warn(
                f"the state holds the residuals of rank {whose[0]} of {whose[1]}, but this is rank "
                f"{communicator.rank} of {communicator.size}: residuals start from zero. To keep them, save every "
                "rank's state and pass all of them to optimizer.feedback.load_state_dict([...]).",
                stacklevel=2,
            )

    def _take_moments(self, state: Mapping[str, Any]) -> None:
        """Restore the saved moments. They are kept in fp32, but torch has cast them to the parameters' dtype."""
        places = [place for group in state["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, parameter in zip(places, parameters, strict=True):
            for name, moment in state["state"].get(place, {}).items():
                self.state[parameter][name] = moment.to(parameter.device, copy=True)


def _flat_gradient(bucket: _Bucket) -> Tensor:
    """The gradients of a bucket in one new fp32 tensor; zeros where there is no gradient."""
    flat = torch.zeros_like(bucket.momentum)
    for parameter, view in zip(bucket.parameters, bucket.views(flat), strict=True):
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                raise UsageError("OneBitAdam does not support sparse gradients")
            view.copy_(parameter.grad)
    return flat
