"""Ranks that meet, ranks that do not, and stores of other jobs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from free_ports import free_port
from ringway.errors import DiscoveryError, RendezvousError
from ringway.launch import ports
from ringway.launch import rendezvous as room
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import host_store, rendezvous
from ringway.testing import RankContext, RankPool

PATIENT = 60.0


def _info(rank: int, size: int, port: int | None, **more: object) -> LaunchInfo:
    more.setdefault("address", "127.0.0.1")
    return LaunchInfo(rank=rank, size=size, source="test", port=port, **more)  # type: ignore[arg-type]


@contextmanager
def _quickly_convinced(probe: float = room._PROBE) -> Iterator[None]:
    """Shorten the waits, and restore them afterwards, because the pool's ranks are reused."""
    before = room._GRACE, room._PROBE
    room._GRACE, room._PROBE = 0.3, probe
    try:
        yield
    finally:
        room._GRACE, room._PROBE = before


def _meet(context: RankContext, port: int | None, job: str = "", rounds: int = 1) -> list[str]:
    values = []
    stores = []  # kept, as a program that starts again in one process may keep its first store
    for turn in range(rounds):
        store = rendezvous(_info(context.rank, context.world_size, port, job=job), PATIENT)
        store.set(f"from {context.rank}", str(turn))
        other = (context.rank + 1) % context.world_size
        store.wait([f"from {other}"])
        values.append(bytes(store.get(f"from {other}")).decode())
        stores.append(store)
        store.add("done", 1)
        while context.rank == 0 and store.add("done", 0) < context.world_size:  # the store's host leaves last
            time.sleep(0.01)
    return values


def test_all_meet_and_meet_again(pool: RankPool) -> None:
    assert pool.run(_meet, free_port(), "", 2, world_size=3) == [["0", "1"]] * 3


def test_a_world_of_one_needs_no_port() -> None:
    store = rendezvous(_info(0, 1, None, address=None), 1)
    store.set("key", "value")
    assert bytes(store.get("key")) == b"value"


def test_a_file_as_store(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_by_file, str(tmp_path / "store"), world_size=2) == [b"1", b"0"]


def _by_file(context: RankContext, path: str) -> bytes:
    store = rendezvous(_info(context.rank, context.world_size, None), PATIENT, path=path)
    store.set(f"from {context.rank}", str(context.rank))
    store.wait([f"from {1 - context.rank}"])
    if context.rank == 0:
        shutil.copy(path, path + ".left")  # as a killed job would leave it
    return bytes(store.get(f"from {1 - context.rank}"))


def _wait_for_absent(context: RankContext, port: int, size: int) -> tuple[list[int], list[int], str]:
    # Rank 0's deadline expires first; the others, which would wait for minutes, learn it at the same time.
    timeout = 8.0 if context.rank == 0 else 200.0
    with pytest.raises(RendezvousError) as caught:
        rendezvous(_info(context.rank, size, port), timeout)
    return caught.value.missing, sorted(caught.value.arrived), str(caught.value)


def test_ranks_that_arrived_learn_which_did_not(pool: RankPool) -> None:
    for missing, arrived, text in pool.run(_wait_for_absent, free_port(), 6, world_size=3, timeout=60):
        assert missing == [3, 4, 5]
        assert arrived == [0, 1, 2]
        assert "3 of 6 ranks met" in text
        assert "Missing: ranks 3-5" in text
        assert f"ranks 0-2 from {socket.gethostname()}" in text


def test_missing_host_of_the_store_is_named() -> None:
    with pytest.raises(RendezvousError, match="its host, rank 0, is missing") as caught:
        rendezvous(_info(1, 2, free_port()), 1.0)
    assert caught.value.missing == [0]
    assert "within 1 s" in str(caught.value)
    assert "refused" in str(caught.value)


def _host_dies(context: RankContext, port: int) -> str:
    """Rank 2 never arrives, so the roll call lasts until the store's host is killed during it."""
    store = context.store
    if context.rank == 0:
        threading.Thread(target=_die_in_the_roll_call, args=(store,), daemon=True).start()
    else:
        roll_call = room._roll_call
        room._roll_call = lambda *facts: store.set("calling", "") or roll_call(*facts)
    with _quickly_convinced(), pytest.raises(RendezvousError) as caught:
        rendezvous(_info(context.rank, 3, port), 200.0)
    room._roll_call = roll_call
    assert caught.value.missing == [0]
    return str(caught.value)


def _die_in_the_roll_call(store: Store) -> None:
    store.wait(["calling"])
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_death_of_the_stores_host_ends_the_wait(pool: RankPool) -> None:
    host, other = pool.try_run(_host_dies, free_port(), world_size=2, timeout=60)
    assert host.kind == "died"
    assert other.kind == "returned", other
    assert "disappeared" in other.value
    assert "rank 0, died" in other.value


def _closes_and_opens(context: RankContext, port: int) -> list[str]:
    """Rank 1 finds the store of rank 0's earlier start, which closes while it waits there."""
    roll_call = room._roll_call

    def calling(store: Store, *facts: Any) -> Store:
        room._roll_call = roll_call
        context.store.set("calling", "")
        return roll_call(store, *facts)

    if context.rank == 0:
        earlier = host_store(ports.listen("127.0.0.1", port), "127.0.0.1", "", 2, PATIENT)
        context.store.wait(["calling"])
        del earlier
    else:
        room._roll_call = calling
    return _meet(context, port)


def test_store_of_an_earlier_start_that_closes_is_left_for_the_next(pool: RankPool) -> None:
    assert pool.run(_closes_and_opens, free_port(), world_size=2, timeout=100) == [["0"]] * 2


@pytest.fixture
def foreign_store() -> Iterator[int]:
    """A store of another job, of two ranks, on this host."""
    listener = ports.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    store = host_store(listener, "127.0.0.1", "another job", 2, PATIENT)
    yield port
    del store


def test_store_of_another_job_is_refused(foreign_store: int) -> None:
    with _quickly_convinced(), pytest.raises(RendezvousError, match="belongs to another job") as caught:
        rendezvous(_info(1, 2, foreign_store, job="this job"), PATIENT)
    assert f"pid {os.getpid()}" in str(caught.value)
    assert "this job" not in str(caught.value)  # an id may be secret


def test_same_job_of_another_size_is_refused(foreign_store: int) -> None:
    with _quickly_convinced(), pytest.raises(RendezvousError, match="expects 2 ranks"):
        rendezvous(_info(1, 3, foreign_store, job="another job"), PATIENT)


def test_token_is_part_of_the_jobs_identity(foreign_store: int) -> None:
    with _quickly_convinced(), pytest.raises(RendezvousError, match="another job"):
        rendezvous(_info(1, 2, foreign_store, job="another job"), PATIENT, token="secret")


@pytest.fixture
def silent_service() -> Iterator[int]:
    """A service that accepts connections but never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


def test_a_service_that_is_not_a_store_is_refused(silent_service: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the second attempt: a store may be slow to answer once, if the DNS is."""
    attempts: list[int] = []
    client = room._client

    def count(address: str, port: int, *seconds: float) -> Store | None:
        attempts.append(port)
        return client(address, port, *seconds)

    monkeypatch.setattr(room, "_client", count)
    with _quickly_convinced(probe=0.3), pytest.raises(RendezvousError, match=r"is not a torch\.distributed store"):
        rendezvous(_info(1, 2, silent_service), PATIENT)
    assert len(attempts) > 1


def test_a_service_that_is_not_a_store_costs_no_more_than_the_deadline(
    silent_service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    start = room.start

    class Thread:
        def __init__(self, *facts: Any) -> None:
            self._thread = start(*facts)

        def join(self, seconds: float | None = None) -> None:
            waits.append(seconds)
            self._thread.join(seconds)

    monkeypatch.setattr(room, "start", Thread)
    with pytest.raises(RendezvousError, match=r"is not a torch\.distributed store, or too slow: it did not answer"):
        rendezvous(_info(1, 2, silent_service), 0.5)
    assert waits
    assert all(seconds is not None and seconds <= 0.5 for seconds in waits), waits


def test_a_lost_connection_is_not_blamed_on_the_stores_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*facts: object) -> Store:
        raise DistNetworkError("Failed to recv, got 0 bytes")

    monkeypatch.setattr(room, "_roll_call", lost)
    listener = ports.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    store = host_store(listener, "127.0.0.1", "", 2, PATIENT)
    with pytest.raises(RendezvousError, match=r"rank 1: its connection to the store .* broke") as caught:
        rendezvous(_info(1, 2, port), PATIENT)
    assert caught.value.missing == []
    del store


def test_given_port_that_is_taken_names_its_holder() -> None:
    # Held by another process: this process would take its own port for its earlier store.
    pid = os.fork()
    if pid == 0:
        os.execvp("python3", ["python3", "-c", _HOLD])
    try:
        deadline = time.monotonic() + 60
        while (port := _port_of(pid)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(RendezvousError, match=f"MASTER_PORT={port} is taken by pid {pid}") as caught:
            rendezvous(_info(0, 2, port), 5.0)
        assert "python3" in str(caught.value)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


_HOLD = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); time.sleep(100)"


def _port_of(pid: int) -> int | None:
    for port in _listening():
        found = ports.holder(port)
        if found is not None and found[0] == pid:
            return port
    return None


def _listening() -> Iterator[int]:
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = row.split()
        if columns[3] == "0A":
            yield int(columns[1].rpartition(":")[2], 16)


def _meet_quickly(context: RankContext, job: str) -> list[str]:
    with _quickly_convinced(probe=0.5):
        return _meet(context, None, job)


def test_chosen_port_that_is_taken_becomes_another(pool: RankPool) -> None:
    """The first choice is held by a silent service, the second by another job's store: the ranks meet on the third."""
    job = f"job {os.getpid()} {time.time_ns()}"
    first, second = ports.choices(job)[:2]
    with ports.listen("127.0.0.1", first):
        listener = ports.listen("127.0.0.1", second)
        store = host_store(listener, "127.0.0.1", "another job", 2, PATIENT)
        assert pool.run(_meet_quickly, job, world_size=2, timeout=100) == [["0"]] * 2
        del store


def test_choices_are_the_jobs_own_and_stay_below_the_ephemeral_range() -> None:
    assert ports.choices("a") == ports.choices("a") != ports.choices("b")
    assert len(set(ports.choices("a"))) == ports.CHOICES
    assert all(20000 <= port < 32768 for port in ports.choices("a"))


def _twice_rank_one(context: RankContext, port: int) -> str | None:
    rank = min(context.rank, 1)
    try:
        rendezvous(_info(rank, 3, port), 8.0)
    except RendezvousError as error:
        return str(error)
    return None


def test_a_rank_that_arrives_twice_is_refused(pool: RankPool) -> None:
    texts = pool.run(_twice_rank_one, free_port(), world_size=3, timeout=60)
    assert sum("rank 1 has arrived twice" in (text or "") for text in texts) == 1
    assert sum("Missing: rank 2" in (text or "") for text in texts) == 2


def test_address_that_does_not_lead_to_rank_0_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"cannot reach it as no-such-host\.invalid") as caught:
        rendezvous(_info(0, 2, free_port(), address="no-such-host.invalid"), 5.0)
    assert "set MASTER_ADDR to an address of rank 0's host" in str(caught.value)


def _meet_by(context: RankContext, address: str, port: int) -> bytes:
    store = rendezvous(_info(context.rank, context.world_size, port, address=address), PATIENT)
    store.set(f"from {context.rank}", str(context.rank))
    found = bytes(store.get(f"from {1 - context.rank}"))
    store.add("done", 1)
    while context.rank == 0 and store.add("done", 0) < context.world_size:
        time.sleep(0.01)
    return found


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_loopback_by_another_name(pool: RankPool, address: str) -> None:
    assert pool.run(_meet_by, address, free_port(), world_size=2, timeout=60) == [b"1", b"0"]


def test_folder_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="does not exist"):
        rendezvous(_info(0, 2, None), 100, path=str(tmp_path / "none" / "store"))


def test_file_of_an_earlier_job_is_reported(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    pool.run(_by_file, path, world_size=2)  # torch removes the file when all ranks leave normally
    with pytest.raises(RendezvousError, match=r"has arrived twice at .*earlier job, remove the file"):
        rendezvous(_info(0, 2, None), 5.0, path=path + ".left")


def test_host_without_a_route_gets_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "address_towards", lambda host: None)
    with pytest.raises(RendezvousError, match=r"an address of rank 0's host$"):
        rendezvous(_info(0, 2, free_port(), address="no-such-host.invalid"), 5.0)


def test_ctrl_c_ends_the_wait() -> None:
    def interrupted() -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        rendezvous(_info(0, 2, free_port()), 200.0)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < 20


def test_several_hosts_without_an_address_or_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    with pytest.raises(DiscoveryError, match="set MASTER_ADDR and MASTER_PORT, or install mpi4py"):
        rendezvous(_info(1, 2, None, address=None), 1.0)


def test_own_address_is_one_of_this_host() -> None:
    with socket.socket(socket.AF_INET6 if ":" in ports.own_address() else socket.AF_INET) as probe:
        probe.bind((ports.own_address(), 0))


def test_a_reserved_port_is_free_for_one_listener_and_for_no_other_run() -> None:
    with ports.reserve() as reserved, socket.socket() as plain, socket.socket() as listener:
        port = reserved.getsockname()[1]
        assert port < 32768, "outgoing connections get the ports above"
        with pytest.raises(OSError, match="in use"):
            plain.bind(("127.0.0.1", port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        listener.bind(("", port))
        listener.listen()
