"""One call that starts a job: discover, configure, meet, select, build."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from ringway.api import groups
from ringway.backends.select import MPI_LAUNCHERS, Choice, select
from ringway.backends.several import policy
from ringway.config import MAX_SECONDS, SETTINGS, Config, resolve
from ringway.errors import UsageError
from ringway.groups.world import world
from ringway.launch.discover import discover
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import rendezvous
from ringway.observe import start as watching
from ringway.observe.log.logger import configure

DEFAULT_PORT = 29500
"""The port that DeepSpeed's signature names when nobody chose one: ringway then chooses."""


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
    """Join the job that a launcher started, or be a world of one.

    `auto_mpi_discovery=False` ignores what MPI launchers say. `distributed_port` is the store's port where the
    launcher names none. With torch.distributed initialized already, that is adopted; a second call changes
    nothing. `dist_init_required=False` insists that somebody has initialized.
    """
    if c10d.is_initialized():
        _adopt(verbose)
        return
    if dist_init_required is False:
        raise UsageError("dist_init_required=False, but torch.distributed is not initialized")
    settings = resolve(config)
    limit, limit_source = _limit(timeout, settings)
    ignored = () if auto_mpi_discovery else MPI_LAUNCHERS
    info = discover(rank=rank, size=world_size, init_method=init_method, ignored=ignored)
    if info.port is None and info.address is not None and distributed_port != DEFAULT_PORT:
        info = replace(info, port=distributed_port)
    path = init_method.removeprefix("file://") if init_method and init_method.startswith("file://") else None
    store = rendezvous(info, limit, token=os.environ.get("RINGWAY_JOB_TOKEN", ""), path=path)
    explicit, said_by = _wanted(dist_backend, settings)
    table = policy.consult(settings.policy, info.size)
    choice = select(explicit, said_by, info, store, limit, table)
    world.backend_reason = choice.reason
    world.policy = table if isinstance(table, policy.Policy) else None
    _prepare(settings, info)
    groups.init_process_group(
        choice.backend,
        timeout=timedelta(seconds=limit),
        world_size=info.size,
        rank=info.rank,
        store=store,
    )
    watching.begin(settings)
    if verbose and info.rank == 0:
        _say(_summary(info, choice, limit, limit_source))
    for note in settings.notes:
        warnings.warn(note, stacklevel=2)


def _adopt(verbose: bool) -> None:
    adopted = world.communicator(None)
    if verbose and adopted.rank == 0:
        ranks = _ranks(adopted.size)
        _say(f"torch.distributed is initialized ({ranks}, {groups.get_backend()}); using it as it is")


def _limit(timeout: timedelta | float | None, settings: Config) -> tuple[float, str]:
    """The one timeout, in seconds, and who said it."""
    if timeout is None:
        return settings.timeout, settings.source("timeout")
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError):
        raise UsageError(f"timeout={timeout!r} is neither a timedelta nor a number of seconds") from None
    if not 0 < seconds <= MAX_SECONDS:
        raise UsageError(f"timeout={timeout} is not above 0 and at most {MAX_SECONDS:.0f} seconds")
    return seconds, getattr(timeout, "source", "argument")  # deepspeed's default says that it is one


def _wanted(dist_backend: str | None, settings: Config) -> tuple[str | None, str]:
    if dist_backend is not None:
        return dist_backend, "argument"
    if world.next_backend is not None:
        return world.next_backend, "set_backend"
    return settings.backend, settings.source("backend")


def _prepare(settings: Config, info: LaunchInfo) -> None:
    """What the world takes over from the configuration before the first group is made."""
    world.local_rank = info.local_rank
    world.max_object_bytes = settings.max_object_bytes
    world.check = settings.check
    watching.prepare(settings, info.rank)
    if any(settings.source(key) != "default" for key in SETTINGS if key.startswith("comms_logger.")):
        configure(settings)
    else:
        configure()  # what the user chose before this holds for the recorder made here


def _summary(info: LaunchInfo, choice: Choice, limit: float, limit_source: str) -> str:
    backend = f"backend {choice.backend} ({choice.reason})"
    if world.policy is not None:
        backend += f", mixed by the policy in {world.policy.source}"
    return f"{_ranks(info.size)}, by {info.source}; {backend}; timeout {limit:g} s ({limit_source})"


def _ranks(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"


def _say(line: str) -> None:
    print(f"ringway: {line}", file=sys.stderr, flush=True)
