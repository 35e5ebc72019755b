"""The constants of deepspeed.comm, and its own ReduceOp."""

from __future__ import annotations

import os
from datetime import timedelta
from enum import Enum
from typing import Any

from ringway import call
from ringway.errors import ConfigError, UsageError

NCCL_BACKEND = "nccl"
CCL_BACKEND = "ccl"
MPI_BACKEND = "mpi"
GLOO_BACKEND = "gloo"
SCCL_BACKEND = "sccl"
HCCL_BACKEND = "hccl"

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
DEFAULT_AML_MASTER_PORT = "54965"
DEFAULT_AML_NCCL_SOCKET_IFNAME = "^docker0,lo"

COMMS_LOGGER = "comms_logger"
COMMS_LOGGER_ENABLED = "enabled"
COMMS_LOGGER_ENABLED_DEFAULT = False
COMMS_LOGGER_VERBOSE = "verbose"
COMMS_LOGGER_VERBOSE_DEFAULT = False
COMMS_LOGGER_PROF_ALL = "prof_all"
COMMS_LOGGER_PROF_ALL_DEFAULT = True
COMMS_LOGGER_DEBUG = "debug"
COMMS_LOGGER_DEBUG_DEFAULT = False
COMMS_LOGGER_PROF_OPS = "prof_ops"
COMMS_LOGGER_PROF_OPS_DEFAULT: list[str] = []
COMMS_LOGGER_FORMAT = (
    'The block "comms_logger" of a configuration has the keys enabled, verbose, prof_all, debug (true or false) '
    "and prof_ops (a list of ops or labels)."
)


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
    if not isinstance(op, ReduceOp):
        return op
    if op is ReduceOp.UNUSED:
        raise UsageError("op=ReduceOp.UNUSED is not a reduction")
    return getattr(call.ReduceOp, op.name)


class _Default(timedelta):
    """The default timeout, so that the line that reports the timeout can say where it came from."""

    source: str


def _default_timeout() -> timedelta:
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    try:
        limit = _Default(minutes=int(minutes))
    except (ValueError, OverflowError):
        raise ConfigError(
            f"DEEPSPEED_TIMEOUT={minutes!r} is not a number of minutes", key="timeout", source="DEEPSPEED_TIMEOUT"
        ) from None
    limit.source = "DEEPSPEED_TIMEOUT" if "DEEPSPEED_TIMEOUT" in os.environ else "deepspeed's default"
    return limit


default_pg_timeout = _default_timeout()
