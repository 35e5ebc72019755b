"""1-bit Adam (arXiv 2102.02888): Adam that communicates its momentum, compressed, instead of its gradient.

Stage 1 lasts `freeze_step` steps: Adam on plainly averaged gradients. In stage 2 the variance is frozen, each rank adds
its own gradient to the momentum, and the momenta are averaged in compressed form, with error feedback. A frozen
variance makes the update linear in the momentum, so errors cancel over the steps. Plain Adam would divide them by a
variance that contains them.

Each parameter counts its own steps, as in torch's Adam: a step counts for it if some rank has a gradient for it. So a
parameter that is unfrozen or added later starts with stage 1, and one without a gradient keeps its value, its moments
and its residuals. Parameters that reach stage 2 together travel together from then on.

A one-bit codec cannot represent zero. A parameter element that never had a gradient has a frozen variance of zero, and
any momentum divided by it would explode. These elements are left unchanged.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ringway.compress.codecs.codec import Codec, get_codec
from ringway.compress.collectives import compressed_all_reduce
from ringway.compress.feedback import ErrorFeedback, Slot
from ringway.errors import NotFinite, UsageError
from ringway.groups.split import refuse_split_parameters
from ringway.groups.world import world


@dataclass
class _Batch:
    """Parameters of one group and device whose gradients or momenta travel as one tensor."""

    group: dict[str, Any]
    parameters: list[Tensor]
    used: list[bool]
    """Whether a parameter takes part in this step. In stage 1, all do."""
    slot: Slot | None
    """The residuals; None in stage 1."""
    flat: Tensor

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that take part, and their parts of the flat tensor."""
        parts = self.flat.split([parameter.numel() for parameter in self.parameters])
        return [
            (parameter, part.view(parameter.shape))
            for parameter, part, used in zip(self.parameters, parts, self.used, strict=True)
            if used
        ]

    def put_unused_back(self) -> None:
        """Return the results of parameters that did not take part to the residuals that they came from."""
        assert self.slot is not None
        start = 0
        for parameter, used in zip(self.parameters, self.used, strict=True):
            where = slice(start, start + parameter.numel())
            if not used:
                self.slot.put_back(where, self.flat[where])
            start = where.stop


class OneBitAdam(Optimizer):
    """1-bit Adam. It averages over the group itself: do not wrap the model in DistributedDataParallel, except under
    `no_sync()`, and start from the same parameters on every rank.

    Set `freeze_step` to the step at which the variance has settled: the paper takes 15 to 25 % of all steps.
    `weight_decay` is decoupled, as in AdamW. With `bias_correction`, stage 1 is exactly AdamW. Any codec works; with a
    codec that has one scale per tensor, each parameter travels alone, as in DeepSpeed. `codec` must not be "auto",
    because the step number decides between the stages. The state holds this rank's residuals; if another rank's state
    is loaded, residuals start from zero, with a warning.

    A gradient that is NaN or infinite on any rank raises `NotFinite` on every rank, before anything has changed. With
    torch's `GradScaler`, all ranks skip such a step instead.
    """

    _step_supports_amp_scaling = True
    """GradScaler then calls `step` on every rank, also on those that found an infinity, and sets `found_inf` and
    `grad_scale`. Without it, such a rank would skip its step alone."""

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
        }
        super().__init__(params, defaults)
        self.freeze_step = freeze_step
        self.codec = get_codec(codec)
        self.group = group
        self.feedback = ErrorFeedback(group, residual_dtype=residual_dtype)

    @property
    def compressing(self) -> bool:
        """Whether the next step of some parameter belongs to stage 2."""
        return any(self._is_frozen(parameter) for group in self.param_groups for parameter in group["params"])

    def _is_frozen(self, parameter: Tensor) -> bool:
        """Whether the parameter's variance is frozen."""
        return bool(self.state.get(parameter, {}).get("step", 0) >= self.freeze_step)

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
        try:
            used = self._agreed_parameters()
            if used is None:
                return loss
            self._assign_buckets()
            batches = self._batches(used)
            self._exchange_all(batches)
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # GradScaler removes them after a step that succeeds only
                vars(self).pop(name, None)
            raise
        for batch in batches:  # only now, so that a failed exchange leaves parameters and moments as they were
            self._apply(batch)
        return loss

    # What all ranks do in this step

    def _agreed_parameters(self) -> set[int] | None:
        """The ids of the parameters that have a gradient on some rank; None if a rank's scaler found an infinity.

        Raises the same error on every rank if one of them cannot make the step.
        """
        communicator = world.communicator(self.group)
        parameters = [p for group in self.param_groups for p in group["params"] if p.numel()]
        refuse_split_parameters(parameters, communicator)
        mine = communicator.size - communicator.rank  # of several culprits, the maximum is the lowest rank's
        found_inf = getattr(self, "found_inf", None)
        skip = found_inf is not None and bool(found_inf)
        gradients = [p.grad for p in parameters if _has_gradient(p)]
        sparse = any(gradient.layout is not torch.strided for gradient in gradients)
        sound = skip or sparse or _all_finite(gradients)
        flags = torch.tensor(
            [skip, mine * sparse, mine * (not sound), *map(_has_gradient, parameters)], dtype=torch.int32
        )
        communicator.all_reduce(flags, c10d.ReduceOp.MAX, log_name="parameters used")
        skipped, refused, guilty, *used = flags.tolist()
        if refused:
            rank = communicator.size - refused
            raise UsageError(f"OneBitAdam does not support sparse gradients, and rank {rank} of its group has one")
        if skipped:
            return None
        if guilty:
            rank = communicator.size - guilty
            raise NotFinite(
                f"OneBitAdam: rank {rank} of group {communicator.name} had NaN or infinity in its gradients; "
                "nothing was changed",
                rank=rank,
            )
        return {id(parameter) for parameter, flag in zip(parameters, used, strict=True) if flag}

    def _assign_buckets(self) -> None:
        """Number the sets of parameters that enter stage 2 together: all of a device, or each alone if the scale spans
        a tensor. The state keeps the number: it finds the residuals again."""
        for group in self.param_groups:
            states = [self.state.get(parameter, {}) for parameter in group["params"]]
            first = 1 + max((state.get("bucket", -1) for state in states), default=-1)
            numbers: dict[Hashable, int] = {}
            for place, (parameter, state) in enumerate(zip(group["params"], states, strict=True)):
                if self._is_frozen(parameter) and "bucket" not in state:
                    together = place if self.codec.tensor_scale else parameter.device
                    state["bucket"] = numbers.setdefault(together, first + len(numbers))

    def _batches(self, used: set[int]) -> list[_Batch]:
        """The exchanges of this step. Buckets without a used parameter make none."""
        batches = []
        for index, group in enumerate(self.param_groups):
            joined: dict[Hashable, list[Tensor]] = {}
            for parameter in group["params"]:
                if self._is_frozen(parameter):
                    joined.setdefault(self.state[parameter]["bucket"], []).append(parameter)
                elif id(parameter) in used:
                    joined.setdefault(parameter.device, []).append(parameter)
            for key, parameters in joined.items():
                taking_part = [id(parameter) in used for parameter in parameters]
                if any(taking_part):
                    slot = self.feedback[f"group{index}.{key}"] if isinstance(key, int) else None
                    numel = sum(parameter.numel() for parameter in parameters)
                    flat = torch.zeros(numel, dtype=torch.float32, device=parameters[0].device)
                    batches.append(_Batch(group, parameters, taking_part, slot, flat))
        return batches

    def _exchange_all(self, batches: list[_Batch]) -> None:
        """Average all batches. If one fails, the residuals take back what the others have exchanged."""
        exchanged = []
        try:
            for batch in sorted(batches, key=lambda batch: batch.slot is not None):  # those without residuals first
                self._exchange(batch)
                exchanged.append(batch)
        except BaseException:
            for batch in exchanged:
                if batch.slot is not None:
                    result = batch.flat.clone()
                    self._fill(batch)
                    batch.slot.put_back(slice(None), result.sub_(batch.flat))
            raise

    def _exchange(self, batch: _Batch) -> None:
        """Average the batch's gradients, or momenta, into its flat tensor. Only residuals change."""
        self._fill(batch)
        if batch.slot is None:
            self._average_gradient(batch)
        else:
            compressed_all_reduce(batch.flat, batch.slot, self.codec)
            batch.put_unused_back()

    def _fill(self, batch: _Batch) -> None:
        """Write this rank's gradients, or its momenta, to the places of the parameters that take part."""
        beta1, scale, views = batch.group["betas"][0], getattr(self, "grad_scale", None), batch.views()
        for parameter, view in views:
            if parameter.grad is None:  # another rank may be the one that has a gradient
                view.zero_()
            else:
                view.copy_(parameter.grad)
        if scale is not None:
            torch._foreach_mul_([view for _, view in views], 1.0 / float(scale))
        if batch.slot is not None:
            for parameter, view in views:
                torch.lerp(self.state[parameter]["exp_avg"], view, 1 - beta1, out=view)

    def _average_gradient(self, batch: _Batch) -> None:
        communicator = world.communicator(self.group)
        communicator.all_reduce(batch.flat, c10d.ReduceOp.AVG)
        if not torch.isfinite(batch.flat).all():
            raise NotFinite(f"OneBitAdam: the average gradient over group {communicator.name} is not finite")

    def _apply(self, batch: _Batch) -> None:
        """Take over the averages: moments, then parameters."""
        group, views = batch.group, batch.views()
        beta1, beta2 = group["betas"]
        parameters, averages = [parameter for parameter, _ in views], [view for _, view in views]
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if "step" not in state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
                state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
            state["step"] += 1
        momenta, variances = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        if batch.slot is None:
            torch._foreach_lerp_(momenta, averages, 1 - beta1)
            torch._foreach_mul_(variances, beta2)
            torch._foreach_addcmul_(variances, averages, averages, 1 - beta2)
        else:
            for momentum, variance, average in zip(momenta, variances, averages, strict=True):
                momentum.copy_(average.masked_fill_(variance == 0, 0.0))
        self._update(group, parameters, states)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Any]]) -> None:
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        factors, roots = [-lr] * len(states), [1.0] * len(states)
        if group["bias_correction"]:
            factors = [-lr / (1 - beta1 ** state["step"]) for state in states]
            roots = [math.sqrt(1 - beta2 ** min(state["step"], self.freeze_step)) for state in states]
        denominators = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(denominators, roots)
        torch._foreach_add_(denominators, group["eps"])
        changes = torch._foreach_div([state["exp_avg"] for state in states], denominators)
        torch._foreach_mul_(changes, factors)
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, changes)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "feedback": self.feedback.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        feedback = state.pop("feedback", None)
        super().load_state_dict(state)
        self._take_moments(state)
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
            for name, value in state["state"].get(place, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)
        for group in self.param_groups:
            steps = group.pop("step", None)  # ringway 0.1 counted steps by group
            for parameter in group["params"]:
                if steps is not None and parameter in self.state:
                    self.state[parameter].setdefault("step", steps)


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None


def _all_finite(gradients: list[Tensor]) -> bool:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for local in by_device.values():
        peaks = torch._foreach_norm(local, float("inf"))
        if not torch.isfinite(torch.stack([peak.to(torch.float32) for peak in peaks])).all():
            return False
    return True
