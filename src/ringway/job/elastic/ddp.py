"""DistributedDataParallel in a job whose groups are replaced.

DDP's reducer is a C++ object that keeps the group and the number of ranks it was made with; torch has no way to change
them (2.8 to 2.15). So each generation makes a new one, in the same module: the program keeps its model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringway.errors import UsageError

_REFUSED = {
    "process_group": "the group of all ranks is replaced by each generation",
    "device_mesh": "the group of all ranks is replaced by each generation",
    "mixed_precision": "its hooks on the model's parts cannot be replaced",
}


_HOOKS = [name for name in vars(nn.Module()) if "_hook" in name]
"""Where a module keeps the hooks that a program registers on it."""


class _Unconnected(DistributedDataParallel):
    """Before the first generation."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise UsageError("this model is used before the ranks have met: they meet when job.steps() begins")


class ElasticDdp:
    """One DistributedDataParallel, which is connected to each generation."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        for name, reason in _REFUSED.items():
            if options.get(name) is not None:
                raise UsageError(f"job.ddp cannot take {name}=: {reason}")
        self._model = model
        self._options = options
        self.wrapper: DistributedDataParallel = _Unconnected.__new__(_Unconnected)
        nn.Module.__init__(self.wrapper)
        self.wrapper.module = model

    def connect(self, shared: set[torch.Tensor]) -> None:
        """To the default group. If all parameters are among the `shared` ones, they are equal on all ranks already."""
        wrapper = self.wrapper
        comm_hooks = list(getattr(wrapper, "_comm_hooks", ()))
        training = wrapper.training
        hooks = {name: vars(wrapper)[name] for name in _HOOKS if name in vars(wrapper)}
        equal = shared.issuperset(self._model.parameters()) and shared.issuperset(self._model.buffers())
        wrapper.__class__ = DistributedDataParallel
        DistributedDataParallel.__init__(wrapper, self._model, **({"init_sync": not equal} | self._options))
        wrapper.training = training  # not of its modules: some may be frozen in eval mode
        vars(wrapper).update(hooks)
        for hook, state in comm_hooks:
            wrapper.register_comm_hook(state, hook)
