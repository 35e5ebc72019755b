"""A stranger on the network: a third network namespace next to the job's. And a job whose wire is encrypted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringway.launch import ports

pytestmark = pytest.mark.processes

SECRET = "0123456789abcdef" * 4
LIMIT = 200

_RANK = """
import os, sys, time
import torch
import ringway as dist
while os.environ["RANK"] == "1" and not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
dist.init_distributed(timeout=100)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print("SUM", tensor.tolist(), dist.allgather_object(dist.get_rank()), flush=True)
dist.destroy_process_group()
"""

_STRANGER = """
import socket, sys, time
from datetime import timedelta
inside, outside, port, flag = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
deadline = time.monotonic() + 100
while True:
    try:
        socket.create_connection((inside, port), 1).close()
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.02)
try:
    socket.create_connection((outside, port), 2).close()
    print("REACHED the other interface")
except OSError:
    print("REFUSED on the other interface")
for number in range(int(sys.argv[5])):  # connections that say nothing, half a request, and noise
    with socket.create_connection((inside, port), 5) as link:
        link.sendall(bytes([number % 256]) * (number % 40))
from torch._C._distributed_c10d import PrefixStore, TCPStore
store = TCPStore(inside, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
forged = b"t" * 32 + "\\n".join(("evil.example", "666", "1001", "mallory", "0.1.0", "ab" * 16)).encode()
PrefixStore("ringway/attempt 0/round 1", store).set("rank 1", forged)
print("SIGNED IN")
open(flag, "w").close()
"""


def _obstacle() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "'ip' is missing; install iproute2"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=60)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=60, capture_output=True)


@contextmanager
def _namespaces(names: list[str], links: dict[tuple[str, str], str]) -> Iterator[dict[str, str]]:
    """Namespaces by name, and cables between them: both ends get addresses .1 and .2 of the link's net."""
    obstacle = _obstacle()
    if obstacle is not None:
        if os.environ.get("CI"):
            pytest.fail(f"there can be no network of our own: {obstacle}")
        pytest.skip(obstacle)
    tag = f"{os.getpid() % 100000:x}"
    made = {name: f"rws{tag}{name}" for name in names}
    try:
        for namespace in made.values():
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        for number, ((first, second), net) in enumerate(links.items()):
            ends = [f"rws{tag}{number}{side}" for side in "xy"]
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for place, (name, end) in enumerate(zip((first, second), ends, strict=True), 1):
                _ip("link", "set", end, "netns", made[name])
                _ip("-n", made[name], "addr", "add", f"{net}.{place}/24", "dev", end)
                _ip("-n", made[name], "link", "set", end, "up")
        yield made
    finally:
        for namespace in made.values():
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=60, check=False)


def _start(namespace: str, program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RINGWAY_", "GLOO_", "MASTER_"))}
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", program, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=kept | {"OMP_NUM_THREADS": "1"} | variables, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def _finished(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _ranks(namespaces: list[str], address: str, flag: Path, **variables: str) -> list[subprocess.Popen[str]]:
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29412", **variables}
    return [_start(space, _RANK, str(flag), RANK=str(rank), **given) for rank, space in enumerate(namespaces)]


@pytest.mark.timeout(600)
def test_a_stranger_on_the_network_is_not_admitted(tmp_path: Path) -> None:
    """The job's two hosts have a link of their own. The stranger has one to the first host, and routes to it."""
    flag = tmp_path / "signed in"
    links = {("a", "b"): "10.61.0", ("a", "c"): "10.62.0"}
    with _namespaces(["a", "b", "c"], links) as made:
        _ip("-n", made["c"], "route", "add", "10.61.0.0/24", "via", "10.62.0.1")
        ranks = _ranks([made["a"], made["b"]], "10.61.0.1", flag, RINGWAY_JOB_SECRET=SECRET)
        attempts = str(int(os.environ.get("RINGWAY_ATTACK", "100")) // 4)
        stranger = _start(made["c"], _STRANGER, "10.61.0.1", "10.62.0.1", "29412", str(flag), attempts)
        first, second, said = _finished([*ranks, stranger])
    assert "SIGNED IN" in said, said
    assert "REFUSED on the other interface" in said, said
    for output in (first, second):
        assert "SUM [2.0, 2.0, 2.0] [0, 1]" in output, output + said
        assert SECRET not in output
    assert "evil.example, pid 666, user mallory (uid 1001) signed in as rank 1 without the job's secret" in first


def test_the_store_listens_on_the_jobs_interface() -> None:
    own = ports.own_address()
    for address, expected in ((own, {own}), ("localhost", {"127.0.0.1"}), ("192.0.2.1", {"::", "0.0.0.0"})):
        with ports.listen(address, 0) as listener:
            assert listener.getsockname()[0] in expected, address


def _wireguard_obstacle() -> str | None:
    if shutil.which("wg") is None:
        return "'wg' is missing; install wireguard-tools"
    name = f"rwg{os.getpid() % 100000:x}"
    tried = subprocess.run(["ip", "link", "add", name, "type", "wireguard"], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        return f"this kernel has no WireGuard: {tried.stderr.strip()}"
    _ip("link", "delete", name)
    return None


@pytest.mark.timeout(600)
def test_a_job_runs_over_wireguard(tmp_path: Path) -> None:
    """The recipe of docs/security.md, on two namespaces."""
    flag = tmp_path / "go"
    flag.touch()
    with _namespaces(["a", "b"], {("a", "b"): "10.63.0"}) as made:
        obstacle = _wireguard_obstacle()
        if obstacle is not None:
            pytest.skip(obstacle)
        keys = {}
        for name in "ab":
            private = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True, timeout=60).stdout
            public = subprocess.run(
                ["wg", "pubkey"], input=private, capture_output=True, text=True, check=True, timeout=60
            )
            file = tmp_path / name
            file.touch(mode=0o600)
            file.write_text(private)
            keys[name] = (str(file), public.stdout.strip())
        for place, (name, other) in enumerate((("a", "b"), ("b", "a")), 1):
            _ip("-n", made[name], "link", "add", "wg0", "type", "wireguard")
            _ip("-n", made[name], "address", "add", f"10.9.0.{place}/24", "dev", "wg0")
            peer = [
                "peer",
                keys[other][1],
                "allowed-ips",
                f"10.9.0.{3 - place}/32",
                "endpoint",
                f"10.63.0.{3 - place}:51820",
            ]
            setup = ["wg", "set", "wg0", "private-key", keys[name][0], "listen-port", "51820", *peer]
            subprocess.run(["ip", "netns", "exec", made[name], *setup], check=True, timeout=60, capture_output=True)
            _ip("-n", made[name], "link", "set", "wg0", "up")
        ranks = _ranks([made["a"], made["b"]], "10.9.0.1", flag, RINGWAY_JOB_SECRET=SECRET)
        for output in _finished(ranks):
            assert "SUM [2.0, 2.0, 2.0] [0, 1]" in output, output
        shown = ["ip", "netns", "exec", made["a"], "wg", "show", "wg0", "transfer"]
        moved = subprocess.run(shown, capture_output=True, text=True, check=True, timeout=60).stdout.split()
        assert int(moved[-1]) > 10_000, moved
