"""Keys, sealed stores, and where the secret comes from."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from free_ports import free_port
from ringway.errors import ConfigError, RendezvousError, Tampered
from ringway.job.elastic.roster import Arrival, Roster
from ringway.keys import Forged, Key
from ringway.launch import attempts, secret
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import LastingStore
from ringway.launch.run_store import RunStore
from ringway.launch.secret import PrivateSecret
from ringway.launch.store_protocol import CLIENT, NONCE_BYTES, RUN_BYTES, Session
from ringway.launch.store_server import PrivateSocket, StoreServer
from ringway.store import KeyedStore, key_of, read

KEY = Key(b"k" * 32, "test")
STRANGER = Key(b"s" * 32, "test")
RUN = "0" * 32


@given(st.text(), st.binary(max_size=100), st.integers(min_value=0), st.integers(0, 7))
def test_sealed_values_are_what_was_sealed(label: str, value: bytes, place: int, bit: int) -> None:
    sealed = KEY.seal(label, value)
    assert KEY.unseal(label, sealed) == value
    damaged = bytearray(sealed)
    damaged[place % len(damaged)] ^= 1 << bit
    for key, named, text in (
        (KEY, label, bytes(damaged)),
        (KEY, label + "'", sealed),
        (STRANGER, label, sealed),
        (KEY.derive("another purpose"), label, sealed),
        (KEY, label, sealed[: place % len(sealed)]),
    ):
        with pytest.raises(Forged):
            key.unseal(named, text)


def test_parts_of_a_tag_cannot_be_moved_between_each_other() -> None:
    assert len({KEY.tag("ab", "c"), KEY.tag("a", "bc"), KEY.tag("abc"), KEY.tag("abc", "")}) == 4


def test_hidden_tokens_are_read_by_holders_of_the_key_only() -> None:
    token = "0123456789abcdef" * 2
    hidden = KEY.hide("responder", token)
    assert KEY.reveal("responder", hidden) == token
    assert token not in hidden
    assert hidden != KEY.hide("responder", token)
    assert STRANGER.reveal("responder", hidden) != token


def test_a_key_shows_its_secret_nowhere() -> None:
    key = Key.from_text("a secret of at least 32 characters", "RINGWAY_JOB_SECRET")
    assert repr(key) == "Key(RINGWAY_JOB_SECRET)"
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(key)


# Where the secret comes from


def test_given_secrets(tmp_path: Path) -> None:
    text = "0123456789abcdef" * 4
    file = tmp_path / "secret"
    file.write_text("another secret of at least 32 characters\n")
    file.chmod(0o600)
    assert secret.given_key({}).open
    tags = {
        secret.given_key({"RINGWAY_JOB_SECRET": text}).tag("x"),
        secret.given_key({"RINGWAY_JOB_SECRET_FILE": str(file)}).tag("x"),
    }
    assert len(tags) == 2
    with pytest.raises(ConfigError, match="has 5 characters, and at least 32 are needed") as caught:
        secret.given_key({"RINGWAY_JOB_SECRET": "short"})
    assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="set one of them"):
        secret.given_key({"RINGWAY_JOB_SECRET": text, "RINGWAY_JOB_SECRET_FILE": str(file)})
    with pytest.raises(ConfigError, match="cannot read"):
        secret.given_key({"RINGWAY_JOB_SECRET_FILE": str(tmp_path / "none")})
    (tmp_path / "empty").touch(mode=0o600)
    with pytest.raises(ConfigError, match="has 0 characters"):
        secret.given_key({"RINGWAY_JOB_SECRET_FILE": str(tmp_path / "empty")})
    for mode in (0o644, 0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="can be read by other users"):
            secret.given_key({"RINGWAY_JOB_SECRET_FILE": str(file)})


def test_ranks_of_one_host_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    info = LaunchInfo(rank=0, size=2, local_size=2, source="Slurm", job="slurm 7.0")
    tags = []
    for _ in range(3):  # as three processes would
        monkeypatch.setattr(secret, "_known", {})
        file = secret.host_file(info)
        assert file is not None
        tags.append(file.key().tag("x"))
    assert len(set(tags)) == 1
    folder = tmp_path / "ringway"
    (made,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, made.stat().st_mode & 0o777) == (0o700, 0o600)
    other = secret.host_file(LaunchInfo(rank=0, size=2, local_size=2, source="Slurm", job="slurm 8.0"))
    assert other is not None
    assert other.key().tag("x") != tags[0]
    file.remove()
    assert file.key().tag("x") == tags[0]  # a program that starts again keeps it
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="is not a directory of this user with mode 0700"):
        secret.host_file(info)
    for elsewhere in (LaunchInfo(rank=0, size=2, source="Slurm", job="a"), LaunchInfo(rank=0, size=1, source="Slurm")):
        assert secret.host_file(elsewhere) is None


# Stores


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a private store."""
    folder = tmp_path / ("long" * 60)  # longer than the address of a unix socket
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with PrivateSocket() as listening:
        assert list(folder.iterdir()) == []
        server = StoreServer(listening.listener, RUN, KEY)
        yield listening.path
        server.close()


def test_a_secret_in_memory_is_readable_by_its_user_only() -> None:
    with PrivateSecret() as made:
        assert os.stat(made.path).st_mode & 0o777 == 0o600
        assert made.key.tag("x") == secret.given_key({"RINGWAY_JOB_SECRET_FILE": made.path}).tag("x")
        with PrivateSecret() as other:
            assert other.key.tag("x") != made.key.tag("x")


def _exercise(store: Store, other: Store) -> None:
    """What torch's own stores do. `other` is a second client."""
    store.set("key", b"\xff\0")  # type: ignore[arg-type]
    assert other.get("key") == b"\xff\0"
    assert store.check(["key"])
    assert not store.check(["key", "none"])
    assert [store.add("count", 2), other.add("count", 3), store.add("count", 0)] == [2, 5, 5]
    assert store.get("count") == b"5"
    assert store.compare_set("first", "", "mine") == b"mine"
    assert other.compare_set("first", "", "theirs") == b"mine"
    assert other.compare_set("first", "mine", "theirs") == b"theirs"
    assert other.compare_set("absent", "expected", "new") == b"expected"
    assert not store.check(["absent"])
    store.multi_set(["a", "b"], ["1", "2"])  # type: ignore[attr-defined]
    assert other.multi_get(["a", "b", "key"]) == [b"1", b"2", b"\xff\0"]
    store.append("a", "x")  # type: ignore[attr-defined]
    assert other.get("a") == b"1x"
    assert store.delete_key("a")
    assert not other.check(["a"])
    store.set_timeout(timedelta(milliseconds=50))
    for wait in (lambda: store.get("none"), lambda: store.wait(["none"], timedelta(milliseconds=20))):
        with pytest.raises(DistStoreError):
            wait()
    store.set_timeout(timedelta(seconds=60))
    late = threading.Timer(0.05, other.set, ("late", "value"))
    late.start()
    assert store.get("late") == b"value"
    late.join()

    def count(each: Store) -> None:
        for _ in range(20):
            each.add("both", 1)

    added = [threading.Thread(target=count, args=(each,)) for each in (store, other)]
    for thread in added:
        thread.start()
    for thread in added:
        thread.join()
    assert store.add("both", 0) == 40


def test_stores_behave_like_torchs(private: str) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(2)]
    _exercise(clients[0], clients[1])
    keyed = [KeyedStore(PrefixStore("job", client), KEY) for client in clients]
    _exercise(PrefixStore("group", keyed[0]), PrefixStore("group", keyed[1]))
    both = [RunStore(private, KEY, 60) for _ in range(2)]
    _exercise(both[0], both[1])
    _exercise(PrefixStore("group", both[0]), PrefixStore("group", both[1]))
    assert both[0].num_keys() == both[1].num_keys() > 5
    assert key_of(PrefixStore("group", keyed[0])) is KEY
    assert key_of(PrefixStore("group", clients[0])).open


def test_add_to_a_value_that_is_no_number_is_an_error_of_the_call(private: str) -> None:
    store = RunStore(private, KEY, 30)
    for each in (store, KeyedStore(HashStore(), KEY), HashStore()):
        each.set("text", "abc")
        with pytest.raises(ValueError):  # noqa: PT011 - torch's own says only "stoll"
            each.add("text", 1)
        assert bytes(each.get("text")) == b"abc"
    with pytest.raises(ValueError, match="the value of 'text' in the job's store is not an integer"):
        store.add("text", 1)


class _SlowList(list[Any]):
    """A list whose `pop` another thread is inside of."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.inside, self.leave = threading.Event(), threading.Event()

    def pop(self, *arguments: Any) -> Any:
        self.inside.set()
        self.leave.wait()
        return super().pop(*arguments)


@pytest.mark.timeout(60)
def test_a_forked_child_may_use_the_private_store(private: str) -> None:
    """Another thread takes a connection at the moment of the fork, as a rank's stall watch may."""
    store = RunStore(private, KEY, 30)
    slow = store._idle = _SlowList(store._idle)
    thread = threading.Thread(target=store.check, args=(["key"],))
    thread.start()
    slow.inside.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs must not outlive the test
        store.set("child", "here")
        os._exit(0)
    slow.leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("child") == b"here"


def test_what_a_stranger_writes_is_named_and_not_used() -> None:
    inner = HashStore()
    store = KeyedStore(inner, KEY)
    store.set("fault", "mine")
    sealed = bytes(inner.get("fault"))
    store.set("other", "mine too")
    strangers = HashStore()
    KeyedStore(strangers, STRANGER).set("fault", "x")
    for forged in (
        b"",
        b"5",
        b"{}",
        bytes(strangers.get("fault")),
        bytes(inner.get("other")),
        sealed[:-1],
    ):
        inner.set("fault", forged)  # type: ignore[arg-type]
        for use in (
            lambda: store.get("fault"),
            lambda: store.check(["fault"]),
            lambda: store.add("fault", 1),
            lambda: store.multi_get(["other", "fault"]),
            lambda: store.compare_set("fault", "", "new"),
        ):
            with pytest.raises(Tampered, match="'fault' of the job's store was written by a process without") as caught:
                use()
            assert caught.value.what == "fault"
    inner.set("fault", sealed)  # type: ignore[arg-type]
    assert store.get("fault") == b"mine"


def test_a_client_without_the_secret_is_refused(private: str) -> None:
    assert os.stat(private).st_mode & 0o777 == 0o600
    with pytest.raises(DistNetworkError, match="closed the connection"):
        RunStore(private, STRANGER, 5)
    mine = RunStore(private, KEY, 5)
    for noise in (b"", b"\0", os.urandom(63), os.urandom(64), os.urandom(5000), struct.pack("<I", 1 << 31) * 40):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(private)
            link.settimeout(10)
            link.sendall(noise)
            if len(noise) >= 64:
                answer = link.recv(4096)
                assert len(answer) in (0, 64)  # its name and nonce, then the end
                assert len(answer) == 0 or link.recv(4096) == b""
        mine.set("alive", str(len(noise)))
    assert mine.get("alive") == str(160).encode()


def test_a_flood_drops_its_own_connections() -> None:
    """A rank that is slow to prove itself keeps its place while strangers of another address connect."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        server = StoreServer(listener.dup(), RUN, KEY)
        try:
            with socket.create_connection(listener.getsockname(), 10, ("127.0.0.2", 0)) as slow:
                flood = [socket.create_connection(listener.getsockname(), 10) for _ in range(600)]
                RunStore(place, KEY, 5).set("key", "value")  # of the flood's address: it tries again
                slow.settimeout(10)
                nonces = slow.recv(4096)[RUN_BYTES:], os.urandom(NONCE_BYTES)
                session = Session(KEY, CLIENT, *nonces)
                slow.sendall(nonces[1] + session.proof)
                assert session.is_proven_by(slow.recv(4096))
            for stranger in flood:
                stranger.close()
        finally:
            server.close()


def test_a_server_without_the_secret_is_refused() -> None:
    with PrivateSocket() as listening:
        server = StoreServer(listening.listener, RUN, STRANGER)
        with pytest.raises(DistNetworkError):
            RunStore(listening.path, KEY, 5)
        server.close()


# Earlier starts and attempts of the job


@pytest.fixture
def secret_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGWAY_JOB_SECRET", "s" * 40)


@pytest.mark.usefixtures("secret_in_environment")
def test_what_an_earlier_start_sealed_proves_nothing_in_this_one() -> None:
    """An elastic job is started twice with the same secret, and a stranger repeats in the second what it read in the
    first: that the job is done."""

    def started() -> tuple[LastingStore, TCPStore]:
        port = free_port()
        lasting = LastingStore(LaunchInfo(rank=0, size=2, source="test", address="127.0.0.1", port=port), 30.0)
        return lasting, TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))

    (first, stranger), (second, again) = started(), started()
    Roster(first.store, 2, 1, 5, 5).finish()
    again.set("ringway/elastic/finished", stranger.get("ringway/elastic/finished"))  # type: ignore[arg-type]
    with pytest.raises(Tampered):
        read(second.store, "ringway/elastic/finished")
    stores = first.part("1", "a", _nothing), second.part("1", "a", _nothing), second.part("1", "b", _nothing)
    assert len({key_of(store).tag("x") for store in stores}) == 3, "the keys of a generation are its own"


def _nothing() -> None:
    pass


def test_a_member_of_another_start_is_not_this_one() -> None:
    roster = Roster(HashStore(), 1, 1, 30.0, 30.0)
    member = roster.enroll(0)
    generation = roster.next(Arrival(member, 0, whole=True, veteran=False), ())
    assert generation is not None
    assert generation.rank_of(member) == 0
    assert generation.rank_of(replace(member, nonce="of an earlier start")) is None


@pytest.mark.parametrize(
    ("key", "error"), [(KEY, Tampered), (Key(), RendezvousError)], ids=["with a secret", "without one"]
)
def test_a_stranger_cannot_number_the_attempt(
    key: Key, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of several hosts under torchrun agree on their attempt in its store."""
    info = LaunchInfo(rank=1, size=2, source="torchrun", hosted_by_launcher=True, local_size=1)
    monkeypatch.setattr(attempts, "_torchrun", lambda: info)
    store = HashStore()
    found: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(error) as raised:
            attempts.of_agreed_attempt(store, 1, 2, 60.0, key)
        found.append(raised.value)

    rank = threading.Thread(target=ask)
    rank.start()
    question = "ringway/attempts/question of rank 1"
    store.wait([question], timedelta(seconds=60))
    asked = store.get(question)
    nonce = asked.decode() if key.open else _sealed_text(asked)
    store.set(f"ringway/attempts/answer to {nonce}", "abc")
    rank.join(60)
    assert len(found) == 1


def _sealed_text(sealed: bytes) -> str:
    """What a stranger reads: the value is sealed, not hidden."""
    return re.findall(rb"[0-9a-f]{32}", sealed)[-1].decode()
