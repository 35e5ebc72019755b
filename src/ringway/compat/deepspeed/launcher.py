"""Starts a job as deepspeed.comm does, and like it leaves torch's variables in the environment.

This is the only module that writes `os.environ`: programs written for deepspeed read RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT from it after `init_distributed`.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from ringway.api import groups
from ringway.backends.select import MPI_LAUNCHERS
from ringway.compat.deepspeed.ccl import CCLBackend
from ringway.compat.deepspeed.constants import (
    CCL_BACKEND,
    DEFAULT_AML_MASTER_PORT,
    DEFAULT_AML_NCCL_SOCKET_IFNAME,
    TORCH_DISTRIBUTED_DEFAULT_PORT,
    default_pg_timeout,
)
from ringway.compat.deepspeed.logging import as_config, configure
from ringway.compat.deepspeed.utils import get_local_rank_from_launcher as get_local_rank_from_launcher
from ringway.compat.deepspeed.utils import get_world_rank_from_launcher as get_world_rank_from_launcher
from ringway.compat.deepspeed.utils import get_world_size_from_launcher as get_world_size_from_launcher
from ringway.config import resolve
from ringway.errors import DiscoveryError
from ringway.groups.world import world
from ringway.job import init
from ringway.launch import ports
from ringway.launch.discover import discover
from ringway.launch.info import LaunchInfo, Variables
from ringway.launch.sources import LOOPBACK, SOURCES
from ringway.store import unwrapped


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """`ringway.init_distributed`, with deepspeed's default timeout. Leaves torch's variables in the environment."""
    settings = None if config is None else as_config(config)
    if settings is not None:
        configure(settings)
    limit: timedelta | None = timeout
    if timeout is default_pg_timeout and resolve(settings).source("timeout") != "default":
        limit = None  # ringway's own configuration sets it, which overrides a default
    init.init_distributed(
        dist_backend,
        auto_mpi_discovery,
        distributed_port,
        verbose,
        limit,
        init_method,
        dist_init_required,
        settings,
        rank,
        world_size,
    )
    _leave_variables(distributed_port)


def _leave_variables(port: int) -> None:
    host, port = _store_address(port)
    local_rank = world.local_rank
    # Rank and size are this job's, whatever an outer launcher has set. An address that was given is left unchanged.
    os.environ["RANK"] = str(groups.get_rank())
    os.environ["WORLD_SIZE"] = str(groups.get_world_size())
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = str(local_rank)
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))


def _store_address(port: int) -> tuple[str, int]:
    """The address of the job's store. A world of one has none; return what deepspeed would."""
    store = unwrapped(c10d.distributed_c10d._get_default_store())
    if isinstance(store, c10d.TCPStore):
        return store.host, store.port
    return LOOPBACK, port


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Read this process's place in the job from an MPI launcher's variables, and set torch's. mpi4py is used only if
    the launcher sets none, and to find rank 0's address if the ranks are on several hosts."""
    others = [source.name for source in SOURCES if source.name not in MPI_LAUNCHERS]
    info = discover(ignored=others, asks_mpi=True)
    address = info.address or _first_address(info)
    os.environ["RANK"] = str(info.rank)
    os.environ["WORLD_SIZE"] = str(info.size)
    os.environ["LOCAL_RANK"] = str(info.local_rank or 0)
    os.environ["MASTER_ADDR"] = address
    os.environ["MASTER_PORT"] = str(info.port or distributed_port)
    _report("MPI", verbose)
    if groups.is_initialized() and (groups.get_rank(), groups.get_world_size()) != (info.rank, info.size):
        raise DiscoveryError(
            f"{info.source} says rank {info.rank} of {info.size}, but torch.distributed was initialized as rank "
            f"{groups.get_rank()} of {groups.get_world_size()}",
            source=info.source,
        )


def _first_address(info: LaunchInfo) -> str:
    try:
        from mpi4py import MPI
    except ImportError:
        raise DiscoveryError(
            f"{info.source} started ranks on several hosts but gives no address; set MASTER_ADDR or install mpi4py",
            source=info.source,
        ) from None
    address: str = MPI.COMM_WORLD.bcast(ports.own_address() if info.rank == 0 else None, root=0)
    return address


def in_aml() -> bool:
    """Whether this is an AzureML job."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Whether this is a SageMaker job."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Whether this is a DLTS job."""
    return "DLTS_JOB_ID" in os.environ


def _place_by_open_mpi(who: str) -> tuple[Variables, int]:
    """Set rank, size and local rank from Open MPI's variables; return the number of ranks on this host."""
    found = Variables(os.environ, who)
    prefix = "OMPI_COMM_WORLD_"
    rank, size, local_rank, local_size = (
        found.needed(found.number(prefix + name), prefix + name)
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(size)
    os.environ["LOCAL_RANK"] = str(local_rank)
    return found, local_size


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Set torch's variables from AzureML's."""
    found, local_size = _place_by_open_mpi("AzureML")
    if local_size == int(os.environ["WORLD_SIZE"]):
        node = found.text("AZ_BATCHAI_MPI_MASTER_NODE")
        os.environ["MASTER_PORT"] = DEFAULT_AML_MASTER_PORT
    else:
        node = (found.text("AZ_BATCH_MASTER_NODE") or "").partition(":")[0]
        os.environ.setdefault("MASTER_PORT", str(master_port))
    if not node:
        raise found.error("no variable names the first node")
    os.environ["MASTER_ADDR"] = node
    os.environ["NCCL_SOCKET_IFNAME"] = DEFAULT_AML_NCCL_SOCKET_IFNAME
    _report("AzureML", verbose)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Set torch's variables from SageMaker's, which sets the address itself."""
    _place_by_open_mpi("SageMaker")
    _report("SageMaker", verbose)


def _report(who: str, verbose: bool) -> None:
    if verbose and os.environ.get("RANK") == "0":
        names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        facts = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        print(f"ringway: discovered from {who}: {facts}", file=sys.stderr, flush=True)


def init_deepspeed_backend(ds_backend: str, timeout: Any, init_method: str | None) -> CCLBackend | None:
    """Start one of deepspeed's own backends. oneCCL is the only one; for others there is nothing to do."""
    if ds_backend != CCL_BACKEND:
        return None
    found = Variables(os.environ, "environment")
    rank, size = found.number("RANK"), found.number("WORLD_SIZE", least=1)
    return CCLBackend(
        rank=-1 if rank is None else rank,
        world_size=-1 if size is None else size,
        timeout=timeout,
        init_method=init_method,
    )
