"""The job's store: reading it without blocking, waiting for keys, sealed values, and what lies beneath its prefixes.

A wait inside torch's store ignores Ctrl-C, so waits poll. Anyone who reaches a TCP store can read and write it,
so a job with a secret seals what it puts there: `KeyedStore`.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from ringway.errors import Tampered
from ringway.keys import TAG_BYTES, Forged, Key

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.05

_REMEMBERED = 1024  # keys of a keyed store that a process looks after
_LOOKS = 64  # of those, at a time
_FIRST_LOOK = 1.0  # seconds after a write; the pauses grow
_LAST_LOOK = 30.0

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
        """Asks until there is an answer or no time is left. The pauses grow. The last question comes after the
        deadline: a process that was stopped still finds an answer that arrived while it was."""
        pause = _FIRST_PAUSE
        while True:
            is_last = self.left() == 0
            answer = question()
            if answer is not None or is_last:
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


PASSING = "ringway/passing/"
"""In the names of keys that one rank writes and deletes again once no rank reads them: they leave nothing behind."""

_HEADER = struct.Struct("<Q?")  # of a value: its version, and whether it is one or a tombstone
_NOTICE = "ringway/tampered"


class KeyedStore(Store):
    """A store whose values are sealed with the job's key. What a stranger does to it raises `Tampered`.

    Each value carries a version, and a deleted key leaves a tombstone. So a key that this process has read or written
    is never missing, and never has an older version: if so, a stranger deleted it or put an older value back. A process
    that waits looks now and then at all that it knows, because it may be the only one that can notice. It leaves a
    notice, so that all others that wait raise, too.

    torch's C++ code calls it like any store, and holds only its C++ half: keep a reference to this object as long as
    the job lasts.
    """

    timeout: timedelta  # torch's property

    def __init__(self, inner: Any, key: Key, known: _Known | None = None) -> None:
        super().__init__()
        self.inner = inner
        self._base = beneath_prefixes(inner)  # a prefix store holds only its C++ half
        self.key = key
        self._seal = key.derive("store")
        self._known = _Known() if known is None else known
        self._clones: list[KeyedStore] = []
        self.set_timeout(inner.timeout)

    def _look(self, key: str) -> _Found:
        """What is there now, checked against what this process knows."""
        # Before the request: another thread may learn of a later version while this one reads.
        latest = self._known.get(key)
        return self._checked(key, read(self.inner, key), latest)

    def _checked(self, key: str, sealed: bytes | None, latest: tuple[int, bytes] | None) -> _Found:
        if sealed is None:
            if latest is not None and self._known.get(key) is not None:  # not deleted by another thread since then
                raise self._tampered(key, "was deleted", "Its value is lost")
            return _Found(b"", 0, None)
        try:
            content = self._seal.unseal(key, sealed)
            version, alive = _HEADER.unpack_from(content)
        except (Forged, struct.error):
            raise self._tampered(key, "was written", "The value was not used") from None
        tag = sealed[:TAG_BYTES]
        if latest is not None and (version < latest[0] or (version == latest[0] and tag != latest[1])):
            raise self._tampered(key, "was put back to an older value", "The value was not used")
        if PASSING not in key:  # its writer deletes it
            self._known.learn(key, version, tag)
        return _Found(sealed, version, content[_HEADER.size :] if alive else None)

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replaces the value by what `change` makes of it; None leaves it. Returns the value that is there then."""
        while True:
            found = self._look(key)
            wanted = change(found.value)
            if wanted is None:
                if found.value is None:
                    self.look_around()
                return found.value
            if self._replaced(key, found, wanted):
                return wanted

    def _replaced(self, key: str, found: _Found, value: bytes | None) -> bool:
        """Writes the next version, or a tombstone if `value` is None, unless another rank has written one first."""
        version = found.version + 1
        sealed = self._seal.seal(key, _HEADER.pack(version, value is not None) + (value or b""))
        if bytes(self.inner.compare_set(key, found.sealed, sealed)) != sealed:
            return False
        self._known.learn(key, version, sealed[:TAG_BYTES])
        self._known.look_soon()
        return True

    def look_around(self) -> None:
        """Called where this process waits. Raises if a stranger deleted or put back what this process knows."""
        if not self._known.look_is_due():
            return
        with suppress(Forged):  # a notice of the stranger's
            what, _, text = self._seal.unseal(_NOTICE, read(self.inner, _NOTICE) or b"").decode().partition("\n")
            raise Tampered(f"another rank noticed: {text}", what=what)
        for key in self._known.to_look_at(lambda keys: bool(self.inner.check(keys))):
            self._look(key)

    def _tampered(self, key: str, how: str, outcome: str) -> Tampered:
        text = (
            f"the key {key!r} of the job's store {how} by a process without the job's secret. {outcome}. Keep "
            "strangers away from the store's port, or start the job with ringway run"
        )
        with suppress(Exception):  # the store may be gone
            self.inner.compare_set(_NOTICE, "", self._seal.seal(_NOTICE, f"{key}\n{text}".encode()))
        return Tampered(text, what=key)

    def set(self, key: str, value: str | bytes) -> None:
        new = _as_bytes(value)
        if self._known.get(key) is not None or not self._replaced(key, _Found(b"", 0, None), new):
            self._change(key, lambda _: new)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: list[str]) -> bool:
        """A value that a stranger wrote is no answer: it raises."""
        if self.inner.check(keys) and all(self._look(key).value is not None for key in keys):
            return True
        self.look_around()
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = Deadline((self.timeout if timeout is None else timeout).total_seconds())
        if not deadline.poll(lambda: self.check(keys) or None):
            raise DistStoreError(f"wait timeout after {deadline.seconds * 1000:.0f}ms, keys: {', '.join(keys)}")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        while True:
            values = [self._look(key).value for key in keys]
            found = [value for value in values if value is not None]
            if len(found) == len(keys):
                return found
            self.wait(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        def sum_of(value: bytes | None) -> bytes | None:
            return None if amount == 0 and value is not None else str(int(value or 0) + amount).encode()

        return int(self._change(key, sum_of) or 0)

    def append(self, key: str, value: str | bytes) -> None:
        more = _as_bytes(value)
        self._change(key, lambda before: (before or b"") + more)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = _as_bytes(expected), _as_bytes(desired)
        found = self._change(key, lambda value: new if (value or b"") == old else None)
        return old if found is None else found  # as torch's stores do

    def delete_key(self, key: str) -> bool:
        if PASSING in key:
            self._known.forget(key)
            return self.inner.delete_key(key)
        while (found := self._look(key)).value is not None:
            if self._replaced(key, found, None):
                return True
        return False

    def num_keys(self) -> int:
        return self.inner.num_keys()

    deleteKey = delete_key  # noqa: N815 - the names that torch's C++ code calls
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> KeyedStore:
        self._clones.append(KeyedStore(self.inner.clone(), self.key, self._known))
        return self._clones[-1]


@dataclass(frozen=True)
class _Found:
    """What a keyed store holds under a key: the sealed value, its version, and what is in it; None if deleted."""

    sealed: bytes
    version: int
    value: bytes | None


class _Known:
    """The latest version of each key that this process has read or written, of its latest thousand.

    Several threads and connections share it. It has no lock, which a forked child could find locked: if two threads
    learn at the same time, the earlier version may stay, and a later one is still accepted.
    """

    def __init__(self) -> None:
        self._latest: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        self._pause = _FIRST_LOOK
        self._next = time.monotonic() + _FIRST_LOOK
        self._turn = 0

    def get(self, key: str) -> tuple[int, bytes] | None:
        return self._latest.get(key)

    def learn(self, key: str, version: int, tag: bytes) -> None:
        before = self._latest.pop(key, (0, b""))
        self._latest[key] = max(before, (version, tag), key=lambda latest: latest[0])
        if len(self._latest) > _REMEMBERED:
            self._latest.popitem(last=False)

    def forget(self, key: str) -> None:
        self._latest.pop(key, None)

    def look_soon(self) -> None:
        self._pause = _FIRST_LOOK
        self._next = min(self._next, time.monotonic() + _FIRST_LOOK)

    def look_is_due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._pause = min(self._pause * 1.5, _LAST_LOOK)
        self._next = time.monotonic() + self._pause
        return True

    def to_look_at(self, all_there: Callable[[list[str]], bool]) -> list[str]:
        """Some of the keys in turn, or all if one is missing."""
        self._turn += 1
        keys = list(self._latest)
        if not keys or not all_there(keys):
            return keys
        start = self._turn * _LOOKS % len(keys)
        return (keys + keys)[start : start + min(_LOOKS, len(keys))]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class WatchedStore(Store):
    """A store whose waits end when a process that they count on is gone: `watch` raises then. Waits in torch's store
    would last until their timeout."""

    timeout: timedelta  # torch's property

    def __init__(self, inner: Any, key: Key, watch: Callable[[], None]) -> None:
        super().__init__()
        self.inner = inner
        self.key = key
        self._base = beneath_prefixes(inner)  # a prefix store holds only its C++ half
        self.watch: Callable[[], None] | None = watch
        """None ends the watching: later failures are explained through this store too."""
        self._clones: list[Store] = []
        self.set_timeout(inner.timeout)

    def _look(self) -> None:
        if self.watch is not None:
            self.watch()

    def set(self, key: str, value: str | bytes) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self.inner.get(key))

    def check(self, keys: list[str]) -> bool:
        self._look()
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self.timeout if timeout is None else timeout
        if not Deadline(limit.total_seconds()).poll(lambda: self.check(keys) or None):
            raise DistStoreError(f"wait timeout after {limit.total_seconds():g} s, keys: {', '.join(keys[:4])}")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return [bytes(value) for value in self.inner.multi_get(keys)]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.inner.multi_set(keys, values)

    def add(self, key: str, amount: int) -> int:
        return int(self.inner.add(key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        self.inner.append(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._look()
        return bytes(self.inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self.inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self.inner.num_keys())

    deleteKey = delete_key  # noqa: N815 - the names that torch's C++ code calls
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        self._clones.append(self.inner.clone())
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
    while isinstance(store, (PrefixStore, KeyedStore, WatchedStore)):
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
