"""Detects a model or gradient that does not match its hooks."""

from __future__ import annotations

from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.split import refuse_parts, split_over
from ringway.parallel.buckets import Slot
from ringway.parallel.styles import PARALLEL, Settings

REGISTER_AGAIN = "remove() the hooks and register them again, on every rank"


def refuse_split(model: nn.Module, communicator: Communicator) -> None:
    """Raise if ranks of this group hold different parts of a parameter: the group's rank 0 would overwrite them, and
    their gradients must not be averaged. A model whose parameters were replaced is found by its modules."""
    for name, module in model.named_modules():
        settings = vars(module).get(PARALLEL)
        if isinstance(settings, Settings) and settings.sizes:
            refuse_parts(f"'{name}'", settings.communicator, communicator)
    for name, parameter in model.named_parameters():
        refuse_parts(f"'{name}'", split_over(parameter), communicator)


class ModelSnapshot:
    """The parameters and modules of a model when its hooks were registered."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._modules)]
        self._entries = list(chain.from_iterable(map(dict.values, self._tables)))
        """Kept alive: the id of a deleted object may be reused."""
        self._ids = list(map(id, self._entries))
        self._known = {id(parameter) for parameter in model.parameters()}
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]

    def check(self) -> None:
        """Raise if parameters were added, replaced or unfrozen. This runs every step, so it compares the modules' own
        tables: walking the model takes ten times as long."""
        if list(map(id, chain.from_iterable(map(dict.values, self._tables)))) != self._ids:
            added = [name for name, p in self._model.named_parameters() if id(p) not in self._known]
            what = f"was given parameters ({', '.join(added[:4])})" if added else "lost or replaced modules"
            raise UsageError(f"the model {what} after its data-parallel hooks were registered; {REGISTER_AGAIN}")
        thawed = [name for name, p in self._frozen if p.requires_grad]
        if thawed:
            raise UsageError(f"{', '.join(thawed[:4])} was frozen when the hooks were registered; {REGISTER_AGAIN}")


def refuse_gradient(slot: Slot, gradient: Tensor | None) -> NoReturn:
    """Raise an error that says why this gradient cannot be averaged."""
    view = slot.view
    if gradient is None:
        raise UsageError(
            f"another hook took the gradient of parameter '{slot.name}' away during backward, before it was averaged; "
            "an optimizer that steps inside backward cannot be used with data-parallel hooks"
        )
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"parameter '{slot.name}' has a {gradient.layout} gradient, but is not the weight of an nn.Embedding or "
            "nn.EmbeddingBag with sparse=True: sparse gradients must be known in advance"
        )
    if gradient.requires_grad:
        raise UsageError("backward(create_graph=True) does not work with data-parallel hooks; use no_sync()")
    if gradient.nbytes != slot.nbytes or gradient.dtype is not slot.dtype:
        raise UsageError(
            f"parameter '{slot.name}' was {view.dtype}{list(view.shape)} on {view.device} when the hooks were "
            f"registered, but its gradient is {gradient.dtype}{list(gradient.shape)} on {gradient.device}; "
            + REGISTER_AGAIN
        )
    raise UsageError(
        f"parameter '{slot.name}' got a second gradient in one backward: it is used by several reentrant "
        "checkpoints; pass use_reentrant=False"
    )
