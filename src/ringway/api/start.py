"""Joining a job: meet the other ranks, choose a backend, create the world. `init_distributed` and `init_process_group`
share it."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from ringway.backends.select import Choice, select
from ringway.backends.several import policy
from ringway.config import MAX_SECONDS, SETTINGS, Config
from ringway.errors import DiscoveryError, UsageError
from ringway.groups.factory import create_world
from ringway.groups.world import world
from ringway.keys import Key
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import rendezvous
from ringway.launch.secret import say_open
from ringway.launch.sources import NO_LAUNCHER
from ringway.observe import start as watching
from ringway.observe.log.logger import configure
from ringway.store import key_of


def join(
    backend: str | None,
    timeout: timedelta | float | None,
    settings: Config,
    info: LaunchInfo,
    init_method: str | None,
    *,
    verbose: bool = True,
    **group: Any,
) -> None:
    """Joins the job as the rank that `info` says. `group` are torch's further options of the world's group."""
    limit = limit_of(timeout, settings)
    _check_launcher(info, settings)
    path = init_method.removeprefix("file://") if init_method and init_method.startswith("file://") else None
    token = os.environ.get("RINGWAY_JOB_TOKEN", "")
    store = rendezvous(info, limit.seconds, token=token, path=path, require_secret=settings.require_secret)
    start_world(info, store, settings, backend, limit, verbose=verbose, **group)
    for note in settings.notes:
        warnings.warn(note, stacklevel=3)


def start_world(
    info: LaunchInfo,
    store: Store,
    settings: Config,
    backend: str | None,
    limit: Limit,
    *,
    verbose: bool = True,
    **group: Any,
) -> None:
    """Chooses a backend and creates the world's group, once all ranks have reached the store."""
    world.store, key = store, key_of(store)
    explicit, said_by = _wanted(backend, settings)
    table = policy.consult(settings.policy, info.size)
    choice = select(explicit, said_by, info, store, limit.seconds, table)
    world.backend_reason = choice.reason
    world.policy = table if isinstance(table, policy.Policy) else None
    _prepare(settings, info)
    create_world(choice.backend, timedelta(seconds=limit.seconds), info.rank, info.size, store, **group)
    watching.begin(settings)
    if verbose and info.rank == 0:
        say(_summary(info, choice, limit, key))
    if info.rank == 0 and info.size > 1 and key.open and (verbose or world.communicator(None).spans_hosts):
        say_open()


def _check_launcher(info: LaunchInfo, settings: Config) -> None:
    """A world of one is what a program without a launcher wants, unless something says that there are other ranks."""
    if info.source != NO_LAUNCHER:
        return
    signs = "; but " + ", and ".join(info.notes) if info.notes else ""
    if settings.require_launcher:
        raise DiscoveryError(
            f"no launcher was found, and require_launcher is set ({settings.source('require_launcher')}){signs}. Start "
            "the program with torchrun, mpirun, srun or ringway run, or pass rank=, world_size= and init_method=",
            source=NO_LAUNCHER,
        )
    if signs:
        say(
            f"no launcher was found, so this process is a world of its own{signs}. If it has peers, start them with "
            "torchrun, mpirun, srun or ringway run, or pass rank=, world_size= and init_method=. "
            "RINGWAY_REQUIRE_LAUNCHER=1 refuses to start alone"
        )


@dataclass(frozen=True)
class Limit:
    """The timeout, and where it was set."""

    seconds: float
    source: str


def limit_of(timeout: timedelta | float | None, settings: Config) -> Limit:
    """The timeout that the caller gave, or that of the settings."""
    if timeout is None:
        return Limit(settings.timeout, settings.source("timeout"))
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError):
        raise UsageError(f"timeout={timeout!r} is neither a timedelta nor a number of seconds") from None
    if not 0 < seconds <= MAX_SECONDS:
        raise UsageError(f"timeout={timeout} is not above 0 and at most {MAX_SECONDS:.0f} seconds")
    return Limit(seconds, getattr(timeout, "source", "argument"))  # DeepSpeed's default names itself


def _wanted(backend: str | None, settings: Config) -> tuple[str | None, str]:
    if backend is not None:
        return backend, "argument"
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


def _summary(info: LaunchInfo, choice: Choice, limit: Limit, key: Key) -> str:
    backend = f"backend {choice.backend} ({choice.reason})"
    if world.policy is not None:
        backend += f", mixed by the policy in {world.policy.source}"
    secret = "" if key.open else f"; secret from {'ringway run' if info.socket else key.source}"
    return f"{ranks_text(info.size)}, by {info.source}; {backend}; timeout {limit.seconds:g} s ({limit.source}){secret}"


def ranks_text(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"


def say(line: str) -> None:
    print(f"ringway: {line}", file=sys.stderr, flush=True)
