"""deepspeed's own ReduceOp."""

from __future__ import annotations

from enum import Enum
from typing import Any

from ringway import call
from ringway.errors import UsageError


class ReduceOp(Enum):
    """deepspeed's reductions; its functions accept torch's as well."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


def torch_op(op: Any) -> Any:
    """torch's equivalent of the reduction."""
    if not isinstance(op, Enum):
        return op
    # By name: a program that puts this package into sys.modules as deepspeed.comm has deepspeed.comm.reduce_op too.
    if op.name == ReduceOp.UNUSED.name:
        raise UsageError("op=ReduceOp.UNUSED is not a reduction")
    return getattr(call.ReduceOp, op.name)
