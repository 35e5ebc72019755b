"""deepspeed's base class of backend objects, and its description of a group."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


class ProcessGroup:
    """deepspeed's description of a group: its members and its number. It cannot be passed as `group=`."""

    def __init__(self, comm_id: int, ranks: Sequence[int] = ()) -> None:
        self.comm_id = comm_id
        self.ranks = list(ranks)
        self.size = len(self.ranks)


class Backend:
    """The base class of deepspeed's backend objects."""

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.world_group: Any = None
        self.world_size = size
        self.world_rank = rank
        self.process_groups: list[Any] = []
        self.initialized = False

    def is_initialized(self) -> bool:
        return self.initialized

    def new_group(self) -> Any:
        """Subclasses create groups; the base class has nothing to create them from."""
        return None

    def init_process_group(self) -> None:
        self.initialized = True


_MOVED = {"TorchBackend": "ringway.compat.deepspeed.torch", "CCLBackend": "ringway.compat.deepspeed.ccl"}
"""Classes that were here. Their modules import this one, so they are imported on use."""


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MOVED[name]), name)
