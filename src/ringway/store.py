"""The job's store: reading it without blocking, waiting for keys, and what lies beneath its prefixes.

A wait inside torch's store does not hear Ctrl-C, so waits poll.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.05

Value = TypeVar("Value")


class Deadline:
    """The moment `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def poll(self, question: Callable[[], Value | None], longest_pause: float = _LONGEST_PAUSE) -> Value | None:
        """Asks until there is an answer or no time is left. The pauses grow."""
        pause = _FIRST_PAUSE
        while True:
            answer = question()
            if answer is not None or self.left() == 0:
                return answer
            time.sleep(min(pause, self.left()))
            pause = min(pause * 1.5, longest_pause)


def read(store: Store, key: str) -> bytes | None:
    """The value of a key, or None if it is not set."""
    return bytes(store.get(key)) if store.check([key]) else None


def absent(store: Store, keys: Sequence[str], deadline: Deadline) -> list[int]:
    """Waits for all the keys. The indexes of those that are not set by the deadline."""
    if deadline.poll(lambda: store.check(list(keys)) or None):
        return []
    return [index for index, key in enumerate(keys) if not store.check([key])]


def unwrapped(store: Store) -> Any:
    """The store beneath its prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class Connections:
    """Connections of this process's own, one to each TCP store: the program's may be blocked by a wait."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Store] = {}

    def to(self, store: Store) -> Store:
        inner = unwrapped(store)
        if not isinstance(inner, TCPStore):
            return inner  # a file, or memory: a wait does not block it
        address = (inner.host, inner.port)
        try:
            self._known[address].check(["ringway"])
        except Exception:  # there is none, or it leads to an earlier job's store
            self._known[address] = inner.clone()  # type: ignore[attr-defined]
        return self._known[address]
