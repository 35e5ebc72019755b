"""Reading the job's store without blocking."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as c10d

from ringway import store as stores
from ringway.errors import Tampered
from ringway.keys import Key
from ringway.store import PASSING, Deadline, KeyedStore, absent, read


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
    """The key is deleted right after it was seen: torch's `get` would wait for it until the timeout."""

    class Deleting(c10d.HashStore):
        def check(self, keys: list[str]) -> bool:
            found = super().check(keys)
            for key in keys:
                self.delete_key(key)
            return found

    inner: Any = Deleting()
    if sealed:
        _keyed(inner).set("key", "value")
        assert not _keyed(inner).check(["key"])
        return
    inner.set("key", "value")
    assert read(inner, "key") in (b"value", None)
    inner.set("key", "value")
    inner.check(["key"])
    assert read(inner, "key") is None


@pytest.mark.timeout(30)
def test_no_value_of_a_stranger_counts_as_not_set() -> None:
    """It would make a rank compare and set for ever."""
    inner = c10d.HashStore()
    store = KeyedStore(inner, Key(b"secret" * 6))
    inner.set("key", "\0ringway: not set")
    with pytest.raises(Tampered):
        store.compare_set("key", "", "value")


def _keyed(inner: c10d.Store) -> KeyedStore:
    return KeyedStore(inner, Key(b"secret" * 6))


def test_a_deleted_key_is_gone_for_all_and_can_be_set_again() -> None:
    inner = c10d.HashStore()
    one, other = _keyed(inner), _keyed(inner)
    for text in ("first", "second"):
        one.set("key", text)
        assert other.get("key") == text.encode()
        assert other.delete_key("key")
        assert not one.delete_key("key")
        for store in (one, other):
            assert read(store, "key") is None
            assert not store.check(["key"])
            with pytest.raises(c10d.DistStoreError, match="wait timeout after 10ms, keys: key"):
                store.wait(["key"], timedelta(milliseconds=10))
    assert one.add("count", 2) == 2
    assert one.delete_key("count")
    assert other.add("count", 3) == 3


def test_keys_of_one_rank_that_are_soon_deleted_leave_nothing_behind() -> None:
    inner = c10d.HashStore()
    one, other = _keyed(inner), _keyed(inner)
    for number in range(3):
        one.set(f"{PASSING}{number}", "here")
        assert other.get(f"{PASSING}{number}") == b"here"
        assert one.delete_key(f"{PASSING}{number}")
        for store in (one, other):
            assert read(store, f"{PASSING}{number}") is None
    assert inner.num_keys() == 0


Attack = Callable[[c10d.Store, bytes], Any]
_ATTACKS: dict[str, Attack] = {
    "was deleted": lambda inner, _: inner.delete_key("key"),
    "was put back to an older value": lambda inner, older: inner.set("key", older),  # type: ignore[arg-type]
    "was written": lambda inner, _: inner.set("key", "x" * 60),
}


@pytest.mark.parametrize("how", _ATTACKS)
def test_a_key_that_a_stranger_deletes_or_puts_back_is_named(how: str) -> None:
    """Where it is read, by every rank that knew it."""
    uses: tuple[Callable[[c10d.Store], Any], ...] = (
        lambda store: read(store, "key"),
        lambda store: store.get("key"),
        lambda store: store.set("key", "new"),
        lambda store: store.add("key", 1),
        lambda store: store.compare_set("key", "2", "3"),
        lambda store: store.delete_key("key"),
    )
    for use in uses:
        for changed in ("add", "delete"):
            inner = c10d.HashStore()
            writer, reader = _keyed(inner), _keyed(inner)
            writer.set("key", "1")
            older = bytes(inner.get("key"))
            if changed == "add":
                assert reader.add("key", 1) == 2
                assert writer.add("key", 0) == 2
            else:
                assert reader.delete_key("key")
                assert read(writer, "key") is None
            _ATTACKS[how](inner, older)
            for store in (writer, reader, reader.clone() if hasattr(inner, "clone") else reader):
                words = f"the key 'key' of the job's store {how} by a process without"
                with pytest.raises(Tampered, match=words) as caught:
                    use(store)
                assert caught.value.what == "key"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", _ATTACKS)
def test_a_rank_that_waits_notices_what_happens_to_keys_that_it_knows(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that waits for the key may never have seen it, and cannot tell that it was there."""
    monkeypatch.setattr(stores, "_FIRST_LOOK", 0.01)
    waits: tuple[Callable[[c10d.Store], Any], ...] = (
        lambda store: store.get("awaited"),
        lambda store: store.wait(["awaited"]),
        lambda store: Deadline(30).poll(lambda: read(store, "awaited")),
        lambda store: absent(store, ["key", "awaited"], Deadline(30)),
    )
    for wait in waits:
        inner = c10d.HashStore()
        writer, other = _keyed(inner), _keyed(inner)
        for number in range(200):  # more than it looks at in one go
            writer.set(f"another {number}", "")
        writer.set("key", "1")
        older = bytes(inner.get("key"))
        writer.set("key", "2")
        _ATTACKS[how](inner, older)
        with pytest.raises(Tampered, match=f"^the key 'key' of the job's store {how}"):
            wait(writer)
        with pytest.raises(Tampered, match=f"^another rank noticed: the key 'key' of the job's store {how}") as caught:
            wait(other)
        assert caught.value.what == "key"


def test_what_another_thread_learned_meanwhile_is_no_tampering() -> None:
    """A reply that was on its way while another connection of this process saw the next version."""

    class Slow(c10d.HashStore):
        def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
            found = super().compare_set(key, expected, desired)
            if self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                meanwhile()
            return found

        meanwhile: Callable[[], Any] | None = None

    inner = Slow()
    store = _keyed(inner)
    other = KeyedStore(inner, store.key, store._known)
    store.set("key", "1")
    inner.meanwhile = lambda: other.set("key", "2")
    assert read(store, "key") == b"1"
    assert read(store, "key") == b"2"
    store.set(f"{PASSING}key", "1")
    inner.delete_key(f"{PASSING}key")
    inner.meanwhile = lambda: other.delete_key(f"{PASSING}key")
    assert read(store, f"{PASSING}key") is None


def test_a_process_remembers_a_bounded_number_of_keys() -> None:
    store = _keyed(c10d.HashStore())
    for number in range(3000):
        store.set(str(number), "")
    assert len(store._known._latest) == 1024


def test_what_came_while_a_process_stood_still_is_found() -> None:
    """The deadline passes after the first question, before the answer is there."""
    asked: list[str | None] = []

    class Passes(Deadline):
        def left(self) -> float:
            return 0.0 if asked else 1.0

    def question() -> str | None:
        asked.append("here" if asked else None)
        return asked[-1]

    assert Passes(1.0).poll(question) == "here"
    assert Passes(1.0).poll(lambda: None) is None
