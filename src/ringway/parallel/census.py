"""What a model consists of, so that a change behind the hooks' back is seen."""

from __future__ import annotations

from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ringway.errors import UsageError
from ringway.parallel.buckets import Slot

AGAIN = "remove() the hooks and register them again, on every rank"

_SPLIT = "_ringway_split"


def mark_split(parameter: nn.Parameter, split: bool) -> None:
    """Says that ranks of a model-parallel group hold different parts of the parameter."""
    if split:
        setattr(parameter, _SPLIT, True)
    elif is_split(parameter):
        delattr(parameter, _SPLIT)


def is_split(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, _SPLIT)


class Census:
    """The parameters and modules of a model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._modules)]
        self._entries = list(chain.from_iterable(map(dict.values, self._tables)))
        """Kept: the id of one that is gone would be given again."""
        self._ids = list(map(id, self._entries))
        self._known = {id(parameter) for parameter in model.parameters()}
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]

    def check(self) -> None:
        """Raises where parameters were added, exchanged or unfrozen. Every step, so by the modules' own tables:
        walking the model takes ten times as long."""
        if list(map(id, chain.from_iterable(map(dict.values, self._tables)))) != self._ids:
            added = [name for name, p in self._model.named_parameters() if id(p) not in self._known]
            what = f"was given parameters ({', '.join(added[:4])})" if added else "lost or exchanged modules"
            raise UsageError(f"the model {what} after its data-parallel hooks were registered; {AGAIN}")
        thawed = [name for name, p in self._frozen if p.requires_grad]
        if thawed:
            raise UsageError(f"{', '.join(thawed[:4])} was frozen when the hooks were registered; {AGAIN}")


def refuse_gradient(slot: Slot, gradient: Tensor | None) -> NoReturn:
    """Says why a gradient cannot be averaged as the hooks were made to."""
    view = slot.view
    if gradient is None:
        raise UsageError(
            f"a hook of another's took the gradient of parameter '{slot.name}' away during backward, before it was the "
            "mean; an optimizer that steps inside backward cannot be used with data-parallel hooks"
        )
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"parameter '{slot.name}' has a {gradient.layout} gradient, and is not the weight of an nn.Embedding "
            "or nn.EmbeddingBag with sparse=True: that a gradient is sparse must be known beforehand"
        )
    if gradient.requires_grad:
        raise UsageError("backward(create_graph=True) is not possible with data-parallel hooks; use no_sync()")
    if gradient.nbytes != slot.nbytes or gradient.dtype is not slot.dtype:
        raise UsageError(
            f"parameter '{slot.name}' was {view.dtype}{list(view.shape)} on {view.device} when the hooks were "
            f"registered, and its gradient is {gradient.dtype}{list(gradient.shape)} on {gradient.device}; {AGAIN}"
        )
    raise UsageError(
        f"parameter '{slot.name}' got a second gradient in one backward: it is used by several reentrant "
        "checkpoints; pass use_reentrant=False"
    )
