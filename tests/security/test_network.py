"""A stranger on the network: a third network namespace next to the job's. And a job whose wire is encrypted."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

import ringway as dist
import slow_link
from ringway.launch import ports
from ringway.testing import RankContext, RankPool

pytestmark = pytest.mark.processes

SECRET = "0123456789abcdef" * 4
LIMIT = 200
PORT = 29412


def _rank(rank: int, flag: str) -> None:
    while rank == 1 and not os.path.exists(flag):
        time.sleep(0.01)
    dist.init_distributed(timeout=100)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    print("SUM", tensor.tolist(), dist.allgather_object(dist.get_rank()), flush=True)
    dist.destroy_process_group()


def _stranger(inside: str, outside: str, flag: str, attempts: int) -> None:
    deadline = time.monotonic() + 100
    while True:
        try:
            socket.create_connection((inside, PORT), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    try:
        socket.create_connection((outside, PORT), 2).close()
        print("REACHED the other interface")
    except OSError:
        print("REFUSED on the other interface")
    for number in range(attempts):  # connections that say nothing, half a request, and noise
        with socket.create_connection((inside, PORT), 5) as link:
            link.sendall(bytes([number % 256]) * (number % 40))
    store = TCPStore(inside, PORT, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    forged = b"t" * 32 + "\n".join(("evil.example", "666", "1001", "mallory", "0.1.0", "ab" * 16)).encode()
    PrefixStore("ringway/attempt 0/round 1", store).set("rank 1", forged)  # type: ignore[arg-type]
    print("SIGNED IN")
    Path(flag).touch()


def _in_namespace(
    context: RankContext, namespaces: list[str], address: str, flag: str, stranger: tuple[str, str, str, int] | None
) -> None:
    """Two ranks and, if there is one, the stranger. Each is in its network namespace."""
    slow_link.enter(namespaces[context.rank])
    if context.rank == 2:
        assert stranger is not None
        _stranger(*stranger)
        return
    own = [name for name in os.environ if name.startswith(("SLURM_", "GLOO_", "MASTER_"))]
    for name in own:
        del os.environ[name]
    os.environ.update(RANK=str(context.rank), WORLD_SIZE="2", MASTER_ADDR=address, MASTER_PORT=str(PORT))
    _rank(context.rank, flag)


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


def _run(
    pool: RankPool,
    namespaces: list[str],
    address: str,
    flag: Path,
    stranger: tuple[str, str, str, int] | None = None,
) -> list[str]:
    """Run a job of two ranks, and perhaps a stranger, and return what each printed."""
    pool.replace()  # processes that are in no group yet
    try:
        ended = pool.try_run(
            _in_namespace,
            namespaces,
            address,
            str(flag),
            stranger,
            world_size=len(namespaces),
            timeout=LIMIT,
            environment={"RINGWAY_JOB_SECRET": SECRET},
        )
    finally:
        pool.replace()
    assert all(outcome.ok for outcome in ended), "\n".join(map(str, ended))
    return [outcome.output for outcome in ended]


@pytest.mark.timeout(600)
def test_a_stranger_on_the_network_is_not_admitted(pool: RankPool, tmp_path: Path) -> None:
    """The job's two hosts have a link of their own. The stranger has one to the first host, and routes to it."""
    flag = tmp_path / "signed in"
    links = {("a", "b"): "10.61.0", ("a", "c"): "10.62.0"}
    with _namespaces(["a", "b", "c"], links) as made:
        _ip("-n", made["c"], "route", "add", "10.61.0.0/24", "via", "10.62.0.1")
        attempts = int(os.environ.get("RINGWAY_ATTACK", "100")) // 4
        stranger = ("10.61.0.1", "10.62.0.1", str(flag), attempts)
        first, second, said = _run(pool, list(made.values()), "10.61.0.1", flag, stranger)
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


@contextmanager
def _wireguard(namespaces: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A WireGuard interface in each namespace: the kernel's, or wireguard-go's where the kernel has none. Which it is,
    and their names: `wg` finds wireguard-go by the interface's name on the whole host, so they differ."""
    if shutil.which("wg") is None:
        pytest.skip("'wg' is missing; install wireguard-tools")
    names = [f"{namespace}wg" for namespace in namespaces]
    programs: list[subprocess.Popen[bytes]] = []
    try:
        for namespace, name in zip(namespaces, names, strict=True):
            inside = ["ip", "netns", "exec", namespace]
            made = subprocess.run(
                [*inside, "ip", "link", "add", name, "type", "wireguard"], capture_output=True, timeout=60
            )
            if made.returncode == 0:
                continue
            if shutil.which("wireguard-go") is None:
                pytest.skip(f"this kernel has no WireGuard ({made.stderr.decode().strip()}); install wireguard-go")
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            programs.append(subprocess.Popen([*inside, "wireguard-go", "--foreground", name], **quiet))  # type: ignore[call-overload]
            shown = [*inside, "wg", "show", name]
            while subprocess.run(shown, capture_output=True, timeout=60, check=False).returncode:
                if programs[-1].poll() is not None:
                    pytest.skip("this kernel has no WireGuard, and wireguard-go cannot run here: it needs /dev/net/tun")
                time.sleep(0.02)
        yield "wireguard-go" if programs else f"the WireGuard of Linux {os.uname().release}", names
    finally:
        for program in programs:
            program.terminate()
            program.wait(60)


def _wg(*arguments: str, given: str | None = None) -> str:
    ran = subprocess.run(["wg", *arguments], input=given, capture_output=True, text=True, check=True, timeout=60)
    return ran.stdout.strip()


@pytest.mark.timeout(600)
def test_a_job_runs_over_wireguard(
    pool: RankPool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The recipe of docs/security.md, on two namespaces."""
    flag = tmp_path / "go"
    flag.touch()
    with (
        _namespaces(["a", "b"], {("a", "b"): "10.63.0"}) as made,
        _wireguard([made["a"], made["b"]]) as (which, interfaces),
    ):
        record_property("ran on", which)
        private, public = [_wg("genkey"), _wg("genkey")], []
        for own, key in enumerate(private):
            public.append(_wg("pubkey", given=key))
            file = tmp_path / str(own)
            file.touch(mode=0o600)
            file.write_text(key)
        for own, (name, interface) in enumerate(zip("ab", interfaces, strict=True)):
            other = 1 - own
            _ip("-n", made[name], "address", "add", f"10.9.0.{own + 1}/24", "dev", interface)
            peer = ["peer", public[other], "allowed-ips", f"10.9.0.{other + 1}/32"]
            peer += ["endpoint", f"10.63.0.{other + 1}:51820"]
            setup = ["wg", "set", interface, "private-key", str(tmp_path / str(own)), "listen-port", "51820", *peer]
            _ip("netns", "exec", made[name], *setup)
            _ip("-n", made[name], "link", "set", interface, "up")
        for output in _run(pool, list(made.values()), "10.9.0.1", flag):
            assert "SUM [2.0, 2.0, 2.0] [0, 1]" in output, output
        shown = ["ip", "netns", "exec", made["a"], "wg", "show", interfaces[0], "transfer"]
        moved = subprocess.run(shown, capture_output=True, text=True, check=True, timeout=60).stdout.split()
        assert int(moved[-1]) > 10_000, moved
