"""The backends of groups that torch made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringway.backends.base import GroupInfo
from ringway.backends.nccl.backend import NcclBackend
from ringway.backends.torch.backend import C10dBackend, TorchBackend
from ringway.backends.torch.gloo import GlooBackend

_NCCLS = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")
"""torch's names for its NCCL backends. All but the first exist from 2.15 on."""


def adopt(info: GroupInfo, group: Any, backend: str, destroyed: Callable[[], bool] = lambda: False) -> C10dBackend:
    """Wraps torch's backend object for a device, without communication. `destroyed` says whether torch has ended it."""
    if backend == "gloo":
        return GlooBackend(info, group)
    if backend in _NCCLS:
        return NcclBackend(info, group, destroyed)
    adopted = TorchBackend(info, group)
    adopted.name = backend  # type: ignore[misc]
    return adopted
