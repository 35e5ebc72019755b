"""0/1 Adam (arXiv 2202.06009): 1-bit Adam without a separate warm-up, and with steps that communicate nothing.

Of the steps up to `var_freeze_step`, a few update the variance: `var_update_scaler` steps in a row, then as many with
an interval of 2, then with 4, and so on. These steps average gradients uncompressed. The others send the momentum in
compressed form, as 1-bit Adam does. After `var_freeze_step` the variance is frozen, and ranks exchange only once in an
interval: 1 step at first, doubled after every `local_step_scaler` steps, up to `local_step_clipper`. Intervals are
aligned, as in DeepSpeed: a step belongs to one of the exchanges if its number is a multiple of the interval.

What travels is u, the sum of the rate times the momentum since the last exchange:

    u <- u + rate * m            in every step, with m <- beta1 * m + (1 - beta1) * gradient
    x <- anchor - u / D          between exchanges, D = sqrt(v) + eps
    x <- anchor - mean(u) / D    at an exchange, then m <- mean(u) / (sum of rates), u <- 0, anchor <- x

The anchor is the parameter at the last exchange, the same bits on every rank. Weight decay is decoupled: it shrinks the
anchor, u and the sum of rates alike. In the steps that average gradients, the momentum is averaged exactly too, so they
do not send u as well; the paper does both.

In a step without communication, ranks cannot agree. A rank whose gradients are not finite leaves them out, as if they
were zero, and all ranks raise at the next exchange; with a GradScaler, nothing is raised. A rank without a gradient for
a parameter waits: if no rank has one until the next exchange, the parameter stays as it was, and otherwise the rank
catches up with gradients of zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ringway.compress.codecs.codec import Codec
from ringway.compress.optimizers.base import CompressedOptimizer, has_gradient, refuse_without_effect
from ringway.compress.optimizers.batch import Batch
from ringway.errors import NotFinite, UsageError

LOCAL_STATE = ("momentum_accumulator", "anchor", "waiting", "lrs")
"""What a parameter's state holds between exchanges that are several steps apart."""


class ZeroOneAdam(CompressedOptimizer):
    """0/1 Adam. It averages over the group itself: do not wrap the model in DistributedDataParallel, except under
    `no_sync()`, and start from the same parameters on every rank.

    The arguments have DeepSpeed's names and defaults. `cuda_aware` and `comm_backend_name` have no effect: the exchange
    runs on `group`. An engine as `deepspeed` is refused. `bias_correction`, `eps_inside_sqrt` and decoupled
    `weight_decay` are those of Adam (DeepSpeed ignores the first two); with `bias_correction=False` and
    `eps_inside_sqrt=True` the formulas are the paper's. `codec`, checkpoints, NaN and GradScaler: see `OneBitAdam`.
    Between exchanges that are several steps apart, parameters differ between ranks, so save and load every rank's own.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
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
        refuse_without_effect("ZeroOneAdam", amsgrad, max_grad_norm, deepspeed)
        for name, value in (
            ("var_freeze_step", var_freeze_step),
            ("var_update_scaler", var_update_scaler),
            ("local_step_scaler", local_step_scaler),
            ("local_step_clipper", local_step_clipper),
        ):
            if value < 1:
                raise UsageError(f"ZeroOneAdam: {name} must be at least 1, not {value}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
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
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        self._unreported = (False, False)
        """Whether this rank left out sparse gradients, or gradients that were not finite, since the last exchange."""

    # The policies: what the next step of a parameter does

    def _is_frozen(self, parameter: Tensor) -> bool:
        return bool(self.state.get(parameter, {}).get("step", 0) >= self.var_freeze_step)

    def _updates_variance(self, parameter: Tensor) -> bool:
        state = self.state.get(parameter, {})
        return not self._is_frozen(parameter) and (state.get("step", 0) + 1) % state.get("var_interval", 1) == 0

    def _sends_gradient(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        if self._is_frozen(parameter):
            return False
        return self._updates_variance(parameter) or not float(group["lr"])  # a rate of zero: u says nothing about m

    def _is_local(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Whether the parameter's next step exchanges nothing."""
        if not self._is_frozen(parameter):
            return False
        state = self.state[parameter]
        rates = state.get("lrs", 0.0) + float(group["lr"])
        return bool((state["step"] + 1) % state["local_step_interval"]) or not rates  # m is u divided by the rates

    def _compresses(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        return not (self._sends_gradient(parameter, group) or self._is_local(parameter, group))

    def _has_gradient(self, parameter: Tensor) -> bool:
        """Also if it had one in a local step since the last exchange."""
        return has_gradient(parameter) or self.state.get(parameter, {}).get("waiting", ()) is None

    def _variance_steps(self, state: dict[str, Any]) -> int:
        """The number of steps that updated the variance."""
        return int(self.var_update_scaler * (state["var_interval"].bit_length() - 1) + state["var_counter"])

    # A step

    def _step(self) -> None:
        members = [(p, group) for group in self.param_groups for p in group["params"] if p.numel()]
        known = [self._is_local(p, group) for p, group in members if "step" in self.state.get(p, {})]
        if known and all(known):
            skip, sparse, spoiled = super()._local_faults()
            self._unreported = self._unreported[0] or sparse, self._unreported[1] or spoiled
            self._step_locally([member for member in members if member[0] in self.state], skip or sparse or spoiled)
            return
        used = self._agreed_parameters()
        if used is None:
            return
        local = [(p, group) for p, group in members if self._is_local(p, group)]
        idle = [p for p, group in members if self._is_frozen(p) and self._compresses(p, group) and id(p) not in used]
        self._assign_buckets()
        batches = self._batches(used)
        self._exchange_all(batches)
        for batch in batches:
            self._apply(batch)
        self._step_locally(local, without_gradients=False)
        for parameter in idle:  # no rank had a gradient since the last exchange
            self.state[parameter]["step"] += 1
            self._end_interval(parameter)

    def _local_faults(self) -> tuple[bool, bool, bool]:
        skip, sparse, spoiled = super()._local_faults()
        return skip, sparse or self._unreported[0], spoiled or self._unreported[1]

    def _agreed_parameters(self) -> set[int] | None:
        try:
            used = super()._agreed_parameters()
        except (UsageError, NotFinite):
            self._unreported = (False, False)
            raise
        if used is not None:
            self._unreported = (False, False)
        return used

    # Exchanges

    def _fill_compressed(self, batch: Batch) -> None:
        group = batch.group
        for parameter, view in batch.views():
            state = self.state[parameter]
            momentum, accumulated = self._caught_up(state, group)
            torch.lerp(momentum, view, 1 - group["betas"][0], out=view)
            view.mul_(self._rate(group, state["step"] + 1))
            if accumulated is not None:
                view.add_(accumulated, alpha=self._decay(group))

    def _caught_up(self, state: dict[str, Any], group: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The momentum and u after the steps in which this rank waited for a gradient, as copies if there are any."""
        momentum, accumulated = state["exp_avg"], state.get("momentum_accumulator")
        if state.get("waiting"):
            momentum, accumulated = momentum.clone(), state["momentum_accumulator"].clone()
            for rate, decay in state["waiting"]:
                momentum.mul_(group["betas"][0])
                accumulated.mul_(decay).add_(momentum, alpha=rate)
        return momentum, accumulated

    def _apply(self, batch: Batch) -> None:
        views, group = batch.views(), batch.group
        parameters, averages = [parameter for parameter, _ in views], [view for _, view in views]
        updating = [self._updates_variance(parameter) for parameter in parameters]
        states = self._count_step(parameters)
        for state in states:
            for name, value in (("var_interval", 1), ("var_counter", 0)):
                state.setdefault(name, value)
                state.setdefault(f"local_step_{name.removeprefix('var_')}", value)
        if batch.slot is None:
            self._apply_gradients(group, parameters, states, averages, updating)
        else:
            self._apply_sums(group, parameters, states, averages)

    def _apply_gradients(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        states: list[dict[str, Any]],
        averages: list[Tensor],
        updating: list[bool],
    ) -> None:
        for state, average, updates in zip(states, averages, updating, strict=True):
            if not updates:  # the rate is zero
                state["exp_avg"].lerp_(average, 1 - group["betas"][0])
                continue
            self._update_moments(group, [state], [average])
            state["var_counter"] += 1
            if state["var_counter"] == self.var_update_scaler:
                state["var_counter"], state["var_interval"] = 0, 2 * state["var_interval"]
        self._descend(group, parameters, states, list(map(self._variance_steps, states)))

    def _apply_sums(
        self, group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Any]], sums: list[Tensor]
    ) -> None:
        decay = self._decay(group)
        counts = list(map(self._variance_steps, states))
        denominators = self._denominators(group, [state["exp_avg_sq"] for state in states], counts)
        for parameter, state, total, denominator in zip(parameters, states, sums, denominators, strict=True):
            total.masked_fill_(state["exp_avg_sq"] == 0, 0.0)
            rates = decay * state.get("lrs", 0.0) + self._rate(group, state["step"])
            torch.div(total, rates, out=state["exp_avg"])
            if "anchor" in state:
                self._catch_up_anchor(state)
                parameter.copy_(state["anchor"])
            parameter.mul_(decay).sub_(total.div_(denominator))
            if self._was_frozen(state):
                self._end_interval(parameter)

    def _was_frozen(self, state: dict[str, Any]) -> bool:
        """Whether the variance was frozen in the step that has just been counted."""
        return bool(state["step"] > self.var_freeze_step)

    def _end_interval(self, parameter: Tensor) -> None:
        """Start to accumulate again, after an exchange or after steps without a gradient on any rank."""
        state = self.state[parameter]
        if "anchor" in state:
            state["anchor"].copy_(parameter)
            state["momentum_accumulator"].zero_()
            state["waiting"], state["lrs"] = [], 0.0
        self._count_frozen_step(state)

    def _count_frozen_step(self, state: dict[str, Any]) -> None:
        state["local_step_counter"] += 1
        if state["local_step_counter"] == self.local_step_scaler:
            state["local_step_counter"] = 0
            state["local_step_interval"] = min(self.local_step_clipper, 2 * state["local_step_interval"])

    # Steps between exchanges

    def _step_locally(self, members: list[tuple[Tensor, dict[str, Any]]], without_gradients: bool) -> None:
        """Count a step of every one of these parameters, and make it for those that have a gradient on this rank, or
        had one since the last exchange."""
        moving = []
        for parameter, group in members:
            state = self.state[parameter]
            if "anchor" not in state:
                state["anchor"] = parameter.detach().clone()
                state["momentum_accumulator"] = torch.zeros_like(state["exp_avg"])
                state["waiting"], state["lrs"] = [], 0.0
            state["step"] += 1
            rate, decay = self._rate(group, state["step"]), self._decay(group)
            state["lrs"] = decay * state["lrs"] + rate
            given = has_gradient(parameter) and not without_gradients
            if given or state["waiting"] is None:
                moving.append((parameter, group, torch.zeros_like(state["exp_avg"]), given))
            else:
                state["waiting"].append((rate, decay))
            self._count_frozen_step(state)
        self._write_gradients([(parameter, gradient) for parameter, _, gradient, given in moving if given])
        for parameter, group, gradient, _ in moving:
            self._move_locally(parameter, group, gradient)

    def _move_locally(self, parameter: Tensor, group: dict[str, Any], gradient: Tensor) -> None:
        state = self.state[parameter]
        rate, decay = self._rate(group, state["step"]), self._decay(group)
        momentum, accumulated = self._caught_up(state, group)
        assert accumulated is not None
        torch.lerp(momentum, gradient, 1 - group["betas"][0], out=state["exp_avg"])
        state["exp_avg"].masked_fill_(state["exp_avg_sq"] == 0, 0.0)
        torch.add(accumulated.mul_(decay), state["exp_avg"], alpha=rate, out=state["momentum_accumulator"])
        self._catch_up_anchor(state)
        state["anchor"].mul_(decay)
        state["waiting"] = None
        (denominator,) = self._denominators(group, [state["exp_avg_sq"]], [self._variance_steps(state)])
        parameter.copy_(state["anchor"] - state["momentum_accumulator"] / denominator)

    @staticmethod
    def _catch_up_anchor(state: dict[str, Any]) -> None:
        for _, decay in state["waiting"] or ():
            state["anchor"].mul_(decay)

    # Checkpoints

    def _take_moments(self, state: Mapping[str, Any]) -> None:
        super()._take_moments(state)
        for own in self.state.values():
            if "anchor" not in own:  # DeepSpeed's, which drops what it accumulated when it loads a checkpoint
                for name in LOCAL_STATE:
                    own.pop(name, None)
