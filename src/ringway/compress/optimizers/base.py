"""What the optimizers that communicate in compressed form share: agreement, exchange, rollback and checkpoints.

A step has two parts. First the ranks exchange: gradients plainly, or what the optimizer computes from them in
compressed form, with error feedback. Only residuals change in this part, and they take back what was exchanged if it
fails. Then each rank applies the averages, which are the same on all of them.

Each parameter counts its own steps, as in torch's Adam: a step counts for it if some rank has a gradient for it. One
without a gradient keeps its value, its moments and its residuals. Parameters that are first compressed together travel
together from then on.

A one-bit codec cannot represent zero. A parameter element that never had a gradient has a variance of zero, and any
momentum divided by it would explode. These elements are left unchanged.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, overload

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ringway.compress.codecs.codec import Codec, get_codec
from ringway.compress.collectives import compressed_all_reduce
from ringway.compress.feedback import ErrorFeedback
from ringway.compress.optimizers.batch import Batch
from ringway.errors import NotFinite, UsageError
from ringway.groups.split import refuse_split_parameters
from ringway.groups.world import world

DEEPSPEED_STATE = ("worker_error", "server_error", "tensor_size", "corrected_tensor_size", "server_chunk_size")
"""What a checkpoint of DeepSpeed holds for its own exchange: residuals of one rank, in DeepSpeed's layout."""


class CompressedOptimizer(Optimizer, abc.ABC):
    """The base of `OneBitAdam`, `ZeroOneAdam` and `OneBitLamb`. A subclass says which parameters it compresses in this
    step (`_compresses`), what it sends (`_fill_compressed`) and what it does with the averages (`_apply`)."""

    _step_supports_amp_scaling = True
    """GradScaler then calls `step` on every rank, also on those that found an infinity, and sets `found_inf` and
    `grad_scale`. Without it, such a rank would skip its step alone."""
    _fuses_tensor_scales: ClassVar[bool] = False
    """Whether parameters travel together even if the codec has one scale for all of them."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        codec: str | Codec,
        group: c10d.ProcessGroup | None,
        residual_dtype: torch.dtype,
        eps_inside_sqrt: bool = False,
    ) -> None:
        lr, betas, eps, weight_decay = (defaults[name] for name in ("lr", "betas", "eps", "weight_decay"))
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise UsageError(f"{self._name}: invalid lr={lr}, betas={betas}, eps={eps} or weight_decay={weight_decay}")
        super().__init__(params, defaults)
        self.codec = get_codec(codec)
        self.group = group
        self.feedback = ErrorFeedback(group, residual_dtype=residual_dtype)
        self._eps_inside_sqrt = eps_inside_sqrt

    @property
    def compressing(self) -> bool:
        """Whether the next step of some parameter is compressed."""
        return any(self._compresses(p, group) for group in self.param_groups for p in group["params"])

    @property
    def _name(self) -> str:
        return type(self).__name__

    # What a subclass defines

    @abc.abstractmethod
    def _compresses(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Whether the next step of a parameter of this group is compressed. The same on every rank."""

    @abc.abstractmethod
    def _fill_compressed(self, batch: Batch) -> None:
        """Turn the gradients in a batch's views into what this rank sends. Changes nothing else."""

    @abc.abstractmethod
    def _apply(self, batch: Batch) -> None:
        """Take over the averages: moments, then parameters."""

    def _prepare_bucket(self, parameters: list[Tensor]) -> None:
        """Called once for parameters that travel together from now on."""
        return

    def _has_gradient(self, parameter: Tensor) -> bool:
        """Whether this rank has a gradient of the parameter to exchange."""
        return has_gradient(parameter)

    # A step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch._disable_dynamo  # between two graphs: the compiler cannot trace the collectives
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step()
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # GradScaler removes them after a step that succeeds only
                vars(self).pop(name, None)
            raise
        return loss

    def _step(self) -> None:
        used = self._agreed_parameters()
        if used is not None:
            self._assign_buckets()
            batches = self._batches(used)
            self._exchange_all(batches)
            for batch in batches:  # only now, so that a failed exchange leaves parameters and moments as they were
                self._apply(batch)

    # What all ranks do in this step

    def _agreed_parameters(self) -> set[int] | None:
        """The ids of the parameters that have a gradient on some rank; None if a rank's scaler found an infinity.

        Raises the same error on every rank if one of them cannot make the step.
        """
        communicator = world.communicator(self.group)
        parameters = self._parameters()
        refuse_split_parameters(parameters, communicator)
        mine = communicator.size - communicator.rank  # of several culprits, the maximum is the lowest rank's
        skip, sparse, spoiled = self._local_faults()
        flags = torch.tensor(
            [skip, mine * sparse, mine * spoiled, *map(self._has_gradient, parameters)], dtype=torch.int32
        )
        communicator.all_reduce(flags, c10d.ReduceOp.MAX, log_name="parameters used")
        skipped, refused, guilty, *used = flags.tolist()
        if refused:
            rank = communicator.size - refused
            raise UsageError(f"{self._name} does not support sparse gradients, and rank {rank} of its group has one")
        if skipped:
            return None
        if guilty:
            rank = communicator.size - guilty
            raise NotFinite(
                f"{self._name}: rank {rank} of group {communicator.name} had NaN or infinity in its gradients; "
                "this step changed nothing",
                rank=rank,
            )
        return {id(parameter) for parameter, flag in zip(parameters, used, strict=True) if flag}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.numel()]

    def _local_faults(self) -> tuple[bool, bool, bool]:
        """Why this rank cannot make a step: its scaler found an infinity, it has a sparse gradient, or one that is not
        finite."""
        found_inf = getattr(self, "found_inf", None)
        skip = found_inf is not None and bool(found_inf)
        gradients = [p.grad for p in self._parameters() if p.requires_grad and p.grad is not None]
        sparse = any(gradient.layout is not torch.strided for gradient in gradients)
        return skip, sparse, not (skip or sparse or _all_finite(gradients))

    def _assign_buckets(self) -> None:
        """Number the sets of parameters that are compressed together: all of a device, or each alone if the scale spans
        a tensor. The state keeps the number: it finds the residuals again."""
        for group in self.param_groups:
            states = [self.state.get(parameter, {}) for parameter in group["params"]]
            first = 1 + max((state.get("bucket", -1) for state in states), default=-1)
            joined: dict[Hashable, list[Tensor]] = {}
            for place, (parameter, state) in enumerate(zip(group["params"], states, strict=True)):
                if "bucket" not in state and self._compresses(parameter, group):
                    alone = self.codec.tensor_scale and not self._fuses_tensor_scales
                    joined.setdefault(place if alone else parameter.device, []).append(parameter)
            for number, parameters in enumerate(joined.values(), start=first):
                for parameter in parameters:
                    self.state[parameter]["bucket"] = number
                self._prepare_bucket(parameters)

    def _batches(self, used: set[int]) -> list[Batch]:
        """The exchanges of this step. Buckets without a parameter that takes part make none."""
        batches = []
        for index, group in enumerate(self.param_groups):
            plain: dict[torch.device, list[Tensor]] = {}
            buckets: dict[int, list[Tensor]] = {}
            for parameter in group["params"]:
                bucket = self.state.get(parameter, {}).get("bucket")
                if bucket is not None:
                    buckets.setdefault(bucket, []).append(parameter)
                if id(parameter) in used and self._sends_gradient(parameter, group):
                    plain.setdefault(parameter.device, []).append(parameter)
            for parameters in plain.values():
                batches.append(Batch.of(group, parameters, [True] * len(parameters), None))
            for bucket, parameters in buckets.items():
                taking_part = [id(p) in used and self._compresses(p, group) for p in parameters]
                if any(taking_part):
                    batches.append(Batch.of(group, parameters, taking_part, self.feedback[f"group{index}.{bucket}"]))
        return batches

    def _sends_gradient(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Whether the parameter's gradient is averaged uncompressed in this step."""
        return not self._compresses(parameter, group)

    def _exchange_all(self, batches: list[Batch]) -> None:
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

    def _exchange(self, batch: Batch) -> None:
        """Average what the batch sends into its flat tensor. Only residuals change."""
        self._fill(batch)
        if batch.slot is None:
            self._average_gradient(batch)
        else:
            compressed_all_reduce(batch.flat, batch.slot, self.codec)
            batch.put_unused_back()

    def _fill(self, batch: Batch) -> None:
        """Write what this rank sends to the places of the parameters that take part."""
        self._write_gradients(batch.views())
        if batch.slot is not None:
            self._fill_compressed(batch)

    def _write_gradients(self, views: list[tuple[Tensor, Tensor]]) -> None:
        """Write this rank's gradients, unscaled, or zeros: another rank may be the one that has a gradient."""
        for parameter, view in views:
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        scale = getattr(self, "grad_scale", None)
        if scale is not None and views:
            torch._foreach_mul_([view for _, view in views], 1.0 / float(scale))

    def _average_gradient(self, batch: Batch) -> None:
        communicator = world.communicator(self.group)
        communicator.all_reduce(batch.flat, c10d.ReduceOp.AVG)
        if not torch.isfinite(batch.flat).all():
            raise NotFinite(f"{self._name}: the average gradient over group {communicator.name} is not finite")

    # Moments

    def _count_step(self, parameters: list[Tensor]) -> list[dict[str, Any]]:
        """The states of parameters that make a step. Their moments are created at the first one."""
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if "step" not in state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
                state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
            state["step"] += 1
        return states

    def _update_moments(self, group: dict[str, Any], states: list[dict[str, Any]], gradients: list[Tensor]) -> None:
        """Add averaged gradients to both moments."""
        beta1, beta2 = group["betas"]
        variances = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_([state["exp_avg"] for state in states], gradients, 1 - beta1)
        torch._foreach_mul_(variances, beta2)
        torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)

    def _denominators(self, group: dict[str, Any], variances: list[Tensor], steps: list[int]) -> list[Tensor]:
        """The roots of variances that contain so many steps, plus epsilon."""
        corrections = [1 - group["betas"][1] ** count if group["bias_correction"] else 1.0 for count in steps]
        if self._eps_inside_sqrt:
            inside = torch._foreach_div(variances, corrections)
            torch._foreach_add_(inside, group["eps"])
            return list(torch._foreach_sqrt(inside))
        roots = torch._foreach_sqrt(variances)
        torch._foreach_div_(roots, [math.sqrt(correction) for correction in corrections])
        torch._foreach_add_(roots, group["eps"])
        return list(roots)

    @staticmethod
    def _rate(group: dict[str, Any], step: int) -> float:
        """The learning rate of a parameter's step, corrected for the momentum's bias."""
        return float(group["lr"]) / (1 - group["betas"][0] ** step if group["bias_correction"] else 1.0)

    @staticmethod
    def _decay(group: dict[str, Any]) -> float:
        """What decoupled weight decay leaves of a parameter in one step."""
        return 1 - float(group["lr"]) * float(group["weight_decay"])

    def _descend(
        self, group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Any]], variance_steps: list[int]
    ) -> None:
        """Adam's update of parameters whose moments are up to date."""
        denominators = self._denominators(group, [state["exp_avg_sq"] for state in states], variance_steps)
        changes = torch._foreach_div([state["exp_avg"] for state in states], denominators)
        torch._foreach_mul_(changes, [-self._rate(group, state["step"]) for state in states])
        torch._foreach_mul_(parameters, self._decay(group))
        torch._foreach_add_(parameters, changes)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "feedback": self.feedback.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        feedback = state.pop("feedback", None)
        super().load_state_dict(state)
        self._take_moments(state)
        self.feedback.load_own_state(feedback)

    def _take_moments(self, state: Mapping[str, Any]) -> None:
        """Restore the saved moments. They are kept in fp32, but torch has cast them to the parameters' dtype."""
        places = [place for group in state["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, parameter in zip(places, parameters, strict=True):
            for name, value in state["state"].get(place, {}).items():
                if name in DEEPSPEED_STATE:
                    self.state[parameter].pop(name, None)
                elif isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)
        for group in self.param_groups:
            steps = group.pop("step", None)  # ringway 0.1 counted steps by group
            for parameter in group["params"]:
                if steps is not None and parameter in self.state:
                    self.state[parameter].setdefault("step", steps)


def has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None


def refuse_without_effect(name: str, amsgrad: bool, max_grad_norm: float, deepspeed: object) -> None:
    """Refuse arguments of DeepSpeed that would have no effect."""
    if amsgrad:
        raise UsageError(f"{name}: amsgrad=True is not supported")
    if max_grad_norm:
        raise UsageError(
            f"{name}: max_grad_norm={max_grad_norm} would have no effect, as in DeepSpeed; clip gradients before step()"
        )
    if deepspeed is not None:
        raise UsageError(
            f"{name}: deepspeed: an engine averages gradients, and this optimizer would average them again. The "
            "optimizers of ringway.compat.deepspeed take an engine"
        )


def _all_finite(gradients: list[Tensor]) -> bool:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for local in by_device.values():
        peaks = torch._foreach_norm(local, float("inf"))
        if not torch.isfinite(torch.stack([peak.to(torch.float32) for peak in peaks])).all():
            return False
    return True
