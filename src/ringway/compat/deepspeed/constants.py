"""The constants of deepspeed.comm."""

from __future__ import annotations

import os
from datetime import timedelta

from ringway.compat.deepspeed.reduce_op import ReduceOp as ReduceOp
from ringway.compat.deepspeed.reduce_op import torch_op as torch_op
from ringway.errors import ConfigError

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
