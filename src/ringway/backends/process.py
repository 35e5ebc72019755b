"""What this process has once, shared by the backends of all its groups: threads, counters, connections."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

Part = TypeVar("Part")


class Process:
    """Holds one object of each kind, made on first use. The world owns one, and every `GroupInfo` carries it."""

    def __init__(self) -> None:
        self._parts: dict[type, Any] = {}
        self._lock = threading.RLock()

    def part(self, kind: type[Part]) -> Part:
        """This process's one `kind`."""
        found: Part | None = self._parts.get(kind)
        if found is None:
            with self._lock:
                found = self._parts[kind] = self._parts.get(kind) or kind()
        return found

    def forked(self) -> None:
        """A forked child starts afresh: the parent's threads do not exist in it."""
        self.__init__()  # type: ignore[misc]
