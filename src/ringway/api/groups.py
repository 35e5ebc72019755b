"""Creating, querying and destroying groups: init_process_group and related functions, with torch's signatures."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed.device_mesh import DeviceMesh

from ringway import torch_versions
from ringway.api.reconfigure import init_reconfigurable
from ringway.backends import registry
from ringway.backends.base import Backend
from ringway.backends.select import select
from ringway.config import resolve
from ringway.errors import UsageError
from ringway.groups.factory import create_world, register_with_torch, torch_spelling
from ringway.groups.world import NON_MEMBER, world
from ringway.launch.discover import SCHEMES, discover
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import admit
from ringway.launch.secret import say_open
from ringway.store import key_of


def is_available() -> bool:
    """Whether torch was built with distributed support."""
    return c10d.is_available()


def is_initialized() -> bool:
    """Whether this process has joined a job."""
    return c10d.is_initialized()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: c10d.Store | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: torch.device | int | None = None,
    _ranks: list[int] | None = None,
    enable_reconfigure: bool = False,
) -> None:
    """Like torch's function, and it starts anywhere: without a store it finds the launcher, as `init_distributed` does.
    The group is ringway's own if ringway has the backend. Without a backend, the ranks choose one together: `shm` if
    all of them share a host. If the job has a secret, every rank proves first that it has it."""
    extra: dict[str, Any] = {} if _ranks is None else {"_ranks": _ranks}
    if enable_reconfigure:
        init_reconfigurable(backend, timeout, world_size, rank, store, group_name, pg_options, device_id)
        return
    extra |= {"group_name": group_name, "pg_options": pg_options, "device_id": device_id}
    name = backend or world.next_backend
    if name is not None and not c10d.is_initialized():
        torch_spelling(name)  # raises if there is no such backend
    if store is None and not c10d.is_initialized() and (init_method or "env://").startswith(SCHEMES):
        from ringway.api.start import join

        info = discover(rank=rank, size=world_size, init_method=init_method, asks_mpi=True)
        join(backend, timeout, resolve(), info, init_method, **extra)
        return
    limit = c10d.default_pg_timeout if timeout is None else timeout
    if not c10d.is_initialized():
        if store is None:  # a handler that the program has registered with torch
            store, rank, world_size = next(c10d.rendezvous(str(init_method), rank, world_size, timeout=limit))
            store.set_timeout(limit)
        store = world.store = _admitted(store, rank, world_size, limit)
        if name is None:
            here = LaunchInfo(rank=rank, size=world_size, source="init_process_group")
            choice = select(None, "", here, store, limit.total_seconds())
            name, world.backend_reason = choice.backend, choice.reason
    create_world(name or "gloo", timeout, rank, world_size, store, **extra)


def _admitted(given: c10d.Store, rank: int, size: int, limit: timedelta) -> c10d.Store:
    """A store that ringway did not make, once all ranks have proved that they have the job's secret, or rank 0 has said
    that there is none."""
    if given is world.store:  # they have met
        return given
    store = given
    if size > 1 and key_of(given).open:
        required = resolve().require_secret
        store = admit(given, rank, size, "of all ranks", limit.total_seconds(), require_secret=required)
    if rank == 0 and size > 1 and key_of(store).open:
        say_open()
    return store


def _named(backend: str | None) -> str | None:
    get_world_group()  # raises if there is no world
    name = backend or world.next_backend
    return None if name is None else torch_spelling(name)


def new_group(
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: Any = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Any:
    """Like torch's function. The default backend is the one given to `set_backend`, or else the world's."""
    name = _named(backend)
    members = None if ranks is None else list(ranks)
    extra = {} if sort_ranks or members is None or members == sorted(members) else {"sort_ranks": False}
    if extra and torch_versions.sorts_ranks():
        raise UsageError(
            f"torch {torch.__version__} sorts the ranks of every group: sort_ranks=False needs a newer torch"
        )
    apart = range(get_world_size()) if members is None else members
    counted = world.group_counts.members_only(apart) if use_local_synchronization else nullcontext()
    with counted, world.binding(device_id):
        return c10d.new_group(
            members, timeout, name, pg_options, use_local_synchronization, group_desc, device_id, **extra
        )


def new_subgroups(
    group_size: Any = None,
    group: Any = None,
    timeout: Any = None,
    backend: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
) -> Any:
    """Divide the world into groups of one size. Returns this rank's group and all groups."""
    return c10d.new_subgroups(group_size, group, timeout, _named(backend), pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Any,
    timeout: Any = None,
    backend: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
) -> Any:
    """Make one group for each list of ranks. Returns this rank's group and all groups."""
    return c10d.new_subgroups_by_enumeration(ranks_per_subgroup_list, timeout, _named(backend), pg_options, group_desc)


def _outside(group: Any) -> bool:
    return bool(group == NON_MEMBER)


def destroy_process_group(group: c10d.ProcessGroup | None = None) -> None:
    """Destroy a group, or all of them if None. Takes bounded time. Safe to call more than once, on any thread."""
    if not c10d.is_initialized() or _outside(group):
        return
    if group is not None and group not in c10d.distributed_c10d._world.pg_map:
        return
    for communicator in world.adopted(group):
        communicator.close()
    try:
        c10d.destroy_process_group(group)
    except (AssertionError, KeyError, ValueError):
        # torch's way to say that there is no such group: another thread has just destroyed it.
        if c10d.is_initialized() if group is None else group in c10d.distributed_c10d._world.pg_map:
            raise
    if not c10d.is_initialized():
        world.forget_default()


def settled(group: c10d.ProcessGroup | None = None) -> None:
    """Wait on the host until every CUDA collective of the group, or of all groups, has ended on its device, and raise
    what went wrong. Works of CPU tensors report their own errors.

    A wait for a CUDA collective only orders the stream. If a rank dies, the collective is aborted, and what is enqueued
    behind it runs on garbage. So call this before the result cannot be taken back: before `optimizer.step()`.

    It speaks for this rank and its own groups. In a mesh, call a barrier on a group that spans the mesh after it: a
    rank may have sent what it made of another group's garbage. Call it on the thread that makes the group's calls: a
    call that another thread is just starting is not waited for. Nor is the replay of a CUDA graph: synchronize its
    stream before.
    """
    for communicator in world.communicators() if group is None else [world.communicator(group)]:
        communicator.devices.settle()
        communicator.health.require()


def set_backend(name: str | None) -> None:
    """Set the backend of future groups that do not name one; None restores the default."""
    if name is not None:
        registry.parse(name)
    world.next_backend = name


def get_backend(group: c10d.ProcessGroup | None = None) -> str:
    """The backend's name as the user writes it."""
    _require_world()
    return registry.user_spelling(str(c10d.get_backend(group)))


def register_backend(name: str, backend: Any, devices: tuple[str, ...] | None = None) -> None:
    """Add your own backend: a subclass of `Backend`, or a function from a GroupInfo to one. From then on,
    `init_process_group(name)` creates groups on it, in ringway and in torch."""
    if isinstance(backend, type) and not issubclass(backend, Backend):
        raise UsageError(f"{backend.__name__} is not a ringway.Backend")
    register_with_torch(registry.register(name, backend, devices))


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: dict[Any, Any] | None = None,
) -> DeviceMesh:
    """torch's function, with groups of the world's backend."""
    if not c10d.is_initialized():
        init_process_group()
    extra = {} if backend_override is None else {"backend_override": backend_override}
    return c10d.init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, **extra)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A device mesh on the accelerator if there is one, otherwise on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=mesh_dim_names)


def get_world_group() -> c10d.ProcessGroup:
    """The group of all ranks."""
    group = c10d.group.WORLD
    if group is None:
        raise UsageError("there is no group yet: call ringway.init_distributed() or init_process_group() first")
    return group


def _require_world() -> None:
    """torch raises a ValueError that names no remedy. Under torch.compile there is a world, so do not check."""
    if not torch.compiler.is_dynamo_compiling() and not c10d.is_initialized():
        get_world_group()


def get_world_size(group: c10d.ProcessGroup | None = None) -> int:
    """The number of ranks in the group; -1 on a rank outside it."""
    _require_world()
    return c10d.get_world_size(group)


def get_rank(group: c10d.ProcessGroup | None = None) -> int:
    """This rank's number in the group; -1 on a rank outside it."""
    _require_world()
    return c10d.get_rank(group)


def get_local_rank() -> int:
    """This rank's number among the ranks of its host, according to the launcher."""
    if world.local_rank is not None:
        return world.local_rank
    said = os.environ.get("LOCAL_RANK")
    if said is None or not said.isdigit():
        raise UsageError(
            "the local rank is unknown: LOCAL_RANK is "
            + ("not set" if said is None else f"{said!r}, not a number")
            + "; start with torchrun or ringway run, or call ringway.init_distributed()"
        )
    return int(said)


def get_global_rank(group: c10d.ProcessGroup, group_rank: int) -> int:
    """The global rank of a group's rank."""
    return c10d.get_global_rank(group, group_rank)


def get_group_rank(group: c10d.ProcessGroup, global_rank: int) -> int:
    """The group's rank of a global rank."""
    return c10d.get_group_rank(group, global_rank)


def get_process_group_ranks(group: c10d.ProcessGroup | None) -> list[int]:
    """The global ranks of the group's members, in the group's order."""
    return c10d.get_process_group_ranks(group)


def get_all_ranks_from_group(group: c10d.ProcessGroup | None = None) -> list[int]:
    """The global ranks of the group's members, in the group's order."""
    return world.communicator(group).ranks
