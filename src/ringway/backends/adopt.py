"""The backends of groups that torch made."""

from __future__ import annotations

from typing import Any

from ringway.backends.base import GroupInfo
from ringway.backends.c10d import C10dBackend, GlooBackend, TorchBackend
from ringway.backends.nccl import NcclBackend


def adopt(info: GroupInfo, group: Any, backend: str) -> C10dBackend:
    """From torch's backend object for a device; nothing is sent."""
    if backend == "gloo":
        return GlooBackend(info, group)
    if backend == "nccl":
        return NcclBackend(info, group)
    adopted = TorchBackend(info, group)
    adopted.name = backend  # type: ignore[misc]
    return adopted
