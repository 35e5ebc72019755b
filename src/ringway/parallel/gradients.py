"""Clipping and scaling of gradients where parameters are split: the ranks of a model-parallel group do the same.

torch's own functions see only this rank's parts. Ranks then clip with different norms, or one skips a step that the
others take, and the parameters that all of them hold are no longer equal.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.nn.parallel import distributed as ddp
from torch.nn.utils import clip_grad, clip_grads_with_norm_

from ringway.call import ReduceOp
from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.split import refuse_split_parameters, split_over
from ringway.groups.world import world
from ringway.torch_patches import patch

_INSTEAD = "use ringway.parallel.{} instead, which agrees over the ranks"


def _groups_of(parameters: Iterable[Tensor]) -> list[Communicator]:
    """The groups over which the parameters are split, in the order of the parameters, which all ranks share."""
    groups = (split_over(parameter) for parameter in parameters)
    return list(dict.fromkeys(group for group in groups if group is not None and group.size > 1))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for a model with split parameters: the norm is that of the whole model.

    A split parameter counts with all its parts, and one that is whole on every rank counts once. All ranks of the
    model-parallel group call this together, with the same parameters, and get the same norm. Without split parameters
    nothing is sent.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    power = float(norm_type)
    if not power > 0:
        raise UsageError(f"clip_grad_norm_: norm_type={norm_type} must be above 0 or 'inf'")
    groups = _groups_of(parameters)
    by_group: dict[Communicator | None, list[Tensor]] = {group: [] for group in (None, *groups)}
    for parameter in parameters:
        if parameter.grad is not None:
            over = split_over(parameter)
            by_group[over if over in by_group else None].append(parameter.grad)
    device = next((p.grad.device for p in parameters if p.grad is not None), torch.device("cpu"))
    # Parameters that are whole have equal gradients on all ranks, but for rounding: the first rank's are counted.
    counted = not groups or groups[0].rank == 0
    total = _joined(_powers(by_group[None] if counted else [], power, device), power)
    for place, group in enumerate(groups):
        part = _powers(by_group[group], power, device)
        if place == 0:
            total = _over(group, _joined([total, *part], power), power)
        else:
            total = _joined([total, _over(group, _joined(part, power), power)], power)
    norm = total if math.isinf(power) else total ** (1.0 / power)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {power} of the gradients is not finite, so they cannot be clipped; with "
            "error_if_nonfinite=False they are scaled by it anyway"
        )
    norm = norm.to(_norm_dtype(parameters))
    clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm


def _powers(gradients: list[Tensor], power: float, device: torch.device) -> list[Tensor]:
    """Of each gradient, the sum of its elements' magnitudes to the power, or their maximum, in double precision."""
    norms = (torch.linalg.vector_norm(g, power, dtype=_norm_dtype_of(g)).to(device, torch.float64) for g in gradients)
    return [torch.zeros((), dtype=torch.float64, device=device), *(n if math.isinf(power) else n**power for n in norms)]


def _joined(parts: list[Tensor] | Tensor, power: float) -> Tensor:
    joined = torch.stack(parts) if isinstance(parts, list) else parts
    return joined.amax() if math.isinf(power) else joined.sum()


def _over(group: Communicator, part: Tensor, power: float) -> Tensor:
    """The parts of all ranks joined. They are gathered, because a maximum over ranks may lose a NaN."""
    parts = part.new_empty(group.size)
    group.all_gather_into_tensor(parts, part.reshape(1), log_name="gradient norm")
    return _joined(parts, power)


def _norm_dtype_of(gradient: Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype is torch.float64 else torch.float32


def _norm_dtype(parameters: list[Tensor]) -> torch.dtype:
    first = next((p.grad for p in parameters if p.grad is not None), None)
    return torch.float32 if first is None else _norm_dtype_of(first)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a model with split parameters: if one rank of the model-parallel group finds an
    infinity or a NaN, all of them skip the step and lower the scale.

    Gradients averaged by data-parallel hooks need nothing more: the mean is not finite on all ranks or on none. `group`
    adds ranks whose steps must agree for other reasons.
    """

    def __init__(self, *arguments: Any, group: c10d.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._group = group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        groups = _groups_of(parameter for group in optimizer.param_groups for parameter in group["params"])
        if self._group is not None:
            groups.append(world.communicator(self._group))
        found = torch.zeros_like(found_inf)
        for here in by_device.values():
            found = torch.maximum(found, here.to(found.device))
        for group in groups:
            group.all_reduce(found, ReduceOp.MAX, log_name="found infinities")
        for here in by_device.values():
            here.copy_(found)
        return by_device


@cache
def watch_torch() -> None:
    """From now on, warn if torch's own clip_grad_norm_ or GradScaler is used on split parameters, and raise if
    DistributedDataParallel would give all ranks the part of rank 0.

    All of them call a function of their module, and those are wrapped here: so a program is warned however it has
    imported them. If a version of torch lacks them, there is no warning.
    """

    def clip_and_warn(clip: Any) -> Any:
        def wrapped(parameters: Any, *arguments: Any, **options: Any) -> None:
            if _groups_of([parameters] if isinstance(parameters, Tensor) else parameters):
                warnings.warn(
                    "torch's clip_grad_norm_ sees only this rank's part of the split parameters, so ranks clip "
                    f"differently and their parameters diverge; {_INSTEAD.format('clip_grad_norm_')}",
                    stacklevel=4,
                )
            clip(parameters, *arguments, **options)

        return wrapped

    def unscale_and_warn(unscale: Any) -> Any:
        def wrapped(self: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if not isinstance(self, GradScaler) and _groups_of(parameters):
                warnings.warn(
                    "torch's GradScaler sees only this rank's part of the split parameters, so ranks may skip "
                    f"different steps and diverge; {_INSTEAD.format('GradScaler')}",
                    stacklevel=3,
                )
            return unscale(self, optimizer, *arguments, **options)

        return wrapped

    def refuse_and_verify(verify: Any) -> Any:
        def wrapped(process_group: Any, tensors: Any, *arguments: Any, **options: Any) -> Any:
            if _groups_of(tensors):
                refuse_split_parameters(tensors, world.communicator(process_group))
            return verify(process_group, tensors, *arguments, **options)

        return wrapped

    patch("clip_grad_norm", "_clip_grads_with_norm_", clip_grad, by=clip_and_warn)
    patch("grad_scaler", "_unscale_grads_", torch.amp.GradScaler, by=unscale_and_warn)
    patch("ddp_split", "_verify_param_shape_across_processes", ddp, by=refuse_and_verify)
