"""One call that starts a job, wherever the program was started: `init_distributed`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from ringway.api import groups
from ringway.api.start import join, ranks_text, say
from ringway.backends.select import MPI_LAUNCHERS
from ringway.config import resolve
from ringway.errors import UsageError
from ringway.groups.world import world
from ringway.launch.discover import discover

DEFAULT_PORT = 29500
"""The default of DeepSpeed's signature. It means that the caller chose no port, so ringway chooses one."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the job that a launcher started, or start a job of one rank.

    `auto_mpi_discovery=False` ignores MPI launchers. Otherwise, if one of them started this process and set no variable
    that ringway knows, MPI is asked through mpi4py. `distributed_port` is the store's port if the
    launcher names none. If torch.distributed is initialized already, its groups are adopted; a second call changes
    nothing, and raises if `rank` or `world_size` contradicts the existing group. `dist_init_required=False` requires
    that torch.distributed is initialized already.
    """
    if c10d.is_initialized():
        _adopt(verbose, rank, world_size)
        return
    if dist_init_required is False:
        raise UsageError("dist_init_required=False, but torch.distributed is not initialized")
    settings = resolve(config)
    ignored = () if auto_mpi_discovery else MPI_LAUNCHERS
    info = discover(rank=rank, size=world_size, init_method=init_method, ignored=ignored, asks_mpi=auto_mpi_discovery)
    if info.port is None and info.address is not None and distributed_port != DEFAULT_PORT:
        info = replace(info, port=distributed_port)
    join(dist_backend, timeout, settings, info, init_method, verbose=verbose)


def _adopt(verbose: bool, rank: int, size: int) -> None:
    adopted = world.communicator(None)
    if (rank if rank >= 0 else adopted.rank, size if size >= 0 else adopted.size) != (adopted.rank, adopted.size):
        wanted = ", ".join(f"{name}={value}" for name, value in (("rank", rank), ("world_size", size)) if value >= 0)
        raise UsageError(
            f"init_distributed({wanted}): torch.distributed is initialized already, and this process is rank "
            f"{adopted.rank} of {adopted.size}; call destroy_process_group() first to start another job"
        )
    if verbose and adopted.rank == 0:
        ranks = ranks_text(adopted.size)
        say(f"torch.distributed is initialized ({ranks}, {groups.get_backend()}); using the existing group")
