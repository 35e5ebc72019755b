"""The compressed all-reduce as users call it: checks its arguments, and runs it now or in the background."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.compress.all_reduce import CPU_SPLIT, CUDA_SPLIT, Setting
from ringway.compress.auto import measured_forecast
from ringway.compress.codecs.codec import Codec, get_codec
from ringway.compress.feedback import ErrorFeedback, Slot, as_slot, is_outside
from ringway.compress.kernels.base import VALUE_DTYPES
from ringway.compress.kernels.select import kernels_for
from ringway.compress.outcome import Outcome, PlainStatus
from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.world import world
from ringway.work import Work

CPU_WINDOW_BYTES = 1 << 20
"""Size of a window on the CPU, in the codec's bytes: small enough that encoding overlaps with the wire, large enough to
be worth two collectives. The best of the sizes tried over 1 Gbit/s, for both onebit and int8."""
CUDA_WINDOW = 1 << 28
"""Size of a window on a GPU, in elements. The launches of a window cost more than it gains unless it is large."""


def compressed_all_reduce(
    tensor: Tensor,
    feedback: ErrorFeedback | Slot | None,
    codec: str | Codec = "onebit",
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    kernels: str | None = None,
    not_finite: str = "raise",
    window: int | None = None,
    servers: bool = True,
) -> Work | None:
    """Average `tensor` over the group, in place, sending `codec`'s bytes instead of the values.

    `feedback` is an `ErrorFeedback`, one of its slots (`feedback["layer1"]`), or None for no feedback, in which case
    the result is biased. `group` defaults to the feedback's group. `codec="auto"` (or `"auto:int8"`) compresses only
    where that is faster (see `auto`). With `async_op` the call returns a Work; the first asynchronous call creates a
    group, so every rank must make it at the same point.

    NaN or infinity on any rank raises `NotFinite` on every rank. With `not_finite="propagate"` the tensor becomes NaN
    at those places instead, for programs that check for it (a gradient scaler). Residuals stay valid. On a GPU, an
    asynchronous call reports it at the next call with the same feedback.

    `kernels` forces `reference`, `native` or `triton`; `window` is the number of elements that travel together. With
    `servers=False` every rank sends its encoding to all others, and averages theirs itself: for sparse codecs, whose
    average would otherwise be made sparse again.
    """
    if is_outside(group):
        warnings.warn("compressed_all_reduce: this rank is not in the given group", stacklevel=2)
        return None
    slot = as_slot(feedback)
    group = _group_of(slot, group)
    communicator = world.communicator(group)
    _check(tensor, not_finite)
    auto, codec = _split_auto(codec)
    chosen = get_codec(codec)
    setting = Setting(
        chosen,
        kernels_for(chosen, tensor.device, kernels),
        not_finite == "raise",
        window or (CUDA_WINDOW if tensor.is_cuda else _cpu_window(chosen)),
        CUDA_SPLIT if tensor.is_cuda else CPU_SPLIT,
        servers,
    )
    if auto:
        return _all_reduce_where_it_helps(tensor, slot, communicator, setting, async_op)
    return _start(tensor, slot, communicator, setting, async_op)


def _cpu_window(codec: Codec) -> int:
    """The number of elements whose encoding takes `CPU_WINDOW_BYTES`."""
    sample = 1 << 20
    return CPU_WINDOW_BYTES * sample // max(1, codec.nbytes(sample))


def _split_auto(codec: str | Codec) -> tuple[bool, str | Codec]:
    """Whether the caller asked for "auto", and the codec to compress with: "auto" means "auto:onebit"."""
    if isinstance(codec, str) and codec.partition(":")[0] == "auto":
        return True, codec.partition(":")[2] or "onebit"
    return False, codec


def _all_reduce_where_it_helps(
    tensor: Tensor, slot: Slot | None, communicator: Communicator, setting: Setting, async_op: bool
) -> Work | None:
    """Compress if the measured link and codec predict that it is faster; otherwise send plain."""
    if slot is None:
        raise UsageError("codec='auto' needs an ErrorFeedback, which stores the measured times")
    forecasts, key = slot.owner.forecasts, (tensor.device.type, setting.codec.spec)
    if key not in forecasts:
        forecasts[key] = measured_forecast(
            communicator,
            setting.codec,
            tensor.device,
            lambda trial: _start(trial, None, communicator, setting, async_op=False),
        )
    forecast = forecasts[key]
    report = slot.owner.report
    if forecast.helps(tensor.nbytes):
        report.predicted_calls += 1
        report.predicted_plain_seconds += forecast.plain(tensor.nbytes)
        return _start(tensor, slot, communicator, setting, async_op)
    report.plain_calls += 1
    return plain_all_reduce(tensor, slot, communicator, setting.raise_not_finite, async_op)


def plain_all_reduce(
    tensor: Tensor, slot: Slot, communicator: Communicator, raise_not_finite: bool, async_op: bool
) -> Work | None:
    """Average `tensor` uncompressed, and report values that are not finite as a compressed call does."""
    if not raise_not_finite:
        return communicator.all_reduce(tensor, c10d.ReduceOp.AVG, async_op=async_op, log_name="left plain")
    if async_op:
        return _submit(tensor, slot, lambda own: _run_plain(tensor, slot, own, deferred=tensor.is_cuda))
    _run_plain(tensor, slot, communicator, deferred=False)
    return None


def _run_plain(tensor: Tensor, slot: Slot, communicator: Communicator, deferred: bool) -> None:
    outcome = Outcome(slot, communicator, tensor.numel(), waits=not deferred)
    outcome.report_earlier()
    ranks = communicator.size
    sound = torch.isfinite(tensor).all()
    culprit = torch.where(sound, 0, ranks - communicator.rank).to(torch.int32)  # the maximum is the lowest rank's
    communicator.all_reduce(tensor, c10d.ReduceOp.AVG, log_name="left plain")
    communicator.all_reduce(culprit, c10d.ReduceOp.MAX, log_name="left plain")
    overflow = torch.where(torch.isfinite(tensor).all(), 0, 1 + ranks)
    outcome.add(PlainStatus(torch.where(culprit > 0, 1 + ranks - culprit, overflow)))
    outcome.report()


def _start(
    tensor: Tensor, slot: Slot | None, communicator: Communicator, setting: Setting, async_op: bool
) -> Work | None:
    """Run a compressed all-reduce now, or submit it to the feedback's background thread or stream."""
    if not async_op:
        if slot is not None:
            slot.settle()
        # Frames and residuals are reused across calls, and a tensor created in inference mode cannot be written outside
        # it. So every call runs in inference mode, whatever mode the caller is in.
        with torch.inference_mode():
            setting.algorithm(tensor, slot, communicator, setting).run()
        return None
    if slot is None:
        raise UsageError("an asynchronous compressed_all_reduce needs an ErrorFeedback, which runs its steps")
    deferred = tensor.is_cuda
    return _submit(tensor, slot, lambda own: setting.algorithm(tensor, slot, own, setting, deferred=deferred).run())


def _submit(tensor: Tensor, slot: Slot, job: Callable[[Communicator], None]) -> Work:
    background = slot.owner.background(tensor.device)
    work = background.submit(job, [tensor])
    slot.pending = background.latest
    return work


def _group_of(slot: Slot | None, group: c10d.ProcessGroup | None) -> c10d.ProcessGroup | None:
    if slot is None:
        return group
    if group is not None and group is not slot.owner.group:
        theirs = world.communicator(slot.owner.group)
        if theirs is not world.communicator(group):
            raise UsageError(
                f"the feedback belongs to group {theirs.name}, the call uses {world.communicator(group).name}: "
                "residuals belong to one group; create an ErrorFeedback(group) for each"
            )
    return slot.owner.group


def _check(tensor: Tensor, not_finite: str) -> None:
    if tensor.dtype not in VALUE_DTYPES or tensor.layout is not torch.strided:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES)
        raise UsageError(f"a compressed collective takes dense tensors of {names}, not {tensor.dtype} {tensor.layout}")
    if not_finite not in ("raise", "propagate"):
        raise UsageError(f"not_finite= must be 'raise' or 'propagate', not {not_finite!r}")
