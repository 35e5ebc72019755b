"""Groups whose members can be replaced, with the functions that torch has from 2.15 on. ringway has them on every
version, for its own backends."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

from ringway import torch_versions
from ringway.backends import registry
from ringway.errors import UsageError
from ringway.groups.factory import create_world
from ringway.groups.reconfigure import ReconfigureOptions
from ringway.groups.world import world


def init_reconfigurable(
    backend: str | None,
    timeout: timedelta | None,
    world_size: int,
    rank: int,
    store: c10d.Store | None,
    group_name: str,
    pg_options: Any,
    device_id: torch.device | int | None,
) -> None:
    """A world without members: `_reconfigure` names them. On versions of torch before 2.15 too, for ringway's own
    backends."""
    name = backend or world.next_backend
    if name is None or store is None:
        raise UsageError("enable_reconfigure=True needs a backend and a store: the ranks have not met yet")
    extra = {"enable_reconfigure": True} if torch_versions.reconfigures() else {}
    if not extra and registry.own(name) is None:
        raise UsageError(f"enable_reconfigure=True for '{name}' needs torch 2.15, and this is {torch.__version__}")
    options = {**extra, "group_name": group_name, "pg_options": pg_options, "device_id": device_id}
    with world.reconfigurable() if registry.own(name) is not None else nullcontext():
        create_world(name, timeout, rank, world_size, store, **options)


def _supports_reconfigure(group: c10d.ProcessGroup | None = None) -> bool:
    """torch 2.15's function, on every version."""
    return bool(getattr(_group(group), "supports_reconfigure", False))


def _get_reconfigure_handle(group: c10d.ProcessGroup | None = None) -> str:
    """torch 2.15's function, on every version."""
    return str(_reconfigurable(group).get_reconfigure_handle())


def _reconfigure(
    uuid: int,
    handles: Collection[str],
    group: c10d.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    hints: dict[str, str] | None = None,
) -> Any:
    """torch 2.15's function, on every version."""
    if torch_versions.reconfigures():
        return c10d.distributed_c10d._reconfigure(uuid, handles, group, timeout, hints)  # type: ignore[attr-defined]
    return _reconfigurable(group).reconfigure(ReconfigureOptions(uuid, handles, timeout))


def _reconfigurable(group: c10d.ProcessGroup | None) -> Any:
    if not _supports_reconfigure(group):
        raise UsageError("this group cannot be reconfigured: make it with init_process_group(enable_reconfigure=True)")
    return _group(group)


def _group(group: c10d.ProcessGroup | None) -> Any:
    return c10d.distributed_c10d._get_default_group() if group is None else group
