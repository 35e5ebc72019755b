"""Adoption of groups that torch made: their facts and their backends, read from torch without any communication."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
import torch.distributed.distributed_c10d as c10d_module

from ringway.backends import registry
from ringway.backends.base import Backend, GroupInfo
from ringway.backends.process import Process
from ringway.backends.torch.adopt import adopt
from ringway.backends.torch.gloo import GlooBackend
from ringway.errors import UsageError


def read_group(group: c10d.ProcessGroup, process: Process) -> tuple[GroupInfo, dict[str, Any]]:
    """The facts of a group that torch made, and its backends by device."""
    entry = c10d_module._world.pg_map.get(group)
    if entry is None:
        raise UsageError("this group is not one of torch.distributed's; was it destroyed?")
    backend, store = entry
    info = GroupInfo(
        rank=group.rank(),
        size=group.size(),
        ranks=sorted(c10d.get_process_group_ranks(group), key=lambda rank: c10d.get_group_rank(group, rank)),
        store=store,
        name=c10d_module._world.pg_names[group],
        timeout=_timeout_of(group).total_seconds(),
        process=process,
    )
    return info, torch_backends(info, group, str(backend))


def _timeout_of(group: c10d.ProcessGroup) -> timedelta:
    """The timeout that the group was made with; torch's default if its backend does not say."""
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return c10d.default_pg_timeout


def torch_backends(info: GroupInfo, group: c10d.ProcessGroup, backend: str) -> dict[str, Any]:
    """The backends by device. If the group has none for CPU tensors, the first CPU tensor makes a gloo for them."""
    if ":" in backend:
        config = dict(part.split(":", 1) for part in backend.split(","))
    else:
        config = {str(device.type): backend for device in group._device_types}
    # Hold torch's backend objects, not the group: holding the group would keep torch from forgetting it.
    known = weakref.ref(group)
    backends: dict[str, Any] = {
        device: adopt(
            info,
            group._get_backend(torch.device(device)),
            registry.user_spelling(name),
            destroyed=lambda: known() not in c10d_module._world.pg_map,
        )
        for device, name in config.items()
    }
    if "cpu" not in backends:

        def cpu() -> Backend:
            store = c10d.PrefixStore("ringway/cpu", info.store)
            return GlooBackend(GroupInfo(**{**info.__dict__, "store": store}))

        backends["cpu"] = cpu
    return backends
