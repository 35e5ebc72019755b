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
from ringway.keys import Key
from ringway.launch.discover import discover
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import rendezvous
from ringway.launch.secret import say_open
from ringway.observe import start as watching
from ringway.observe.log.logger import configure
from ringway.store import key_of

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

    `auto_mpi_discovery=False` ignores the variables of MPI launchers. `distributed_port` is the store's port if the
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
    limit, limit_source = _limit(timeout, settings)
    ignored = () if auto_mpi_discovery else MPI_LAUNCHERS
    info = discover(rank=rank, size=world_size, init_method=init_method, ignored=ignored)
    if info.port is None and info.address is not None and distributed_port != DEFAULT_PORT:
        info = replace(info, port=distributed_port)
    path = init_method.removeprefix("file://") if init_method and init_method.startswith("file://") else None
    token = os.environ.get("RINGWAY_JOB_TOKEN", "")
    store = rendezvous(info, limit, token=token, path=path, require_secret=settings.require_secret)
    world.store, key = store, key_of(store)
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
        _say(_summary(info, choice, limit, limit_source, key))
    if info.rank == 0 and info.size > 1 and key.open and (verbose or world.communicator(None).spans_hosts):
        say_open()
    for note in settings.notes:
        warnings.warn(note, stacklevel=2)


def _adopt(verbose: bool, rank: int, size: int) -> None:
    adopted = world.communicator(None)
    if (rank if rank >= 0 else adopted.rank, size if size >= 0 else adopted.size) != (adopted.rank, adopted.size):
        wanted = ", ".join(f"{name}={value}" for name, value in (("rank", rank), ("world_size", size)) if value >= 0)
        raise UsageError(
            f"init_distributed({wanted}): torch.distributed is initialized already, and this process is rank "
            f"{adopted.rank} of {adopted.size}; call destroy_process_group() first to start another job"
        )
    if verbose and adopted.rank == 0:
        ranks = _ranks(adopted.size)
        _say(f"torch.distributed is initialized ({ranks}, {groups.get_backend()}); using the existing group")


def _limit(timeout: timedelta | float | None, settings: Config) -> tuple[float, str]:
    """The timeout in seconds, and where it was set."""
    if timeout is None:
        return settings.timeout, settings.source("timeout")
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError):
        raise UsageError(f"timeout={timeout!r} is neither a timedelta nor a number of seconds") from None
    if not 0 < seconds <= MAX_SECONDS:
        raise UsageError(f"timeout={timeout} is not above 0 and at most {MAX_SECONDS:.0f} seconds")
    return seconds, getattr(timeout, "source", "argument")  # DeepSpeed's default names itself


def _wanted(dist_backend: str | None, settings: Config) -> tuple[str | None, str]:
    if dist_backend is not None:
        return dist_backend, "argument"
    if world.next_backend is not None:
        return world.next_backend, "set_backend"
    return settings.backend, settings.source("backend")


def _prepare(settings: Config, info: LaunchInfo) -> None:
    """Applies the configuration before the first group is made."""
    world.local_rank = info.local_rank
    world.max_object_bytes = settings.max_object_bytes
    world.check = settings.check
    watching.prepare(settings, info.rank)
    if configures_logger(settings):
        configure(settings)
    else:
        configure()  # applies what the user configured earlier to the recorder made above


def configures_logger(settings: Config) -> bool:
    """Whether the configuration says anything about the comms logger."""
    return any(settings.source(key) != "default" for key in SETTINGS if key.startswith("comms_logger."))


def _summary(info: LaunchInfo, choice: Choice, limit: float, limit_source: str, key: Key) -> str:
    backend = f"backend {choice.backend} ({choice.reason})"
    if world.policy is not None:
        backend += f", mixed by the policy in {world.policy.source}"
    secret = "" if key.open else f"; secret from {'ringway run' if info.socket else key.source}"
    return f"{_ranks(info.size)}, by {info.source}; {backend}; timeout {limit:g} s ({limit_source}){secret}"


def _ranks(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"


def _say(line: str) -> None:
    print(f"ringway: {line}", file=sys.stderr, flush=True)
