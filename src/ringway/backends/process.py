"""What a process or a group has once, each made on first use: threads, counters, connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Part = TypeVar("Part")


class Parts:
    """Holds one object of each kind. A communicator has one for what features count or keep for its group."""

    def __init__(self) -> None:
        self._parts: dict[Callable[[], Any], Any] = {}
        self._lock = threading.RLock()

    def part(self, kind: Callable[[], Part]) -> Part:
        """The one `kind`."""
        if kind not in self._parts:
            with self._lock:
                if kind not in self._parts:
                    self._parts[kind] = kind()
        found: Part = self._parts[kind]
        return found


class Process(Parts):
    """What the groups of this process share. The world owns one, and every `GroupInfo` carries it."""

    def forked(self) -> None:
        """A forked child starts afresh: the parent's threads do not exist in it."""
        self.__init__()  # type: ignore[misc]
