"""deepspeed.comm's helpers: a process's place by its launcher; a call's caller, tensors and size in bytes."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ringway.launch.info import Variables

# The parameters in which deepspeed's collectives take what they send; the first match counts.
_TENSOR_PARAMETERS = ("tensor", "tensors", "input_list", "input_tensor_list", "p2p_op_list")


def get_local_rank_from_launcher() -> int:
    return _from_launcher("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", 0)


def get_world_rank_from_launcher() -> int:
    return _from_launcher("RANK", "OMPI_COMM_WORLD_RANK", 0)


def get_world_size_from_launcher() -> int:
    return _from_launcher("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", 1)


def _from_launcher(name: str, open_mpi_name: str, alone: int) -> int:
    found = Variables(os.environ, "environment").number(name, open_mpi_name)
    return alone if found is None else found


def get_caller_func(frame: int = 3) -> str:
    """The name of the function `frame` levels up the stack."""
    return sys._getframe(frame).f_code.co_name


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that have a default, with their defaults."""
    parameters = inspect.signature(func).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def get_tensor_position(func: Callable[..., Any]) -> int:
    """The position of the parameter that holds what is sent; -1 if there is none."""
    names = list(inspect.signature(func).parameters)
    return next((names.index(name) for name in _TENSOR_PARAMETERS if name in names), -1)


def get_tensor_kwarg(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """What is sent, if it was passed by name or is a default."""
    known = {**get_default_args(func), **kwargs}
    return next((known[name] for name in _TENSOR_PARAMETERS if name in known), None)


def get_msg_size_from_args(func: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The number of bytes sent: for a list, of all its tensors."""
    place = get_tensor_position(func)
    sent = args[place] if 0 <= place < len(args) else get_tensor_kwarg(func, kwargs)
    if sent is None:
        return 0
    members: list[Any] = list(sent) if isinstance(sent, (list, tuple)) else [sent]
    return sum(getattr(member, "tensor", member).nbytes for member in members)


def get_debug_log_name(func_args: Mapping[str, Any], debug: bool) -> str:
    """The name under which a call is logged, with its caller if `debug` is set."""
    name = str(func_args["log_name"])
    return f"{name} | [Caller Func: {get_caller_func()}]" if debug else name
