"""deepspeed.comm.comm: all names of `deepspeed.comm`.

They are those of the release recorded in tests/compat/data. Other public names of torch.distributed are forwarded, as
`import ringway` forwards them. What deepspeed keeps in globals (`cdb`, `nccl_backend`, ...) is created on access, from
ringway's world.
"""

from __future__ import annotations

import sys
from typing import Any

import ringway
from ringway.api import groups
from ringway.api.groups import (
    get_all_ranks_from_group,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    is_available,
    is_initialized,
)
from ringway.compat.deepspeed.backend import Backend, ProcessGroup
from ringway.compat.deepspeed.ccl import CCLBackend
from ringway.compat.deepspeed.coalesced import all_to_all_quant_reduce, reduce_scatter_coalesced
from ringway.compat.deepspeed.constants import (
    CCL_BACKEND,
    COMMS_LOGGER,
    COMMS_LOGGER_DEBUG,
    COMMS_LOGGER_DEBUG_DEFAULT,
    COMMS_LOGGER_ENABLED,
    COMMS_LOGGER_ENABLED_DEFAULT,
    COMMS_LOGGER_FORMAT,
    COMMS_LOGGER_PROF_ALL,
    COMMS_LOGGER_PROF_ALL_DEFAULT,
    COMMS_LOGGER_PROF_OPS,
    COMMS_LOGGER_PROF_OPS_DEFAULT,
    COMMS_LOGGER_VERBOSE,
    COMMS_LOGGER_VERBOSE_DEFAULT,
    DEFAULT_AML_MASTER_PORT,
    DEFAULT_AML_NCCL_SOCKET_IFNAME,
    GLOO_BACKEND,
    HCCL_BACKEND,
    MPI_BACKEND,
    NCCL_BACKEND,
    SCCL_BACKEND,
    TORCH_DISTRIBUTED_DEFAULT_PORT,
    default_pg_timeout,
)
from ringway.compat.deepspeed.lamb import OnebitLamb
from ringway.compat.deepspeed.launcher import (
    in_aml,
    in_aws_sm,
    in_dlts,
    init_deepspeed_backend,
    init_distributed,
    mpi_discovery,
    patch_aml_env_for_torch_nccl_backend,
    patch_aws_sm_env_for_torch_nccl_backend,
)
from ringway.compat.deepspeed.logging import (
    CommsLogger,
    calc_bw_log,
    comms_logger,
    configure,
    convert_size,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    print_rank_0,
    reset_log,
    timed_op,
    timer_summary,
)
from ringway.compat.deepspeed.onebit import OnebitAdam
from ringway.compat.deepspeed.ops import (
    P2POp,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    allgather_fn,
    barrier,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    enable_symm_mem_for_group,
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
    reduce_scatter_fn,
    reduce_scatter_tensor,
    scatter,
    send,
)
from ringway.compat.deepspeed.reduce_op import ReduceOp
from ringway.compat.deepspeed.timers import SynchronizedWallClockTimer, timers, trim_mean
from ringway.compat.deepspeed.torch import TorchBackend, current_backend
from ringway.compat.deepspeed.utils import (
    get_caller_func,
    get_debug_log_name,
    get_default_args,
    get_local_rank_from_launcher,
    get_msg_size_from_args,
    get_tensor_kwarg,
    get_tensor_position,
    get_world_rank_from_launcher,
    get_world_size_from_launcher,
)
from ringway.compat.deepspeed.zoadam import ZeroOneAdam
from ringway.observe.log.logger import log_summary


def new_group(ranks: list[int]) -> Any:
    """A group of these global ranks, on the world's backend."""
    return groups.new_group(ranks)


def destroy_process_group(group: Any = None) -> None:
    """Destroy a group, or all of them. If deepspeed's engine runs on these names, it forgets the group too."""
    whole = group is None or group is groups.get_world_group()
    groups.destroy_process_group(group)
    forget = getattr(sys.modules.get("deepspeed.utils.groups"), "_release_process_group_references", None)
    if forget is not None:
        forget(group=None if whole else group)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of a member of a group. For the world, the number is the same."""
    return groups.get_all_ranks_from_group(group)[group_rank]


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """A device mesh on the accelerator if there is one, otherwise on the CPU."""
    return groups.initialize_mesh_device(mesh_shape, mesh_dim_names)


def set_backend() -> None:
    """In deepspeed, this picks the backend for the accelerator. ringway has already picked one: nothing changes."""


_HELD_BY = {
    "nccl_backend": NCCL_BACKEND,
    "mpi_backend": MPI_BACKEND,
    "ccl_backend": CCL_BACKEND,
    "hccl_backend": HCCL_BACKEND,
}


def __getattr__(name: str) -> Any:
    if name == "cdb":
        return current_backend()
    if name in _HELD_BY:
        held = current_backend()
        return held if held is not None and _HELD_BY[name] in held.get_backend() else None
    return getattr(ringway, name)


__all__ = [
    "Backend",
    "CCLBackend",
    "CCL_BACKEND",
    "COMMS_LOGGER",
    "COMMS_LOGGER_DEBUG",
    "COMMS_LOGGER_DEBUG_DEFAULT",
    "COMMS_LOGGER_ENABLED",
    "COMMS_LOGGER_ENABLED_DEFAULT",
    "COMMS_LOGGER_FORMAT",
    "COMMS_LOGGER_PROF_ALL",
    "COMMS_LOGGER_PROF_ALL_DEFAULT",
    "COMMS_LOGGER_PROF_OPS",
    "COMMS_LOGGER_PROF_OPS_DEFAULT",
    "COMMS_LOGGER_VERBOSE",
    "COMMS_LOGGER_VERBOSE_DEFAULT",
    "CommsLogger",
    "DEFAULT_AML_MASTER_PORT",
    "DEFAULT_AML_NCCL_SOCKET_IFNAME",
    "GLOO_BACKEND",
    "HCCL_BACKEND",
    "MPI_BACKEND",
    "NCCL_BACKEND",
    "OnebitAdam",
    "OnebitLamb",
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "SCCL_BACKEND",
    "SynchronizedWallClockTimer",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "TorchBackend",
    "ZeroOneAdam",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_quant_reduce",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "calc_bw_log",
    "comms_logger",
    "configure",
    "convert_size",
    "default_pg_timeout",
    "destroy_process_group",
    "enable_symm_mem_for_group",
    "gather",
    "get_all_ranks_from_group",
    "get_caller_func",
    "get_comm_operation_count",
    "get_debug_log_name",
    "get_default_args",
    "get_global_rank",
    "get_local_rank",
    "get_local_rank_from_launcher",
    "get_logged_comm_ops",
    "get_msg_size_from_args",
    "get_rank",
    "get_tensor_kwarg",
    "get_tensor_position",
    "get_world_group",
    "get_world_rank_from_launcher",
    "get_world_size",
    "get_world_size_from_launcher",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "inference_all_reduce",
    "init_deepspeed_backend",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
    "print_rank_0",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
    "set_backend",
    "timed_op",
    "timer_summary",
    "timers",
    "trim_mean",
]
