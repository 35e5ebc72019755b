"""Who is admitted: ranks that prove the job's secret, and nobody else.

The stranger here knows everything but the secret: the protocol, the address, and all that was ever in the store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

import ringway as dist
from free_ports import free_port
from ringway.compare import one_host
from ringway.errors import ConfigError, RendezvousError, RingwayError, Tampered
from ringway.keys import TAG_BYTES, Key
from ringway.launch import identity, secret
from ringway.launch import roll_call as rolls
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import rendezvous
from ringway.store import Deadline, beneath_prefixes, key_of
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

SECRET = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
PATIENT = 60.0


def _info(context: RankContext, port: int, **more: Any) -> LaunchInfo:
    facts: dict[str, Any] = {"rank": context.rank, "size": context.world_size, "address": "127.0.0.1", "port": port}
    return LaunchInfo(source="test", **{**facts, **more})


def _reached(port: int) -> TCPStore:
    """The store of rank 0, as anyone can reach it."""
    deadline = time.monotonic() + PATIENT
    while True:
        try:
            return TCPStore("127.0.0.1", port, is_master=False)
        except Exception:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _door(store: Store, turn: int = 1) -> PrefixStore:
    return PrefixStore(f"ringway/attempt 0/round {turn}", store)


def _signed(key: Key) -> bytes:
    text = rolls.SignIn("evil.example", "666", "1001", "mallory", "0.1.0", "ab" * 16).pack()
    return key.tag("sign in", "1", text) + text


def _leave_together(context: RankContext, store: Store) -> None:
    store.add("done", 1)
    while context.rank == 0 and store.add("done", 0) < context.world_size:
        time.sleep(0.01)


# Early and late sign-ins


def _early(context: RankContext, port: int) -> int:
    if context.rank == 0:  # sits where anyone can, before rank 1 arrives

        def stranger() -> None:
            door = _door(_reached(port))
            for slot, forged in enumerate(
                (_signed(Key(b"s" * 32)), b"", os.urandom(500), b"x" * TAG_BYTES + b"\n" * 5)
            ):
                door.set(rolls._slot(1, slot), forged)  # type: ignore[arg-type]
            context.store.set("taken", "")

        threading.Thread(target=stranger, daemon=True).start()
    else:
        context.store.wait(["taken"])
    store = rendezvous(_info(context, port), PATIENT)
    assert not key_of(store).open
    store.set(f"from {context.rank}", "x")
    store.wait([f"from {1 - context.rank}"])
    _leave_together(context, store)
    return len(os.listdir("/proc/self/fd"))


def test_an_early_sign_in_takes_nobodys_place(pool: RankPool) -> None:
    environment: dict[str, str | None] = {"RINGWAY_JOB_SECRET": SECRET}
    outcomes = pool.try_run(_early, free_port(), world_size=2, environment=environment)
    for outcome in outcomes:
        assert outcome.ok, outcome
        assert (
            "evil.example, pid 666, user mallory (uid 1001) signed in as rank 1 without the job's secret"
            in outcome.output
        )
        assert "and was not admitted" in outcome.output
        assert SECRET not in outcome.output


def _late(context: RankContext, port: int) -> str:
    """The stranger overwrites everything it can read or guess, again and again, while the ranks use the store."""
    store = rendezvous(_info(context, port), PATIENT)
    _meet(context)  # before, the other rank may still be in the roll call
    base = _reached(port)
    for key in ("rank 0", "rank 1", "outcome", "confirmed by 0", "job/fault", "job/mine"):
        _door(base).set(key, _signed(Key(b"s" * 32)))  # type: ignore[arg-type]
    _meet(context)
    with pytest.raises(Tampered, match="'fault' of the job's store was written by a process without") as caught:
        store.get("fault")
    store.set("unharmed", "yes")
    assert store.get("unharmed") == b"yes"
    _meet(context)
    return caught.value.what


def _meet(context: RankContext) -> None:
    number = context.store.add("here", 1)
    goal = (number + 1) // 2 * 2
    while context.store.add("here", 0) < goal:
        time.sleep(0.01)


def test_a_late_stranger_is_named(pool: RankPool) -> None:
    environment: dict[str, str | None] = {"RINGWAY_JOB_SECRET": SECRET}
    assert pool.run(_late, free_port(), world_size=2, environment=environment) == ["fault", "fault"]


def _replayed(context: RankContext, port: int, other: int) -> str:
    """The stranger recorded a whole start of this job, and plays it back as rank 1 of the next."""
    store = rendezvous(_info(context, port), PATIENT)
    recorded = {name: bytes(_door(_reached(port)).get(name)) for name in ("rank 1", "confirmed by 1")}
    _meet(context)
    if context.rank == 1:
        _meet(context)
        return "stayed away"

    def stranger() -> None:
        door = _door(_reached(other))
        for name, value in recorded.items():
            door.set(name, value)  # type: ignore[arg-type]

    threading.Thread(target=stranger, daemon=True).start()
    with pytest.raises(RendezvousError) as caught:
        rendezvous(_info(context, other), 3.0)
    assert caught.value.missing == [1]
    _meet(context)
    del store
    return str(caught.value)


def test_a_replayed_start_is_refused(pool: RankPool) -> None:
    environment: dict[str, str | None] = {"RINGWAY_JOB_SECRET": SECRET}
    text, _ = pool.run(_replayed, free_port(), free_port(), world_size=2, environment=environment)
    assert "signed in as rank 1 without the job's secret and was not admitted" in text


class _Deleting(Store):
    """A store from which a stranger deletes a key after each check that found it."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner

    def check(self, keys: list[str]) -> bool:
        found = self._inner.check(keys)
        if found:
            self._inner.delete_key(keys[-1])
        return found

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._inner.multi_get(keys)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)


def _roll(store: Store, seconds: float, key: Key) -> Store:
    info = LaunchInfo(rank=0, size=2, source="test", hosted_by_launcher=True)
    return rolls.roll_call(store, info, Deadline(seconds), rolls.Place("here"), key, os.urandom(8).hex())


@pytest.mark.timeout(60)
def test_a_flood_of_forged_sign_ins_is_named_and_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    for slot in range(2000):
        _door(store).set(rolls._slot(1, slot), _signed(Key(b"s" * 32)))  # type: ignore[arg-type]
    with pytest.raises(Tampered, match="64 sign-ins as rank 1 at here do not prove the job's secret") as caught:
        _roll(store, PATIENT, Key(b"k" * 32))
    assert caught.value.what == "rank 1"
    assert "vil.example, pid 666" in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert 0 < capfd.readouterr().err.count("\n") <= rolls._NAMED


@pytest.mark.timeout(20)
def test_a_sign_in_deleted_while_it_is_read_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolls, "FAREWELL", 0.1)
    store = HashStore()
    store.set_timeout(timedelta(seconds=2))
    _door(store).set("rank 1", b"x" * 100)  # type: ignore[arg-type]
    with pytest.raises(RendezvousError, match="Missing: rank 1"):
        _roll(_Deleting(store), 0.5, Key(b"k" * 32))


@pytest.mark.parametrize("key", [Key(b"k" * 32), Key()], ids=["secret", "open"])
def test_whatever_the_store_says_about_itself_is_refused_by_name(key: Key) -> None:
    store = HashStore()
    info = LaunchInfo(rank=1, size=2, source="test", address="127.0.0.1", port=1)
    job = identity.Job("job", key)
    good = json.loads(job.identity(2, "node, pid 1", "nonce"))
    escape = "\x1b[2Jnode"
    for said, text in (
        ("[" * 100_000, "unknown format"),
        ("[" * 1000, "unknown format"),
        ("null", "unknown format"),
        (json.dumps(good) + " " * 2000, "unknown format"),
        (json.dumps({**good, "size": float("inf")}), "unknown format"),
        (json.dumps({**good, "size": None}), "unknown format"),
        (json.dumps({**good, "job": "other", "host": escape}), r"opened by \[2Jnode"),
        (json.dumps({**good, "tag": "t", "host": escape}), r"opened by \[2Jnode, has a secret"),
        (json.dumps({**good, "tag": "t", "host": "\ud800"}), "unknown format|has a secret"),
        (json.dumps({**good, "tag": "t", "opened": "\ud800"}), "unknown format|has a secret"),
    ):
        store.set(identity.IDENTITY, said)
        with pytest.raises(RendezvousError, match=text) as caught:
            identity.recognize(store, info, job, rolls.Place("127.0.0.1", 1), PATIENT)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000
    store.set(identity.IDENTITY, json.dumps(good))
    place = rolls.Place("127.0.0.1", 1)
    assert identity.recognize(store, info, job, place, PATIENT) == "nonce"
    assert place.host == "node, pid 1"


# Wrong secrets, other versions, none


def _mixed(context: RankContext, port: int, secrets: list[str | None], versions: list[str]) -> str:
    chosen = secrets[context.rank]
    os.environ.pop("RINGWAY_JOB_SECRET", None)
    if chosen is not None:
        os.environ["RINGWAY_JOB_SECRET"] = chosen
    before, rolls.VERSION = rolls.VERSION, versions[context.rank]
    try:
        rendezvous(_info(context, port), 3.0 if context.rank == 0 else 20.0)
    except RingwayError as error:
        return str(error)
    finally:
        rolls.VERSION = before
        os.environ.pop("RINGWAY_JOB_SECRET", None)
    return ""


@pytest.mark.parametrize(
    ("secrets", "text"),
    [
        ([SECRET, OTHER], "has a secret, and rank 1 has another"),
        ([SECRET, None], "has a secret, and rank 1 has none"),
        ([None, SECRET], "has no secret, and rank 1 has one"),
    ],
)
def test_another_secret_is_refused_by_name(pool: RankPool, secrets: list[str | None], text: str) -> None:
    first, second = pool.run(_mixed, free_port(), secrets, ["1", "1"], world_size=2, timeout=100)
    assert "Missing: rank 1" in first
    assert text in second
    assert "set RINGWAY_JOB_SECRET, or RINGWAY_JOB_SECRET_FILE" in second
    assert SECRET not in first + second
    assert OTHER not in first + second


@pytest.mark.parametrize("both", [None, SECRET])
def test_other_versions_are_refused_by_name(pool: RankPool, both: str | None) -> None:
    for text in pool.run(_mixed, free_port(), [both, both], ["0.1.0", "0.2.0"], world_size=2, timeout=100):
        assert "different versions of ringway: 0.1.0 on rank 0" in text
        assert "0.2.0 on rank 1" in text
        assert "Install one on all hosts" in text


def test_require_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (secret.SECRET, secret.SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    info = LaunchInfo(rank=0, size=2, source="test", address="127.0.0.1", port=free_port())
    with pytest.raises(ConfigError, match="require_secret is set, but the job has no secret: set RINGWAY_JOB_SECRET"):
        rendezvous(info, 1.0, require_secret=True)


# Every way to start


def _start(context: RankContext, how: str, port: int, folder: str) -> tuple[bool, str, str]:
    """Starts in one of the ways there are. Whether the job has a secret, where that comes from, and the backend."""
    leave()  # the group of an earlier test
    os.environ.update(RANK=str(context.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    place: dict[str, Any] = {"rank": context.rank, "world_size": 2}
    try:
        if how == "init_distributed":
            dist.init_distributed(timeout=PATIENT)
        elif how == "init_process_group":
            dist.init_process_group()
        elif how == "a store":
            dist.init_process_group(store=PrefixStore(f"start {port}", context.store), **place)
        elif how == "a URL":
            dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}?rank={context.rank}&world_size=2")
        elif how == "a file":
            dist.init_process_group(init_method=f"file://{folder}/store {port}", **place)
        elif how == "a handler":
            handler = partial(_handler, PrefixStore(f"start {port}", context.store), context.rank)
            torch.distributed.register_rendezvous_handler(f"zoo{port}", handler)
            dist.init_process_group(init_method=f"zoo{port}://", **place)
        else:
            torch.distributed.init_process_group(how)
        group = dist.communicator()
        assert dist.allgather_object(context.rank) == [0, 1]
        other = dist.communicator(dist.new_group([0, 1]))
        key = key_of(group.info.store)
        assert key.open == key_of(other.info.store).open
        if not key.open:  # what C++ code calls: the store's Python half is alive
            assert beneath_prefixes(group.info.store) is not None
            group.info.store.set(f"from {context.rank}", "x")
            assert group.info.store.clone().get(f"from {context.rank}") == b"x"  # type: ignore[attr-defined]
        dist.barrier()
        return not key.open, key.source, dist.get_backend()
    finally:
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def _handler(store: Store, rank: int, *_: Any, **__: Any) -> Any:
    yield store, rank, 2


_TORCHRUN = {"TORCHELASTIC_RUN_ID": "a run", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}


@pytest.mark.parametrize(
    "how", ["init_distributed", "init_process_group", "a store", "a URL", "a file", "a handler", "shm", "gloo"]
)
def test_every_start_is_keyed_and_an_open_job_says_so(pool: RankPool, tmp_path: Path, how: str) -> None:
    ours = how != "gloo"  # torch's own backend: ringway has no part in it
    cases: tuple[tuple[dict[str, str | None], str], ...] = (
        ({secret.SECRET: SECRET}, secret.SECRET),
        ({}, ""),
        # These are where the user says, so what the launcher says about hosts does not count.
        (_TORCHRUN, "" if how in ("a URL", "a file") else f"this host's file {tmp_path / 'ringway'}"),
    )
    for variables, source in cases:
        environment = {secret.SECRET: None, "XDG_RUNTIME_DIR": str(tmp_path), **variables}
        outcomes = pool.try_run(_start, how, free_port(), str(tmp_path), world_size=2, environment=environment)
        for outcome in outcomes:
            assert outcome.ok, outcome
            keyed, came_from, backend = outcome.value
            assert (keyed, backend) == (ours and source != "", "shm" if ours else "gloo"), (variables, outcome)
            assert came_from.startswith(source if keyed else ""), came_from
        said = [outcome.output.count("this job is open: it has no secret") for outcome in outcomes]
        assert said == [1 if ours and not source else 0, 0], (variables, said)
    if not ours:
        return
    environment = {secret.SECRET: None, "RINGWAY_REQUIRE_SECRET": "1"}
    for outcome in pool.try_run(_start, how, free_port(), str(tmp_path), world_size=2, environment=environment):
        assert "require_secret is set, but the job has no secret: set RINGWAY_JOB_SECRET" in str(outcome.error), outcome


def _quiet_on_two_hosts(context: RankContext, port: int, hosts: int) -> bool:
    leave()
    one_host.host_identity = lambda: f"host {context.rank * hosts // 2}"
    os.environ.update(RANK=str(context.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_distributed("gloo", timeout=PATIENT, verbose=False)
    spans = dist.communicator().spans_hosts
    dist.destroy_process_group()
    return spans


def test_an_open_job_across_hosts_says_so_even_if_it_is_to_be_quiet(pool: RankPool) -> None:
    for hosts in (1, 2):
        outcomes = pool.try_run(
            _quiet_on_two_hosts, free_port(), hosts, world_size=2, environment={secret.SECRET: None}
        )
        assert [outcome.value for outcome in outcomes] == [hosts == 2] * 2, outcomes
        said = [outcome.output.count("this job is open: it has no secret") for outcome in outcomes]
        assert said == [hosts - 1, 0]
    pool.replace()


def _twice(context: RankContext) -> list[bool]:
    """torch's own functions, on one store."""
    leave()
    keyed = []
    for start in range(2):
        torch.distributed.init_process_group("shm", store=context.store, rank=context.rank, world_size=2)
        tensor = torch.full((3,), float(start + 1))
        torch.distributed.all_reduce(tensor)
        assert tensor.tolist() == [2.0 * (start + 1)] * 3
        assert torch.distributed.get_backend() == "shm"
        keyed.append(not key_of(dist.communicator().info.store).open)
        torch.distributed.destroy_process_group()
    return keyed


@pytest.mark.parametrize("text", [SECRET, None], ids=["secret", "open"])
def test_a_store_serves_one_start_after_another(pool: RankPool, text: str | None) -> None:
    outcomes = pool.try_run(_twice, world_size=2, environment={secret.SECRET: text})
    assert [outcome.value for outcome in outcomes] == [[text is not None] * 2] * 2, outcomes
    assert outcomes[0].output.count("this job is open") == (2 if text is None else 0)


# Several users


def _as_two_users(context: RankContext, port: int) -> str:
    leave()
    os.environ.update(RANK=str(context.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if context.rank == 1:
        os.seteuid(65534)
    try:
        dist.init_distributed(timeout=PATIENT)
        assert dist.allgather_object(context.rank) == [0, 1]
        return dist.get_backend()
    finally:
        dist.destroy_process_group()
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_ranks_of_two_users_run_on_gloo_and_that_is_said(pool: RankPool) -> None:
    environment: dict[str, str | None] = {"RINGWAY_JOB_SECRET": SECRET}
    outcomes = pool.try_run(_as_two_users, free_port(), world_size=2, environment=environment)
    assert [outcome.value for outcome in outcomes] == ["gloo", "gloo"], outcomes
    assert "rank 1 runs as uid 65534 and rank 0 as uid 0, on the same host: shared memory needs one user" in (
        outcomes[0].output
    )
    pool.replace()
