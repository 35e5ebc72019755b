"""Makes ringway's own groups, when torch asks for one of the backends that are registered here."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as c10d

from ringway import torch_versions
from ringway.backends import registry
from ringway.backends.base import GroupInfo
from ringway.backends.nccl.backend import NcclBackend
from ringway.backends.several.mixed import mixed, mixes
from ringway.backends.torch.gloo import make_gloo
from ringway.compare.across_hosts import join_comparison, reserve_prefix
from ringway.compare.one_host import join_board, spans_hosts
from ringway.groups.bridge import Bridge
from ringway.groups.world import world
from ringway.launch.rendezvous import admit
from ringway.launch.secret import given_key
from ringway.store import key_of


def introduce_to_torch() -> None:
    """Makes the names of ringway's backends known to torch. Importing ringway calls it. From torch 2.14 on torch also
    calls it, through an entry point, when a program names one of them without having imported ringway."""
    for registration in registry.registrations():
        register_with_torch(registration)


def register_with_torch(registration: registry.Registration) -> None:
    """Makes the name known to `torch.distributed.init_process_group`."""
    torch_versions.register_backend(registration.torch_name, partial(_make_bridge, registration), registration.devices)


def _make_bridge(registration: registry.Registration, options: Any, extra: Any) -> Bridge:
    """Makes one of ringway's groups. torch calls this on every rank of the group."""
    size = options.group_size
    info = GroupInfo(
        rank=options.group_rank,
        size=size,
        ranks=list(options.global_ranks_in_group) or list(range(size)),
        store=_admitted(options),
        name=options.group_id,
        timeout=options.timeout.total_seconds(),
        options=extra,
        process=world.process,
    )
    # shm compares calls in its own segment, but only those that go through it.
    compared = not registration.one_host or mixes(world.policy, registration.name, size)
    board, created = join_board(info) if compared else (None, None)
    if compared:
        reserve_prefix(info)
    backend = mixed(world.policy, registry.make(registration, info), info)
    inner_info = GroupInfo(**{**info.__dict__, "store": c10d.PrefixStore("ringway/inner", info.store)})
    inner = backend.torch_group or make_gloo(inner_info, loopback=registration.one_host)
    backends: dict[str, Any] = dict.fromkeys(registration.devices, backend)
    others: dict[str, Any] = {}
    if "cuda" not in backends and c10d.is_nccl_available() and torch.cuda.is_available():
        nccl = _make_nccl(info)
        others["cuda"] = nccl
        backends["cuda"] = NcclBackend(info, nccl, ours=True)
    communicator = world.add(info, backends)
    if board is not None:
        communicator.calls.compare(board, created)
    if compared and spans_hosts(info):
        communicator.spans_hosts = True
        comparison = join_comparison(info, world.check, world.recorder)
        if comparison is not None:
            communicator.calls.compare_across_hosts(comparison)
    return Bridge(registration.torch_name, communicator, inner, others)


def _admitted(options: Any) -> c10d.Store:
    """The group's store. If torch made it and the job has a secret, the ranks prove here that they have it."""
    if options.group_size == 1 or not key_of(options.store).open or given_key().open:
        store: c10d.Store = options.store
        return store
    limit = options.timeout.total_seconds()
    return admit(options.store, options.group_rank, options.group_size, options.group_id, limit)


def _make_nccl(info: GroupInfo) -> Any:
    """nccl for the CUDA tensors of one of ringway's groups: torch looks for no other devices' backends if the group is
    written in Python. It connects when the first CUDA tensor comes."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = c10d.default_pg_timeout
    options.global_ranks_in_group = list(info.ranks)
    options.group_name = info.name  # type: ignore[assignment]
    return c10d.ProcessGroupNCCL(c10d.PrefixStore("cuda", info.store), info.rank, info.size, options)
