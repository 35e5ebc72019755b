"""`ringway run` on several hosts: one launcher listens, others join, and strangers do not."""

from __future__ import annotations

import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slow_link
from ringway.errors import UsageError
from ringway.keys import Key
from ringway.launch import hosts
from ringway.launch import run as launcher
from ringway.launch.invitation import Invitation
from ringway.launch.store_protocol import CLIENT, HEAD_BYTES, SERVER, Session, unpack
from ringway.testing import RankContext, RankPool

SECRET = "0123456789abcdef" * 4
SAYS = 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $GROUP_RANK at $MASTER_ADDR"'
REDUCES = """
import torch
import ringway as dist

dist.init_distributed(timeout=100)
tensor = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(tensor)
print("SUM", tensor.item(), dist.allgather_object(dist.get_rank()), dist.get_backend(), flush=True)
dist.destroy_process_group()
"""


def _shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def _python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def _await_listener(address: tuple[str, int]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(address, 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _forked(function: Callable[..., int], *arguments: object) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = function(*arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def _ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _first(command: Sequence[str], place: str, hosts: int) -> int:
    outcome = launcher.run(command, 2, listen=launcher.Listen(place, hosts), grace=20)
    print(f"first: {outcome.summary}", flush=True)
    return outcome.code


def _second(command: Sequence[str], place: str) -> int:
    outcome = launcher.join(command, 2, place, grace=20)
    print(f"second: {outcome.summary}", flush=True)
    return outcome.code


def _refused(place: str, ranks: int, secret: str) -> str:
    os.environ["RINGWAY_JOB_SECRET"] = secret
    try:
        launcher.join(_shell("true"), ranks, place)
    except UsageError as error:
        return str(error)
    finally:
        os.environ["RINGWAY_JOB_SECRET"] = SECRET
    return "joined"


def _two_launchers(context: RankContext, first: Sequence[str], second: Sequence[str]) -> tuple[int, int, list[str]]:
    """Both are on this host; to ringway run that makes no difference."""
    os.environ["RINGWAY_JOB_SECRET"] = SECRET
    place = f"127.0.0.1:{_free_port()}"
    one = _forked(_first, first, place, 2)
    _await_listener(("127.0.0.1", int(place.split(":")[1])))
    refused = [_refused(place, 2, ""), _refused(place, 2, "f" * 64), _refused(place, 3, SECRET)]
    other = _forked(_second, second, place)
    codes = _ended(other), _ended(one)
    refused.append(_refused(place, 2, SECRET))
    return codes[1], codes[0], refused


def test_a_second_host_joins_and_strangers_do_not(pool: RankPool) -> None:
    (ended,) = pool.try_run(_two_launchers, _shell(SAYS), _shell(SAYS), world_size=1, timeout=100)
    assert ended.ok, ended
    assert ended.value[:2] == (0, 0), ended.output
    for rank in range(4):
        said = f"[rank {rank}] {rank} of 4, {rank % 2} of 2 on {rank // 2} at 127.0.0.1"
        assert said in ended.output
    without, wrong, other_size, gone = ended.value[2]
    assert "this host does not have it" in without
    assert "no 'ringway run --listen' answers there that has the secret of this host" in wrong
    assert "the run has 2 ranks on each host, and -n is 3" in other_size
    assert "no 'ringway run --listen' answers there" in gone


def test_a_rank_that_fails_on_one_host_ends_those_of_the_other(pool: RankPool) -> None:
    fails, waits = "test $RANK = 3 && exit 7; sleep 60", "sleep 60"
    (ended,) = pool.try_run(_two_launchers, _shell(waits), _shell(fails), world_size=1, timeout=100)
    assert ended.ok, ended
    assert ended.value[:2] == (1, 7), ended.output
    assert "rank 3 (pid " in ended.output
    assert "failed with exit code 7" in ended.output.split("first: ")[1].splitlines()[0]


def _joined_and_left(context: RankContext) -> int:
    """The first launcher's ranks outlive a launcher that joined and ended."""
    with launcher.store_of_a_run() as variables, Invitation(variables, 1):
        place = launcher.LocalRanks(1, 1)
        survivor = _forked(lambda: launcher._run(_shell("sleep 1; echo alive"), place, variables, "stop", 10).code)
        time.sleep(0.3)
        joiner = _forked(lambda: launcher.join(_shell("true"), 1, str(os.getppid())).code)
        assert _ended(joiner) == 0
        return _ended(survivor)


def test_a_launcher_that_joined_ends_only_its_own_ranks(pool: RankPool) -> None:
    (ended,) = pool.try_run(_joined_and_left, world_size=1, timeout=60)
    assert ended.ok, ended
    assert ended.value == 0, ended.output
    assert "alive" in ended.output


def test_listening_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGWAY_JOB_SECRET", raising=False)
    monkeypatch.delenv("RINGWAY_JOB_SECRET_FILE", raising=False)
    with pytest.raises(UsageError, match="the job needs a secret"):
        launcher.run(_shell("true"), 1, listen=launcher.Listen("127.0.0.1", 2))


def _witness_of_a_joiner(theirs: str, ours: str, place: str = "127.0.0.1") -> str:
    """What a second launcher takes for the run's witness, or why it does not join."""
    here = patch.dict(os.environ, {"RINGWAY_JOB_SECRET": SECRET, "RINGWAY_WITNESS": theirs})
    with here, hosts.hosted(place, 1, 2, 1) as (_, address, _):
        os.environ["RINGWAY_WITNESS"] = ours
        try:
            variables, _ = hosts.joined(address, 1)
        except UsageError as error:
            return str(error)
        return variables["RINGWAY_WITNESS"]


def test_a_second_host_gets_the_witness_of_the_run_unless_the_network_must_not_see_it() -> None:
    server, closed = "redis://10.0.0.9:6379/0", "redis://:word@10.0.0.9:6379/0"
    assert _witness_of_a_joiner("", "") == ""
    assert _witness_of_a_joiner(server, "") == _witness_of_a_joiner(server, server) == server
    assert _witness_of_a_joiner(closed, closed) == closed
    for secret in (closed, f"{server}?password=word"):
        assert "Set RINGWAY_WITNESS here too" in _witness_of_a_joiner(secret, "")
    other = _witness_of_a_joiner(server, "redis://:word@10.0.0.8:6379/0")
    assert "is 'redis://10.0.0.8:6379/0' here, and 'redis://10.0.0.9:6379/0' there" in other
    assert "not set there" in _witness_of_a_joiner("", server)


def test_a_witness_that_is_another_one_on_each_host_is_not_handed_over() -> None:
    for local in ("unix:///run/redis.sock", "redis://localhost:6379/0"):
        assert _witness_of_a_joiner(local, "") == local  # both launchers are on this host
        assert "Set RINGWAY_WITNESS here too" in _witness_of_a_joiner(local, "", "0.0.0.0")
        assert _witness_of_a_joiner(local, "redis://10.0.0.9:6379/0", "0.0.0.0") == "redis://10.0.0.9:6379/0"


def test_a_second_host_with_another_token_is_told() -> None:
    here = patch.dict(os.environ, {"RINGWAY_JOB_SECRET": SECRET, "RINGWAY_JOB_TOKEN": "ours"})
    with here, hosts.hosted("127.0.0.1", 1, 2, 1) as (_, address, _):
        for token, said in (("other", "here 'other'"), ("", "not set here")):
            os.environ["RINGWAY_JOB_TOKEN"] = token
            with pytest.raises(UsageError, match=rf"the same RINGWAY_JOB_TOKEN \({said}\)"):
                hosts.joined(address, 1)


# Two network namespaces, and a stranger who reaches the store


def _on_host(context: RankContext, hosts: list[slow_link.Host], port: int) -> int:
    slow_link.enter(hosts[min(context.rank, 1)].namespace)
    os.environ.update(RINGWAY_JOB_SECRET=SECRET)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the pool's ranks use the loopback interface
    address = hosts[0].address, port
    if context.rank == 0:
        return _first(_python(REDUCES), f"{address[0]}:{port}", 2)
    _await_listener(address)
    if context.rank == 1:
        context.store.wait(["the stranger is done"])
        return _second(_python(REDUCES), f"{address[0]}:{port}")
    draw = random.Random(port)
    held = []
    for number in range(400):  # more than the server keeps that have proved nothing
        link = socket.create_connection(address, 20)
        link.sendall(draw.randbytes(number % 130))
        held.append(link)
        if number % 3 == 0:
            held.pop().close()
    context.store.set("the stranger is done", "")
    for link in held:
        link.close()
    return 0


@pytest.mark.processes
def test_ranks_of_two_hosts_reduce_beside_a_stranger(pool: RankPool) -> None:
    slow_link.needed()
    with slow_link.two_hosts() as hosts:
        pool.replace()
        ended = pool.try_run(_on_host, list(hosts), 29544, world_size=3, timeout=150, grace=60)
        pool.replace()
    assert [outcome.value for outcome in ended] == [0, 0, 0], "\n".join(map(str, ended))
    said = ended[0].output + ended[1].output
    for rank in range(4):
        assert f"[rank {rank}] SUM 10.0 [0, 1, 2, 3]" in said


_TRAINS = """
import os, sys, time
import torch
import ringway
from ringway.launch import processes

own = processes.pid_namespace()
processes.pid_namespace = lambda: f"{own} {sys.argv[1]}"  # as on two hosts, which do not see each other's processes
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ringway.ElasticJob() as job:
    job.data_parallel(model)
    for attempt in job.steps({"model": model, "optimizer": optimizer}, until=8):
        while attempt.step < 6 and job.rank == 0 and job.size < 4 and not job._saw_newcomers:
            time.sleep(0.02)  # ranks take longer to start than these steps
        with attempt:
            model(torch.ones(2, 4)).sum().backward()
            attempt.commit()
            optimizer.step()
    print("ENDED", job.size, ringway.get_backend(), float(model.weight.detach().sum()), flush=True)
"""


def _elastic_on_host(context: RankContext, hosts: list[slow_link.Host], port: int) -> int:
    """The second host joins a run that trains already."""
    slow_link.enter(hosts[context.rank].namespace)
    os.environ.update(RINGWAY_JOB_SECRET=SECRET)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    place, command = f"{hosts[0].address}:{port}", [*_python(_TRAINS), hosts[context.rank].namespace]
    if context.rank == 0:
        plan = launcher.Elastic(1, 0)
        return launcher.run(command, 2, elastic=plan, listen=launcher.Listen(place, 1), grace=20).code
    _await_listener((hosts[0].address, port))
    return launcher.join(command, 2, place, grace=20).code


@pytest.mark.processes
def test_ranks_of_another_host_join_an_elastic_job(pool: RankPool) -> None:
    slow_link.needed()
    with slow_link.two_hosts() as hosts:
        pool.replace()
        ended = pool.try_run(_elastic_on_host, list(hosts), 29546, world_size=2, timeout=150, grace=60)
        pool.replace()
    assert [outcome.value for outcome in ended] == [0, 0], "\n".join(map(str, ended))
    said = f"{ended[0].output}\n{ended[1].output}"
    lines = {line.partition("ENDED")[2] for line in said.splitlines() if "ENDED" in line}
    assert said.count("ENDED 4 hierarchical") == 4, said
    assert len(lines) == 1, lines


# The connection


def _sessions(key: Key = Key(b"k" * 32)) -> tuple[Session, Session]:  # noqa: B008
    return Session(key, CLIENT, b"s" * 32, b"c" * 32), Session(key, SERVER, b"s" * 32, b"c" * 32)


def _open(session: Session, frame: bytes) -> list[bytes]:
    return session.opened(frame[:HEAD_BYTES], frame[HEAD_BYTES:])


@given(st.lists(st.lists(st.binary(max_size=40), max_size=4), min_size=1, max_size=5))
def test_both_sides_read_what_the_other_wrote(messages: list[list[bytes]]) -> None:
    client, server = _sessions()
    assert client.is_proven_by(server.proof)
    assert server.is_proven_by(client.proof)
    assert not client.is_proven_by(client.proof)  # reflected
    for message in messages:
        assert _open(server, client.frame(message)) == message
        assert _open(client, server.frame(message)) == message


@given(st.data())
def test_a_frame_that_was_changed_repeated_dropped_or_reflected_is_refused(data: st.DataObject) -> None:
    client, server = _sessions()
    frames = [client.frame([b"set", b"0", b"key", b"value"]), client.frame([b"delete", b"0", b"key"])]
    kind = data.draw(st.sampled_from(["changed", "repeated", "dropped", "reflected", "of another connection"]))
    if kind == "changed":
        at = data.draw(st.integers(4, len(frames[0]) - 1))
        changed = bytearray(frames[0])
        changed[at] ^= 1 << data.draw(st.integers(0, 7))
        wrong = bytes(changed)
    elif kind == "repeated":
        assert _open(server, frames[0])
        wrong = frames[0]
    elif kind == "dropped":
        wrong = frames[1]
    elif kind == "reflected":
        wrong = server.frame([b"set"])
    else:
        wrong = Session(Key(b"k" * 32), CLIENT, b"t" * 32, b"c" * 32).frame([b"set"])
    with pytest.raises(ConnectionError):
        _open(server, wrong)


@given(st.binary(max_size=60))
def test_noise_is_no_list_of_fields(noise: bytes) -> None:
    try:
        fields = unpack(noise)
    except (ValueError, struct.error):
        pass
    else:
        assert sum(4 + len(field) for field in fields) == len(noise)
