"""The job's store: reading it without blocking, waiting for keys, sealed values, and what lies beneath its prefixes.

A wait inside torch's store does not hear Ctrl-C, so waits poll. Anyone who reaches a TCP store can read and write it,
so a job with a secret seals what it puts there: `KeyedStore`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ringway.errors import Tampered
from ringway.keys import Forged, Key

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.05

_NOT_SET = f"ringway: not set, {secrets.token_hex(16)}"
"""Never stored, and unknown to strangers: a key with this value would count as not set."""

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
    """The value of a key, or None if it is not set.

    One request: after a `check`, a `get` would wait for the key forever if another rank deletes it in between. If the
    key is not set, torch's stores return what they were to compare it with, and set nothing.
    """
    value = bytes(store.compare_set(key, _NOT_SET, _NOT_SET))
    return None if value == _NOT_SET.encode() else value


def absent(store: Store, keys: Sequence[str], deadline: Deadline) -> list[int]:
    """Waits for all the keys. The indexes of those that are not set by the deadline."""
    if deadline.poll(lambda: store.check(list(keys)) or None):
        return []
    return [index for index, key in enumerate(keys) if not store.check([key])]


class KeyedStore(Store):
    """A store whose values are sealed with the job's key. What a stranger writes raises `Tampered` where it is read.

    A stranger can still delete a key, or put back an older value of the same key. torch's C++ code calls it like any
    store, and holds only its C++ half: keep a reference to this object as long as the job lasts.
    """

    timeout: timedelta  # torch's property

    def __init__(self, inner: Any, key: Key) -> None:
        super().__init__()
        self.inner = inner
        self._base = unwrapped(inner)  # a prefix store holds only its C++ half
        self.key = key
        self._seal = key.derive("store")
        self._clones: list[KeyedStore] = []
        self.set_timeout(inner.timeout)

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        return self._seal.seal(key, value.encode() if isinstance(value, str) else bytes(value))

    def _opened(self, key: str, sealed: bytes) -> bytes:
        try:
            return self._seal.unseal(key, bytes(sealed))
        except Forged:
            raise Tampered(
                f"the value of {key!r} in the job's store was written by a process without the job's secret, and was "
                "not used. Keep strangers away from the store's port, or start the job with ringway run",
                what=key,
            ) from None

    def set(self, key: str, value: str | bytes) -> None:
        self.inner.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        self.inner.wait([key], self.timeout)
        return self._opened(key, self.inner.get(key))

    def check(self, keys: list[str]) -> bool:
        """A value that a stranger wrote is no answer: it raises."""
        found = {key: read(self.inner, key) for key in keys} if self.inner.check(keys) else {}
        values = [self._opened(key, sealed) for key, sealed in found.items() if sealed is not None]
        return bool(found) and len(values) == len(found)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.inner.wait(keys, self.timeout if timeout is None else timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._opened(key, value) for key, value in zip(keys, self.inner.multi_get(keys), strict=True)]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.inner.multi_set(keys, [self._sealed(k, v) for k, v in zip(keys, values, strict=True)])

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replaces the value by what `change` makes of it; None leaves it. Returns the value that is there then."""
        while True:
            before = read(self.inner, key)
            value = None if before is None else self._opened(key, before)
            wanted = change(value)
            if wanted is None:
                return value
            sealed = self._sealed(key, wanted)
            if bytes(self.inner.compare_set(key, before or b"", sealed)) == sealed:
                return wanted

    def add(self, key: str, amount: int) -> int:
        return int(self._change(key, lambda value: str(int(value or 0) + amount).encode()) or 0)

    def append(self, key: str, value: str | bytes) -> None:
        more = value.encode() if isinstance(value, str) else bytes(value)
        self._change(key, lambda before: (before or b"") + more)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = (text.encode() if isinstance(text, str) else bytes(text) for text in (expected, desired))
        found = self._change(key, lambda value: new if (value or b"") == old else None)
        return old if found is None else found  # as torch's stores do

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        return self.inner.num_keys()

    deleteKey = delete_key  # noqa: N815 - the names that torch's C++ code calls
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> KeyedStore:
        self._clones.append(KeyedStore(self.inner.clone(), self.key))
        return self._clones[-1]


def beneath_prefixes(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def key_of(store: Store) -> Key:
    """The key of the job that the store belongs to; an open key if the store has none."""
    return getattr(beneath_prefixes(store), "key", None) or Key()


def unwrapped(store: Store) -> Any:
    """The store beneath prefixes and seals."""
    while isinstance(store, (PrefixStore, KeyedStore)):
        store = store.underlying_store if isinstance(store, PrefixStore) else store.inner
    return store


class Connections:
    """Connections of this process's own, one to each TCP store: the program's may be blocked by a wait."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str], Store] = {}

    def to(self, store: Store) -> Store:
        inner = unwrapped(store)
        if not isinstance(inner, TCPStore):
            return beneath_prefixes(store)  # a file, or memory: a wait does not block it
        address = (inner.host, inner.port, key_of(store).token("connection"))
        try:
            self._known[address].check(["ringway"])
        except Exception:  # there is none, or it leads to an earlier job's store
            self._known[address] = beneath_prefixes(store).clone()  # type: ignore[attr-defined]
        return self._known[address]
