"""`timed_op`: logs a user's own collective."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

import ringway._core as _core
from ringway.groups.world import world
from ringway.observe.log.summary import USER_OP
from ringway.work import Work

F = TypeVar("F", bound=Callable[..., Any])


def _nbytes(values: Any) -> int:
    """The bytes of the first argument that holds tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.nbytes
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value):
            return sum(item.nbytes for item in value)
    return 0


def timed_op(function: F) -> F:
    """Decorate a function that communicates: while the logger is on, its calls are logged under its name, or under the
    `log_name` of the call. A call that returns a Work ends when the Work does. The size is that of the first tensor
    argument, and the group that of the argument `group`. ringway's collectives inside it are logged too. `prof=True`
    logs one call even if the configuration does not choose its name.
    """
    signature = inspect.signature(function)

    def take(kwargs: dict[str, Any], name: str) -> Any:
        """An argument for the logger. The function sees it only if it has such a parameter."""
        return kwargs.get(name) if name in signature.parameters else kwargs.pop(name, None)

    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        label, prof = (take(kwargs, name) for name in ("log_name", "prof"))
        recorder = world.recorder
        if not recorder.logging or _core.is_quiet():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        name = str(label or getattr(function, "__name__", "op"))
        nbytes = _nbytes(bound.arguments.values())
        size = _size(bound.arguments.get("group"))
        began = _core.monotonic_ns()

        def ended(error: BaseException | None = None) -> None:
            if error is None:
                recorder.log(USER_OP, name, size, nbytes, _core.monotonic_ns() - began, bool(prof))

        result = function(*args, **kwargs)
        if isinstance(result, Work):
            result.on_complete(ended)
        elif isinstance(result, torch.distributed.Work):
            result.get_future().add_done_callback(lambda _: ended())
        else:
            ended()
        return result

    return timed  # type: ignore[return-value]


def _size(group: Any) -> int:
    if group is None and not torch.distributed.is_initialized():
        return 1
    return max(torch.distributed.get_world_size(group), 1)
