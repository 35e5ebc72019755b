"""Reading the job's store without blocking."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as c10d

from ringway.errors import Tampered
from ringway.keys import Key
from ringway.store import KeyedStore, read


def _tcp() -> c10d.Store:
    return c10d.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture(params=["hash", "file", "tcp", "prefix", "keyed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> c10d.Store:
    make: dict[str, Callable[[], c10d.Store]] = {
        "hash": c10d.HashStore,
        "file": lambda: c10d.FileStore(str(tmp_path / "store"), 1),
        "tcp": _tcp,
        "prefix": lambda: c10d.PrefixStore("part", _tcp()),
        "keyed": lambda: KeyedStore(_tcp(), Key(b"secret" * 6)),
    }
    return make[request.param]()


def test_reading_sets_nothing_and_waits_for_nothing(store: c10d.Store) -> None:
    assert read(store, "absent") is None
    assert not store.check(["absent"])
    store.set("key", "value")
    assert read(store, "key") == b"value"
    assert read(store, "key") == b"value"
    store.delete_key("key")
    assert read(store, "key") is None
    assert store.compare_set("absent", "expected", "desired") == b"expected"
    assert not store.check(["absent"])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_key_that_is_deleted_while_it_is_read_does_not_block(sealed: bool) -> None:
    """Another rank deletes the key right after it was seen: torch's `get` would wait for it until the timeout."""

    class Deleting(c10d.HashStore):
        def check(self, keys: list[str]) -> bool:
            found = super().check(keys)
            for key in keys:
                self.delete_key(key)
            return found

    inner: Any = Deleting()
    store = KeyedStore(inner, Key(b"secret" * 6)) if sealed else inner
    store.set("key", "value")
    assert read(store, "key") in (b"value", None)
    store.set("key", "value")
    store.check(["key"])
    assert read(store, "key") is None


@pytest.mark.timeout(30)
def test_no_value_of_a_stranger_counts_as_not_set() -> None:
    """It would make a rank compare and set for ever."""
    inner = c10d.HashStore()
    store = KeyedStore(inner, Key(b"secret" * 6))
    inner.set("key", "\0ringway: not set")
    with pytest.raises(Tampered):
        store.compare_set("key", "", "value")
