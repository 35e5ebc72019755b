"""One communication layer for PyTorch: `import ringway as dist`.

The names below are ringway's own. Every other public name of `torch.distributed` is forwarded to torch, so a program
written for torch.distributed runs unchanged.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ringway.version import OLDEST_TORCH, release

if release(torch.__version__) < release(OLDEST_TORCH):
    raise ImportError(
        f"ringway needs torch {OLDEST_TORCH} or newer, and torch {torch.__version__} is installed: "
        "pip install --upgrade torch",
        name="ringway",  # `python -m ringway` then says so in one line
    )

import torch.distributed as _torch_distributed

from ringway import errors
from ringway.api.collectives import (
    P2POp,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    batch_isend_irecv,
    broadcast,
    communicator,
    gather,
    has_all_gather_into_tensor,
    has_all_reduce_coalesced,
    has_coalescing_manager,
    has_reduce_scatter_tensor,
    inference_all_reduce,
    irecv,
    isend,
    monitored_barrier,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_coalesced,
    reduce_scatter_tensor,
    scatter,
    send,
)
from ringway.api.groups import (
    destroy_process_group,
    get_all_ranks_from_group,
    get_backend,
    get_global_rank,
    get_group_rank,
    get_local_rank,
    get_process_group_ranks,
    get_rank,
    get_world_group,
    get_world_size,
    init_device_mesh,
    init_process_group,
    initialize_mesh_device,
    is_available,
    is_initialized,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    register_backend,
    set_backend,
    settled,
)
from ringway.api.objects import (
    all_gather_object,
    allgather_object,
    broadcast_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    reduce_object,
    scatter_object_list,
    send_object_list,
)
from ringway.backends.base import Backend
from ringway.call import ReduceOp, premul_sum
from ringway.job.startup import start_up as _start_up
from ringway.observe.recorder import recent_calls, status
from ringway.version import VERSION
from ringway.work import Work

ProcessGroup = _torch_distributed.ProcessGroup
"""torch's class: every group is one."""
__version__ = VERSION

__all__ = [
    # life
    "ElasticJob",
    "init_distributed",
    "initialize",
    "init_process_group",
    "is_available",
    "is_initialized",
    "destroy_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "set_backend",
    "settled",
    "get_backend",
    "init_device_mesh",
    "initialize_mesh_device",
    "get_world_group",
    "get_world_size",
    "get_rank",
    "get_local_rank",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_all_ranks_from_group",
    "communicator",
    "ReduceOp",
    "premul_sum",
    "ProcessGroup",
    "Work",
    "Backend",
    "register_backend",
    # collectives
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "P2POp",
    "barrier",
    "monitored_barrier",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "reduce_scatter_coalesced",
    "inference_all_reduce",
    "has_all_gather_into_tensor",
    "has_reduce_scatter_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    # objects
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "allgather_object",
    "broadcast_object",
    "reduce_object",
    # watching
    "configure",
    "log_summary",
    "reset_log",
    "has_comm_data",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "timed_op",
    "trace",
    "stall_after",
    "recent_calls",
    "status",
    # errors
    "errors",
]

_LAZY: dict[str, str] = {
    "ElasticJob": "ringway.job.elastic.job",
    "_get_reconfigure_handle": "ringway.api.reconfigure",
    "_reconfigure": "ringway.api.reconfigure",
    "_supports_reconfigure": "ringway.api.reconfigure",
    "init_distributed": "ringway.job.init",
    "initialize": "ringway.job.runtime",
    "configure": "ringway.observe.log.logger",
    "log_summary": "ringway.observe.log.logger",
    "reset_log": "ringway.observe.log.logger",
    "has_comm_data": "ringway.observe.log.logger",
    "get_comm_operation_count": "ringway.observe.log.logger",
    "get_logged_comm_ops": "ringway.observe.log.logger",
    "timed_op": "ringway.observe.log.timed",
    "trace": "ringway.observe.trace.writer",
    "stall_after": "ringway.observe.stall.watch",
}
"""Names whose module is imported on first use, to keep `import ringway` quick."""

_LAZY_MODULES = frozenset({"compress", "lowcomm", "parallel", "compat", "testing", "bench"})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _LAZY_MODULES:
        return importlib.import_module(f"ringway.{name}")
    try:
        return getattr(_torch_distributed, name)
    except AttributeError:
        raise AttributeError(f"neither ringway nor torch.distributed has a name '{name}'") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES, *dir(_torch_distributed)})


_start_up()
