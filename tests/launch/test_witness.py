"""A witness, a Redis server that keeps the store of an elastic job: the store itself, and the loss of rank 0 with and
without it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway
from elastic_model import SECONDS, Sum, contents_of, optimizer_of, simulated, values_of
from free_ports import free_port
from ringway.errors import RendezvousError, UsageError
from ringway.job.elastic.job import ElasticJob
from ringway.job.elastic.roster import standing
from ringway.launch import run as launcher
from ringway.launch import witness as witness_module
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import LastingStore
from ringway.launch.witness import DataLost, RedisStore
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

pytestmark = pytest.mark.processes

SECRET = "0123456789abcdef" * 4
STEPS = 6


def _server() -> str:
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("there is no redis-server or valkey-server (apt install redis-server)")
    if find_spec("redis") is None:
        pytest.skip("redis-py is not installed (pip install redis)")
    return found


@contextmanager
def _redis(folder: Path, port: int | None = None) -> Iterator[str]:
    port = port or free_port()
    command = [_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    command += ["--unixsocket", str(folder / "socket")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert process.poll() is None, f"another process took port {port}"
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def _client(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url)


@pytest.fixture(scope="module")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with _redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


def _operated(store: Any, operation: str, key: str, value: str, expected: str, amount: int) -> object:
    match operation:
        case "set":
            return store.set(key, value)
        case "compare":
            return store.compare_set(key, expected, value)
        case "check":
            return store.check([key, "a"])
        case "delete":
            return store.delete_key(key)
        case "get":
            return store.get(key) if store.check([key]) else None
        case "count":
            return store.num_keys()
        case "add":
            return store.add(f"{key} number", amount)
        case "append":
            return store.append(key, value)
        case _:
            return store.multi_get(["a", "b"]) if store.check(["a", "b"]) else None


def test_it_behaves_like_torchs_stores(witness: str) -> None:
    stores: list[Any] = [RedisStore(witness, "contract", 30.0), c10d.HashStore()]
    draw = random.Random(7)
    for _ in range(400):
        operation = draw.choice(["set", "compare", "check", "delete", "get", "count", "add", "append", "multi_get"])
        key, amount = draw.choice("abcdef"), draw.randint(-3, 3)
        value, expected = (draw.choice(["", "1", "two", "\x00\xff"]) for _ in range(2))
        one, other = (_operated(store, operation, key, value, expected, amount) for store in stores)
        assert one == other, operation
    ours = stores[0]
    ours.set("word", "three")
    with pytest.raises(ValueError, match="not an integer"):
        ours.add("word", 1)
    with pytest.raises(c10d.DistStoreError, match="wait timeout"):
        ours.wait(["never"], timedelta(seconds=0.05))
    assert not RedisStore(witness, "another job", 30.0).check(["word"])


def test_a_server_that_was_restarted_is_refused(tmp_path: Path) -> None:
    with _redis(tmp_path) as url:
        store = RedisStore(url, "job", 30.0)
        port = store.port
    with pytest.raises(c10d.DistNetworkError, match="does not answer"):
        store.set("key", "value")
    with _redis(tmp_path, port), pytest.raises(c10d.DistNetworkError, match="was restarted, or another server took"):
        store.set("key", "value")


def _changes(store: RedisStore) -> list[Callable[[], object]]:
    return [
        lambda: store.set("a", "1"),
        lambda: store.add("a", 1),
        lambda: store.append("b", "1"),
        lambda: store.compare_set("c", "", "1"),
        store.renew,
    ]


def test_every_change_renews_the_expiry(witness: str) -> None:
    store, client = RedisStore(witness, "expiry", 30.0), _client(witness)
    for change in (*_changes(store), lambda: RedisStore(witness, "expiry", 30.0)):
        client.expire("ringway:expiry", 60)
        change()
        assert client.ttl("ringway:expiry") > 3000
    client.expire("ringway:expiry", 60)
    store.renew()  # it was renewed just now
    store.check(["a"])
    assert client.ttl("ringway:expiry") <= 60


def test_a_job_whose_data_the_witness_lost_is_not_begun_again_beside_another(witness: str) -> None:
    store, client = RedisStore(witness, "lost", 30.0), _client(witness)
    store.set("key", "value")
    client.delete("ringway:lost")
    for second in (None, RedisStore(witness, "lost", 30.0)):
        for change in _changes(store):
            with pytest.raises(DataLost, match="has lost the job's data"):
                change()
        assert second is None or second.num_keys() == 0


def test_mistakes_are_named(witness: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = LaunchInfo(rank=0, size=1, source="test", job="the job")
    with pytest.raises(UsageError, match=r"'etcd://host' is not supported: name a Redis"):
        RedisStore("etcd://name:password@host", "job", 30.0)
    with pytest.raises(UsageError, match="set RINGWAY_JOB_TOKEN"):
        LastingStore(LaunchInfo(rank=0, size=1, source="test"), 5.0, witness=witness)
    with pytest.raises(RendezvousError, match=r"the witness at 127\.0\.0\.1:1 does not answer"):
        LastingStore(place, 5.0, witness="redis://127.0.0.1:1/0")
    monkeypatch.setenv("RINGWAY_JOB_SECRET", SECRET)
    LastingStore(place, 60.0, witness=witness)
    monkeypatch.setenv("RINGWAY_JOB_SECRET", "f" * 64)
    with pytest.raises(RendezvousError, match="has a secret, and rank 0 has another"):
        LastingStore(place, 60.0, witness=witness)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UsageError, match=r"pip install 'ringway\[redis\]'"):
        RedisStore(witness, "job", 30.0)


def _train(context: RankContext, witness: str | None, port: int) -> dict[str, Any]:
    """Rank 0 is killed in step 2. With a witness, another process joins the others afterwards."""
    leave(ringway)
    torch.set_num_threads(1)
    size = context.world_size - (1 if witness else 0)
    joins = context.rank == size
    os.environ.update(
        RANK=str(min(context.rank, size - 1)),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RINGWAY_JOB_SECRET=SECRET,
        RINGWAY_JOB_TOKEN="test of a witness",
    )
    if joins:
        context.store.wait(["a step after the kill"])
    model, sizes = Sum(), []
    optimizer = optimizer_of(model)
    try:
        with ElasticJob(witness=witness, grace=10.0) as job:
            job.data_parallel(model)
            for attempt in job.steps({"model": model, "optimizer": optimizer}, until=STEPS):
                while (
                    witness and attempt.step == STEPS - 2 and job.rank == 0 and not job._saw_newcomers and job.size < 3
                ):
                    time.sleep(0.01)
                with attempt:
                    if attempt.step == 2 and context.rank == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    model(values_of(attempt.step, job.rank)).backward()
                    attempt.commit()
                    optimizer.step()
                    sizes.append(job.size)
                if attempt.committed and attempt.step == 2:
                    context.store.set("a step after the kill", "")
    except RendezvousError as error:
        return {"error": str(error)}
    return {"sizes": sizes, "contents": contents_of(model, optimizer)}


def test_a_job_with_a_witness_survives_rank_0(pool: RankPool, witness: str) -> None:
    pool.replace()
    ended = pool.try_run(_train, witness, free_port(), world_size=4, timeout=SECONDS, grace=60)
    pool.replace()
    assert not ended[0].ok
    assert all(outcome.ok for outcome in ended[1:]), "\n".join(map(str, ended))
    first, second, joined = (outcome.value for outcome in ended[1:])
    # The other process is waited for before step 4, and may come in step 3.
    assert first["sizes"] == second["sizes"]
    assert first["sizes"] in ([3, 3, 2, 2, 2, 3], [3, 3, 2, 2, 3, 3])
    assert first["contents"] == second["contents"] == joined["contents"]
    torch.testing.assert_close(torch.tensor(first["contents"]), torch.tensor(simulated(first["sizes"])))


def test_without_a_witness_losing_rank_0_ends_the_job_and_says_so(pool: RankPool) -> None:
    pool.replace()
    ended = pool.try_run(_train, None, free_port(), world_size=3, timeout=SECONDS, grace=60)
    pool.replace()
    assert not ended[0].ok
    for outcome in ended[1:]:
        assert outcome.ok, "\n".join(map(str, ended))
        assert "the job's store is out of reach" in outcome.value["error"]
        assert "ElasticJob(witness=...)" in outcome.value["error"]


def _by_hand(context: RankContext, secret: str) -> None:
    """As a process that the user starts, with no other rank in its variables."""
    leave(ringway)
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", RINGWAY_JOB_SECRET=secret, RINGWAY_JOB_TOKEN="by hand")
    if not secret:
        del os.environ["RINGWAY_JOB_SECRET"]


def _outlive_the_expiry(context: RankContext, url: str, secret: str) -> tuple[int, int]:
    """Rank 1 comes long after the last change, when the data of a job without ranks would have expired."""
    _by_hand(context, secret)
    witness_module._EXPIRES = 4
    state: dict[str, Any] = {"x": torch.zeros(1)}
    if context.rank == 1:
        context.store.wait(["the job runs"])
        time.sleep(2.5 * witness_module._EXPIRES)
    with ElasticJob(witness=url, timeout=60) as job:
        for attempt in job.steps(state):
            with attempt:
                attempt.commit()
            context.store.set("the job runs", "")
            if job.size == 2:
                return job.generation, attempt.step
            assert context.rank == 0, "a second job"
            time.sleep(0.02)
    raise AssertionError("the loop ended")


@pytest.mark.parametrize(("kind", "secret"), [("redis", ""), ("unix", SECRET)], ids=["redis", "unix"])
def test_a_rank_that_runs_keeps_the_data_of_its_job(pool: RankPool, tmp_path: Path, kind: str, secret: str) -> None:
    with _redis(tmp_path) as url:
        url = url if kind == "redis" else f"unix://{tmp_path / 'socket'}"
        ended = pool.try_run(_outlive_the_expiry, url, secret, world_size=2, timeout=SECONDS, grace=60)
        pool.replace()
    assert all(outcome.ok for outcome in ended), "\n".join(map(str, ended))
    first, second = (outcome.value for outcome in ended)
    assert first == second
    assert first[0] == 2
    assert first[1] > 1


def _lose_the_data(context: RankContext, url: str, secret: str) -> str:
    _by_hand(context, secret)
    with ElasticJob(witness=url, timeout=60) as job:
        try:
            for attempt in job.steps({"x": torch.zeros(1)}):
                with attempt:
                    attempt.commit()
                if attempt.step == 3:
                    _client(url).flushall()
                assert attempt.step < 3000, "it goes on"
                time.sleep(0.02)
        except RendezvousError as error:
            return str(error)
    raise AssertionError("the loop ended")


@pytest.mark.parametrize("secret", ["", SECRET], ids=["open", "sealed"])
def test_a_rank_that_runs_stops_when_the_witness_loses_the_data(pool: RankPool, tmp_path: Path, secret: str) -> None:
    with _redis(tmp_path):
        (ended,) = pool.try_run(
            _lose_the_data, f"unix://{tmp_path / 'socket'}", secret, world_size=1, timeout=SECONDS, grace=60
        )
        pool.replace()
    assert ended.ok, ended
    assert ended.value.startswith("the witness on this host has lost the job's data")


_MEETS_ANOTHER = """
import pathlib, sys
import torch
import ringway

with ringway.ElasticJob(timeout=60) as job:
    for attempt in job.steps({"x": torch.zeros(1)}):
        with attempt:
            attempt.commit()
        pathlib.Path(sys.argv[1]).touch()
        if job.size == 2:
            print("met in generation", job.generation, flush=True)
            break
"""


def _join_from_a_terminal_without_a_witness(context: RankContext, url: str, mark: str) -> list[int]:
    command = [sys.executable, "-c", _MEETS_ANOTHER, mark]
    child = os.fork()
    if child == 0:
        code = 99
        try:
            while not os.path.exists(mark):  # until the first job runs
                time.sleep(0.05)
            code = launcher.join(command, 1, str(os.getppid())).code
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.environ.update(RINGWAY_WITNESS=url, RINGWAY_JOB_TOKEN="a launcher's")
    terms = launcher.Elastic(1, 0, standing)
    outcome = launcher.run(command, 1, elastic=terms)
    return [outcome.code, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def test_ranks_of_another_terminal_join_at_the_witness_and_the_launcher_sees_them(
    pool: RankPool, witness: str, tmp_path: Path
) -> None:
    mark = str(tmp_path / "mark")
    (ended,) = pool.try_run(_join_from_a_terminal_without_a_witness, witness, mark, world_size=1, timeout=SECONDS)
    pool.replace()
    assert ended.ok, ended
    assert ended.value == [0, 0], ended.output
    assert ended.output.count("met in generation 2") == 2
    assert "ringway run: generation 1; in: 0; joining: none; out: none" in ended.output
