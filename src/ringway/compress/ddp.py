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
from ringway.compress.collectives import compressed_all_reduce, plain_all_reduce
from ringway.compress.feedback import ErrorFeedback, Slot
from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.split import refuse_split_parameters
from ringway.groups.world import world
from ringway.torch_versions import untraced
from ringway.work import Work

SCALES_BY_SECOND_MOMENT = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)


@untraced
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
        self._used: set[int] = set()
        """Ids of the parameters that got a gradient since the last synchronized step."""
        self._watched: dict[int, Tensor] = {}
        """The parameters that report their gradients, by id."""
        self._sent: list[tuple[Slot, Tensor, list[Tensor]]] = []
        """This step's compressed buckets: residuals, buffer, parameters."""
        self.warned = False
        _warn_of_adam(weakref.ref(self))
        # DDP's log reads a function's name.
        self.__qualname__ = f"ringway.compress.ddp_hook({codec!r})"
        self.__name__ = "ddp_hook"

    def __call__(self, state: Any, bucket: c10d.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, parameters, index = bucket.buffer(), bucket.parameters(), bucket.index()
        refuse_split_parameters(parameters, world.communicator(self.group))
        self.feedback.model.serve(parameters, index, bucket.is_last())
        self._watch(parameters)
        if self.steps >= self.warmup_steps:
            places = tuple(parameter.data_ptr() for parameter in parameters)
            self._compressed.update(places)
            slot = self.feedback[index]
            slot.bind(places)
            work = compressed_all_reduce(buffer, slot, self.codec, async_op=True, not_finite=self.not_finite)
            self._sent.append((slot, buffer, parameters))
        else:
            communicator, raises = world.communicator(self.group), self.not_finite == "raise"
            work = plain_all_reduce(buffer, Slot(self.feedback, index), communicator, raises, async_op=True)
        assert work is not None
        if not bucket.is_last():
            return work.get_future().then(lambda done: done.value()[0])
        self.steps += 1
        return self._end_step(work, buffer)

    def _watch(self, parameters: list[Tensor]) -> None:
        """Learn which parameters get gradients. One that is seen for the first time has one already, or so we assume:
        that is why residuals need a warm-up step."""
        used = self._used  # a hook that held this object would form a cycle through C++
        for parameter in parameters:
            if id(parameter) not in self._watched:
                self._watched[id(parameter)] = parameter
                parameter.register_post_accumulate_grad_hook(lambda of: used.add(id(of)))
                used.add(id(parameter))

    def _end_step(self, last: Work, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """DDP discards the results of parameters that no rank used. They return to the residuals they came from."""
        sent, self._sent = self._sent, []
        used = torch.tensor([id(p) in self._used for _, _, parameters in sent for p in parameters], dtype=torch.uint8)
        self._used.clear()
        if not sent:
            return last.get_future().then(lambda done: done.value()[0])

        def put_unused_back(own: Communicator) -> None:
            own.all_reduce(used, c10d.ReduceOp.MAX, log_name="parameters used")
            flags = iter(used.tolist())
            for slot, result, parameters in sent:
                start = 0
                for parameter in parameters:
                    where = slice(start, start + parameter.numel())
                    if not next(flags):
                        slot.put_back(where, result[where])
                    start = where.stop

        def finished(_: torch.futures.Future[Any]) -> Tensor:
            last.wait()  # it has ended: this raises its error
            return buffer

        # DDP overwrites the buffers after the last future, so that one comes after this.
        return self.feedback.background(buffer.device).submit(put_unused_back, [buffer]).get_future().then(finished)

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
    Pass the model's process group as `group`, and your own `feedback` to save residuals with a checkpoint. A hook, and
    a feedback, serve one model.

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
