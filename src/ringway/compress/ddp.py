"""A communication hook for DistributedDataParallel that averages gradients in compressed form."""

# DDP compares the hook's annotations with its own types, so they must not be strings here.

import warnings
import weakref
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ringway.compress.codecs.codec import Codec
from ringway.compress.collectives import compressed_all_reduce
from ringway.compress.feedback import ErrorFeedback
from ringway.errors import UsageError
from ringway.groups.world import world

SCALES_BY_SECOND_MOMENT = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)


class DDPHook:
    """The hook that `ddp_hook` returns. Register it with a state of None."""

    def __init__(
        self,
        codec: str | Codec,
        *,
        group: c10d.ProcessGroup | None,
        warmup_steps: int,
        feedback: ErrorFeedback | None,
        not_finite: str,
    ) -> None:
        if warmup_steps < 0:
            raise UsageError(f"warmup_steps must be 0 or more, got {warmup_steps}")
        self.codec = codec
        self.group = group if feedback is None else feedback.group
        self.warmup_steps = warmup_steps
        self.feedback = ErrorFeedback(group) if feedback is None else feedback
        self.not_finite = not_finite
        self.steps = 0
        self._compressed: set[int] = set()
        """Addresses of the parameters whose gradients were compressed."""
        self.warned = False
        _warn_of_adam(weakref.ref(self))
        # DDP's log reads a function's name.
        self.__qualname__ = f"ringway.compress.ddp_hook({codec!r})"
        self.__name__ = "ddp_hook"

    def __call__(self, state: Any, bucket: c10d.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        compressing = self.steps >= self.warmup_steps
        if compressing:
            places = tuple(parameter.data_ptr() for parameter in bucket.parameters())
            self._compressed.update(places)
            slot = self.feedback[bucket.index()]
            slot.bind(places)
            work = compressed_all_reduce(buffer, slot, self.codec, async_op=True, not_finite=self.not_finite)
        else:
            work = world.communicator(self.group).all_reduce(buffer, c10d.ReduceOp.AVG, async_op=True)
        if bucket.is_last():
            self.steps += 1
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    def uses(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps parameters whose gradients this hook has compressed."""
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return any(parameter.data_ptr() in self._compressed for parameter in stepped)


def ddp_hook(
    codec: str | Codec = "onebit",
    *,
    group: c10d.ProcessGroup | None = None,
    warmup_steps: int = 1,
    feedback: ErrorFeedback | None = None,
    not_finite: str = "raise",
) -> DDPHook:
    """A hook for `model.register_comm_hook(None, ddp_hook("onebit"))`.

    The first `warmup_steps` steps are averaged uncompressed. Use at least one: DDP rebuilds its buckets after the first
    step, and residuals restart from zero whenever that happens. Buckets overlap with the backward pass, like DDP's own.
    Pass the model's process group as `group`, and your own `feedback` to save residuals with a checkpoint.

    Intended for SGD with momentum. Adam and similar optimizers divide the compression errors by their own second
    moment, and training does not converge as it would without compression: use `OneBitAdam`. The hook warns about it.
    """
    return DDPHook(codec, group=group, warmup_steps=warmup_steps, feedback=feedback, not_finite=not_finite)


def _warn_of_adam(hook: "weakref.ref[DDPHook]") -> None:
    """Check every optimizer that steps, and warn once if it is an unsuitable one. The check stays registered and holds
    only a weak reference, because torch does not allow removing a step hook while it runs."""

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owner = hook()
        if owner is None or owner.warned or not isinstance(optimizer, SCALES_BY_SECOND_MOMENT):
            return
        if owner.uses(optimizer):
            owner.warned = True
            warnings.warn(
                f"{type(optimizer).__name__} steps on gradients compressed with {owner.codec!r}: it does not converge "
                "as it does with plain gradients. Use ringway.compress.OneBitAdam, or SGD with momentum.",
                stacklevel=3,
            )

    register_optimizer_step_pre_hook(look)
