"""Makes ringway's own groups, when torch asks for one of the backends that are registered here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as c10d

from ringway import torch_versions
from ringway.backends import registry
from ringway.backends.base import Backend, GroupInfo
from ringway.backends.exchange import mark, mark_of
from ringway.backends.nccl.backend import NcclBackend
from ringway.backends.nccl.group import split_nccl
from ringway.backends.select import obstacle
from ringway.backends.several.mixed import agree, mixes
from ringway.backends.torch.gloo import GlooBackend, make_gloo
from ringway.compare.across_hosts import join_comparison
from ringway.compare.one_host import join_board, spans_hosts
from ringway.config import resolve
from ringway.errors import BackendUnavailable, UsageError
from ringway.groups.bridge import Bridge
from ringway.groups.reconfigure import Formed, ReconfigurableBridge, ReconfigureHandle, watch_for
from ringway.groups.world import world
from ringway.launch.attempts import of_this_attempt
from ringway.launch.rendezvous import admit
from ringway.launch.secret import say_open
from ringway.store import WatchedStore, key_of


def introduce_to_torch() -> None:
    """Makes the names of ringway's backends known to torch. Importing ringway calls it. From torch 2.14 on torch also
    calls it, through an entry point, when a program names one of them without having imported ringway; before,
    `ringway_autoload` does."""
    for registration in registry.registrations():
        register_with_torch(registration)


def register_with_torch(registration: registry.Registration) -> None:
    """Makes the name known to `torch.distributed.init_process_group`."""
    devices = (*registration.devices, *registration.others)
    torch_versions.register_backend(registration.torch_name, partial(_make_bridge, registration), devices)


def torch_spelling(backend: str) -> str:
    """The name by which torch makes the group. torch learns here of backends that the user combines, and of those that
    other packages bring."""
    for found in (registry.combined(backend), *map(registry.own, registry.parse(backend).values())):
        if found is not None and found.torch_name not in c10d.Backend.backend_list:
            register_with_torch(found)
    return registry.torch_spelling(backend)


def create_world(
    backend: str,
    timeout: timedelta | None,
    rank: int,
    size: int,
    store: c10d.Store | None,
    *,
    named: str | None = None,
    **options: Any,
) -> None:
    """Has torch create the world's group, in a store that all ranks have reached. torch names it by a number; `named`
    is what messages and traces call it."""
    for name in registry.parse(backend).values():
        what = obstacle(name) if name in _TORCHS else None
        if what is not None:
            raise BackendUnavailable(name, what.reason, remedy=what.remedy)
    try:
        with world.binding(options.get("device_id")), world.naming(named):
            c10d.init_process_group(
                torch_spelling(backend), timeout=timeout, world_size=size, rank=rank, store=store, **options
            )
    except BaseException:
        torch_versions.undo_failed_start()
        raise


_TORCHS = ("nccl", "ucc", "torch:mpi")
"""Backends that torch may lack. It would say so less clearly."""


def _make_bridge(registration: registry.Registration, options: Any, extra: Any) -> Bridge:
    """Makes one of ringway's groups. torch calls this on every rank of the group."""
    if getattr(options, "enable_reconfigure", False) or world.makes_reconfigurable:  # torch 2.15 passes it on
        return _make_reconfigurable(registration, options, extra)
    size = options.group_size
    info = GroupInfo(
        rank=options.group_rank,
        size=size,
        ranks=list(options.global_ranks_in_group) or list(range(size)),
        store=_admitted(options),
        name=world.next_name or options.group_id,
        timeout=options.timeout.total_seconds(),
        options=extra,
        split_from=torch_versions.split_source(options),
        bound_device=world.bound_device(),
        process=world.process,
    )
    return _bridge(registration, info, lambda: registry.make(registration, info), _others(registration, info))


def _others(registration: registry.Registration, info: GroupInfo) -> dict[str, Callable[[], Backend]]:
    """The backends of further devices."""
    others = registration.others.items()
    return {device: partial(registry.make, other, _apart(info, device)) for device, other in others}


def require_changeable(backend: str) -> None:
    """Refuses backends whose processes cannot change."""
    for name in registry.parse(backend).values():
        if name in ("mpi", "hierarchical_mpi", "torch:mpi"):
            raise UsageError(
                f"groups on '{name}' cannot change their members: MPI fixes its processes when they start. Use shm, "
                "gloo or hierarchical"
            )


def _make_reconfigurable(registration: registry.Registration, options: Any, extra: Any) -> ReconfigurableBridge:
    require_changeable(registration.name)
    base = of_this_attempt(options.store)

    def form(
        registration: registry.Registration, rank: int, size: int, name: str, store: c10d.Store, limit: float
    ) -> Formed:
        info = GroupInfo(
            rank=rank,
            size=size,
            ranks=range(size),
            store=store,
            name=name,
            timeout=limit,
            options=extra,
            process=world.process,
        )
        return _behind(registration, info, lambda: registry.make(registration, info), _others(registration, info))

    def form_of(handles: Sequence[ReconfigureHandle], rank: int, uuid: int, limit: float) -> Formed:
        world.reconfigured()
        name, size = f"{options.group_id}, reconfigured {uuid}", len(handles)
        part = WatchedStore(c10d.PrefixStore(name, base), key_of(base), watch_for(handles))
        store: c10d.Store = part
        if size > 1 and key_of(base).open:
            store = admit(part, rank, size, name, limit, require_secret=resolve().require_secret)
        communicator, torchs = form(registration, rank, size, name, store, limit)
        communicator.set_timeout(options.timeout.total_seconds())
        part.watch = None
        return communicator, torchs

    gloo = registry.own("gloo")  # of one rank, which any backend may not take
    assert gloo is not None
    name, limit = f"{options.group_id}, not configured", options.timeout.total_seconds()
    alone = form(gloo, 0, 1, name, c10d.HashStore(), limit)
    return ReconfigurableBridge(registration.torch_name, (options.group_rank, options.group_size), alone, form_of)


def _bridge(
    registration: registry.Registration,
    info: GroupInfo,
    make: Callable[[], Backend],
    others: dict[str, Callable[[], Backend]],
) -> Bridge:
    """The group around the backend that `make` makes, with `others` for further devices."""
    communicator, torchs = _behind(registration, info, make, others)
    bridge = Bridge(registration.torch_name, communicator, torchs, partial(_split, registration, info, count()))
    device = world.bound_device()
    if device is not None:
        bridge.bound_device_id = device
    return bridge


def _behind(
    registration: registry.Registration,
    info: GroupInfo,
    make: Callable[[], Backend],
    others: dict[str, Callable[[], Backend]],
) -> Formed:
    """What is behind a group: its communicator, and torch's own backends by device."""
    if "cuda" not in (*registration.devices, *others) and c10d.is_nccl_available() and torch.cuda.is_available():
        others = {**others, "cuda": partial(NcclBackend, info)}
    # shm compares calls in its own segment, but only those that go through it.
    compared = not registration.one_host or bool(others) or mixes(world.policy, registration.name, info.size)
    board, created = join_board(info) if compared else (None, None)
    mark(info)
    agreement = agree(world.policy, info)
    backend = make() if agreement is None else agreement.mixed(make(), info)
    backends: dict[str, Any] = dict.fromkeys(registration.devices, backend)
    for device, make_other in others.items():
        other = make_other()
        if agreement is not None:
            other = agreement.mixed_on(device, other, _apart(info, f"{device}/policy"))
        backends[device] = other
    torchs = {device: one.torch_group for device, one in backends.items() if one.torch_group is not None}
    if "cpu" in registration.devices:
        torchs["cpu"] = backend.torch_group or make_gloo(_apart(info, "inner"), loopback=registration.one_host)
        # torch's own gloo takes CUDA tensors too, if no other backend of torch's does.
        torchs |= {device: torchs["cpu"] for device in others if device not in torchs}
    elif "cpu" not in backends:
        backends["cpu"] = partial(GlooBackend, _apart(info, "cpu"))  # made by the first CPU tensor
    info = replace(info, mark=mark_of(info))
    communicator = world.add(info, backends)
    if board is not None:
        communicator.calls.compare(board, created)
    if compared and spans_hosts(info):
        communicator.spans_hosts = True
        comparison = join_comparison(info, world.check, world.recorder)
        if comparison is not None:
            communicator.calls.compare_across_hosts(comparison)
    return communicator, torchs


def _apart(info: GroupInfo, name: str) -> GroupInfo:
    """The same group with its own part of the store, for a second backend."""
    return replace(info, store=c10d.PrefixStore(f"ringway/{name}", info.store))


def _split(
    registration: registry.Registration,
    parent: GroupInfo,
    splits: Iterator[int],
    nccl: Any,
    ranks: list[int],
    name: str,
    **how: Any,
) -> Bridge | None:
    """Some ranks of a group as a group of their own, which shares its NCCL communicator. Every rank of the parent calls
    this, so `splits` counts the same on all; None on those that are not among `ranks`."""
    member = parent.rank in ranks
    # torch's name has the number of the rank's groups in it: it differs between ranks that are in other groups.
    shared_name = f"{parent.name}:split {next(splits)}:{ranks[0] if ranks else ''}"
    info = replace(
        parent,
        rank=ranks.index(parent.rank) if member else -1,
        size=len(ranks),
        ranks=[parent.ranks[rank] for rank in ranks],
        store=c10d.PrefixStore(f"{shared_name}/", parent.store),
        name=shared_name,
        timeout=how["timeout"].total_seconds(),
    )
    part = split_nccl(nccl, parent, ranks, how["options"], name, how["description"])
    if part is None:
        return None
    if registration.devices == ("cuda",):
        bridge = _bridge(registration, info, lambda: NcclBackend(info, part), {})
    else:
        bridge = _bridge(
            registration, info, lambda: registry.make(registration, info), {"cuda": lambda: NcclBackend(info, part)}
        )
    bridge._set_group_name(name)  # type: ignore[arg-type]
    bridge._set_group_desc(how["description"])
    return bridge


def _admitted(options: Any) -> c10d.Store:
    """The group's store. If torch made it, the ranks prove here that they have the job's secret."""
    store, rank, size, limit = options.store, options.group_rank, options.group_size, options.timeout.total_seconds()
    if size == 1 or not key_of(store).open or world.has_met_at(store):
        return of_this_attempt(store)
    required = resolve().require_secret
    store = admit(store, rank, size, options.group_id, limit, require_secret=required, lasting=True)
    if rank == 0 and key_of(store).open and not world.has_bridges():
        say_open()
    return store
