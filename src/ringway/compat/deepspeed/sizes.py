"""The earlier home of functions that are in `utils` now, as in deepspeed."""

from ringway.compat.deepspeed.utils import (
    get_caller_func,
    get_debug_log_name,
    get_default_args,
    get_msg_size_from_args,
    get_tensor_kwarg,
    get_tensor_position,
)

__all__ = [
    "get_caller_func",
    "get_debug_log_name",
    "get_default_args",
    "get_msg_size_from_args",
    "get_tensor_kwarg",
    "get_tensor_position",
]
