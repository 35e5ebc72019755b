"""The doctor names faults that are planted for real where this machine allows it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import slow_link
from mpi_homes import mpi_home
from ringway.cli import app
from ringway.doctor import Finding, examine
from ringway.doctor.leftovers import leftovers
from ringway.doctor.limits import limits
from ringway.doctor.network import Interface, nccl_interfaces, network
from ringway.doctor.software import software
from ringway.launch.info import LaunchInfo
from ringway.testing import RankContext, RankPool

_CLONE_NEWNS, _CLONE_NEWUTS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000000, 4096, 16384, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)
_ON_TWO_HOSTS = LaunchInfo(rank=0, size=4, source="a test", local_size=2, address="192.0.2.1")


def _called(findings: Iterable[Finding], subject: str) -> Finding:
    """The only finding about this subject."""
    found = [finding for finding in findings if finding.subject == subject]
    assert len(found) == 1, (subject, found)
    return found[0]


def _needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounts need root")


def test_this_machine_is_examined_and_shown() -> None:
    findings = examine()
    assert findings is not None
    assert {finding.subject for finding in findings} >= {"torch", "memory", "CPUs", "host name", "gloo", "NCCL"}
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    document = json.loads(shown.stdout)
    assert {entry["subject"] for entry in document["findings"]} == {finding.subject for finding in findings}
    assert shown.exit_code == (1 if document["worst"] == "error" else 0)
    table = CliRunner().invoke(app, ["doctor"])
    assert "torch" in table.stdout
    assert table.exit_code == shown.exit_code


def test_an_interface_that_does_not_exist() -> None:
    environ = {
        "GLOO_SOCKET_IFNAME": "absent9",
        "NCCL_SOCKET_IFNAME": "=absent9",
        "OMPI_MCA_btl_tcp_if_include": "absent9",
    }
    findings = list(network(None, environ))
    for subject in ("gloo", "NCCL", "MPI"):
        finding = _called(findings, subject)
        assert finding.level == "error"
        assert "absent9" in finding.says


def test_an_interface_that_does_not_lead_to_the_other_hosts() -> None:
    finding = _called(network(_ON_TWO_HOSTS, {"GLOO_SOCKET_IFNAME": "lo"}), "gloo")
    assert finding.level == "error", finding
    assert "GLOO_SOCKET_IFNAME" in finding.advice, finding


def test_nccl_takes_interfaces_by_its_own_rules() -> None:
    def there(*names: str) -> list[Interface]:
        return [Interface(name, ("10.0.0.1",), True) for name in names]

    host = there("lo", "docker0", "eth0", "eth1", "ib0")
    cases = {
        "": ["ib0"],
        "eth": ["eth0", "eth1"],
        "=eth0": ["eth0"],
        "^docker,lo": ["eth0", "eth1", "ib0"],
        "^=eth0": ["lo", "docker0", "eth1", "ib0"],
    }
    for setting, wanted in cases.items():
        assert [each.name for each in nccl_interfaces(host, setting)] == wanted, setting
    assert [each.name for each in nccl_interfaces(there("lo", "docker0"), "")] == ["docker0"]
    assert [each.name for each in nccl_interfaces(there("lo"), "")] == ["lo"]
    assert [each.name for each in nccl_interfaces(there("virbr0", "lo"), "")] == ["lo"]


def _finds(monkeypatch: pytest.MonkeyPatch, *found: Interface, towards: str | None) -> None:
    module = sys.modules["ringway.doctor.network"]  # the package has a function of this name
    monkeypatch.setattr(module, "interfaces", lambda: list(found))
    monkeypatch.setattr(module, "address_towards", lambda host: towards)


def test_what_is_usual_on_a_cluster_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = Interface("lo", ("127.0.0.1",), True)
    ethernet, infiniband = Interface("eth0", ("10.0.0.1",), True), Interface("ib0", ("10.1.0.1",), True)
    # NCCL takes InfiniBand, and the store is reached by Ethernet.
    _finds(monkeypatch, loopback, ethernet, infiniband, towards="10.0.0.1")
    assert _called(network(_ON_TWO_HOSTS, {}), "NCCL").level == "ok"
    # MASTER_ADDR is this host's own name, which is loopback here.
    _finds(monkeypatch, loopback, ethernet, towards="127.0.0.1")
    findings = list(network(_ON_TWO_HOSTS, {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}))
    assert [_called(findings, name).level for name in ("NCCL", "gloo")] == ["ok", "ok"]
    assert _called(network(_ON_TWO_HOSTS, {"NCCL_SOCKET_IFNAME": "lo"}), "NCCL").level == "error"
    # The host's name is loopback, and the advice about it was followed.
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert _called(network(_ON_TWO_HOSTS, {"GLOO_SOCKET_IFNAME": "eth0"}), "host name").level == "ok"
    assert _called(network(None, {}), "host name").level == "warning"


def test_a_host_without_ipv4_and_with_an_invalid_name(monkeypatch: pytest.MonkeyPatch) -> None:
    true_socket = socket.socket

    def without_ipv4(family: int = socket.AF_INET, *rest: int) -> socket.socket:
        if family == socket.AF_INET:
            raise OSError(97, "Address family not supported by protocol")
        return true_socket(family, *rest)

    monkeypatch.setattr(socket, "socket", without_ipv4)
    monkeypatch.setattr(socket, "gethostname", lambda: "a..b")
    info = LaunchInfo(rank=0, size=2, source="a test", local_size=2, address="::1", port=29500)
    findings = list(network(info, {}))
    assert "does not resolve" in _called(findings, "host name").says
    assert _called(findings, "port").level == "warning"


def test_a_store_that_ends_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: object) -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr("ringway.doctor.discover", lambda asks_mpi: _ON_TWO_HOSTS)
    monkeypatch.setattr("ringway.doctor.rendezvous", lambda info, seconds: None)
    monkeypatch.setattr("ringway.doctor.compare_hosts", ends)
    finding = _called(examine(1.0) or (), "other ranks")
    assert "Connection reset" in finding.says


def test_ranks_of_a_launcher_that_is_process_1_are_no_leftovers(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    for process, parent, name in (("1", "0", ""), ("77", "1", "python")):
        folder = tmp_path / "proc" / process
        folder.mkdir(parents=True)
        (folder / "status").write_bytes(b"Name:\t\xff\xfe\nState:\tS\nPPid:\t%s\n" % parent.encode())
        (folder / "environ").write_bytes(b"RANK=0\0WORLD_SIZE=2\0" if parent == "1" else b"")
        (folder / "comm").write_text(name)
    for launcher, level in (("torchrun", "ok"), ("python3", "ok"), ("bash", "warning"), ("tini", "warning")):
        (tmp_path / "proc/1/comm").write_text(launcher + "\n")
        assert _called(leftovers(tmp_path), "leftover ranks").level == level, launcher


def _with_own_mounts(context: RankContext, hosts_file: str) -> list[Finding]:
    """What the doctor says where this host's name resolves to 127.0.1.1."""
    assert _LIBC.unshare(_CLONE_NEWNS | _CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    assert _LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
    assert _LIBC.mount(hosts_file.encode(), b"/etc/hosts", None, _MS_BIND, None) == 0
    socket.sethostname("planted")
    return list(network(_ON_TWO_HOSTS, {}))


@pytest.mark.ranks
def test_a_host_name_that_is_loopback(pool: RankPool, tmp_path: Path) -> None:
    _needs_root()
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n127.0.1.1 planted\n")
    pool.replace()
    try:
        (findings,) = pool.run(_with_own_mounts, str(hosts_file), world_size=1, timeout=60)
    finally:
        pool.replace()
    finding = _called(findings, "host name")
    assert finding.level == "warning", "ringway's own groups do not use the name"
    assert "127.0.1.1" in finding.says
    assert "/etc/hosts" in finding.advice


def test_a_full_dev_shm(tmp_path: Path) -> None:
    _needs_root()
    folder = tmp_path / "dev/shm"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True, timeout=60)
    try:
        with pytest.raises(OSError, match="No space left"):
            (folder / "full").write_bytes(bytes(2 << 20))
        finding = _called(limits(None, tmp_path), "/dev/shm")
    finally:
        subprocess.run(["umount", folder], check=True, timeout=60)
    assert finding.level == "error"
    assert "--shm-size" in finding.advice


def _container(root: Path, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job\n")
    mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    (root / "proc/self/mountinfo").write_text(mounts)
    (root / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 104857600 kB\nSwapFree: 0 kB\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup/job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_a_memory_cgroup(tmp_path: Path) -> None:
    files = {"memory.max": str(500 << 20), "memory.current": str(400 << 20), "memory.swap.max": "0"}
    finding = _called(limits(None, _container(tmp_path, files)), "memory")
    assert finding.level == "error"
    assert "memory.max" in finding.says
    assert "--memory" in finding.advice


def test_a_cpu_quota(tmp_path: Path) -> None:
    finding = _called(limits(None, _container(tmp_path, {"cpu.max": "50000 100000"})), "CPU quota")
    assert finding.level == "warning"
    assert "0.5 CPUs" in finding.says


def test_more_ranks_than_cpus() -> None:
    ranks = 1 + (os.cpu_count() or 1)
    info = LaunchInfo(rank=0, size=ranks, source="a test", local_size=ranks)
    assert _called(limits(info), "CPUs").level == "warning"


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        info = LaunchInfo(rank=0, size=2, source="a test", local_size=2, address="127.0.0.1", port=port)
        finding = _called(network(info, {}), "port")
    assert finding.level == "error"
    assert str(port) in finding.says


@pytest.mark.processes
def test_two_mpis() -> None:
    mpich, openmpi = mpi_home("mpich"), mpi_home("openmpi")
    environ = {"PATH": f"{openmpi}/bin:{mpich}/bin"}
    finding = _called(software(environ, f"{mpich}/bin/python"), "MPI")
    assert finding.level == "error", finding
    assert "Open MPI" in finding.says, finding
    assert "MPICH" in finding.advice, finding
    for folders in (f"{mpich}/bin", f"{mpich}/bin:{openmpi}/bin"):
        finding = _called(software({"PATH": folders}, f"{mpich}/bin/python"), "MPI")
        assert finding.level == "ok", finding


def test_a_leftover_rank() -> None:
    environ = {**os.environ, "RANK": "3", "WORLD_SIZE": "8"}
    # The shell ends at once, so its child is adopted.
    said = subprocess.run(
        ["sh", "-c", "sleep 100 >/dev/null 2>&1 & echo $!"], env=environ, capture_output=True, timeout=60
    )
    process = int(said.stdout)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = [each for each in leftovers() if f"process {process} " in each.says]
            if found:
                break
            time.sleep(0.1)
        parent = Path(f"/proc/{process}/status").read_text().partition("PPid:\t")[2].split()[0]
        if parent != "1" and not found:
            pytest.skip(f"process {parent} adopts orphans here, and is not known for that")
    finally:
        os.kill(process, signal.SIGKILL)
    assert len(found) == 1
    assert "rank 3 of 8" in found[0].says
    assert f"kill {process}" in found[0].advice


def test_a_torch_that_is_too_old(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text('__version__ = "2.5.1+cpu"\n')
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        [sys.executable, "-m", "ringway", "doctor"], env=environ, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode != 0
    assert "needs torch 2.8 or newer, and torch 2.5.1+cpu is installed" in ended.stderr


@pytest.mark.processes
def test_a_clock_that_is_off(tmp_path: Path) -> None:
    """libfaketime shows rank 1, and nobody else, a wall clock that is 3 s ahead."""
    slow_link.needed()
    if shutil.which("faketime") is None:
        pytest.skip("libfaketime is not installed (Debian's package faketime)")
    # libfaketime 0.9.10 breaks the call that time.sleep uses.
    sleep = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"
    (tmp_path / "sitecustomize.py").write_text(sleep)
    ahead = ["faketime", "-m", "--exclude-monotonic", "-f", "+3s"]
    with slow_link.two_hosts() as hosts, ExitStack() as ends:
        ranks = []
        for rank, host in enumerate(hosts):
            environ = {**os.environ, **_place_of(rank, hosts[0].address)}
            if rank == 1:
                environ["PYTHONPATH"] = str(tmp_path)
            command = [
                *(ahead if rank == 1 else []),
                sys.executable,
                "-m",
                "ringway",
                "doctor",
                "--json",
                "--timeout",
                "100",
            ]
            ranks.append(
                ends.enter_context(
                    subprocess.Popen(
                        ["ip", "netns", "exec", host.namespace, *command],
                        env=environ,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            )
        said = [rank.communicate(timeout=120) for rank in ranks]
    findings = [Finding(**entry) for entry in json.loads(said[0][0])["findings"]]
    clock = _called(findings, "clocks")
    assert clock.level == "warning", said
    ahead = re.search(r"([0-9.]+) s ahead", clock.says)  # known to half of the fastest answer's time
    assert ahead is not None, said
    assert abs(float(ahead[1]) - 3) < 2.5, said


def _place_of(rank: int, address: str) -> dict[str, str]:
    """The variables of a rank, alone on its host, in a job of two."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": "29511",
        "RINGWAY_JOB_SECRET": "ab" * 32,
    }


def _on_host(context: RankContext, namespaces: list[str], address: str, ahead: float) -> list[Finding] | None:
    slow_link.enter(namespaces[context.rank])
    os.environ.update(_place_of(context.rank, address))
    if context.rank == 1 and ahead:
        true_time = time.time_ns
        time.time_ns = lambda: true_time() + int(ahead * 1e9)
    return examine(100.0)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_between_two_hosts_blocked_ports_and_clocks_are_named(pool: RankPool) -> None:
    slow_link.needed()
    with slow_link.two_hosts() as hosts:
        namespaces = [host.namespace for host in hosts]

        def together(ahead: float = 0.0) -> list[Finding]:
            pool.replace()
            try:
                return pool.run(_on_host, namespaces, hosts[0].address, ahead, world_size=2, timeout=200)[0]
            finally:
                pool.replace()

        findings = together(ahead=30.0)
        assert not [each for each in findings if each.level == "error" and each.subject.startswith("to ")], findings
        clock = _called(findings, "clocks")
        assert clock.level == "warning", clock
        ahead = re.search(r"([0-9.]+) s ahead", clock.says)  # known to half of the fastest answer's time
        assert ahead is not None, clock
        assert abs(float(ahead[1]) - 30) < 10, clock
        # Rank 1's host sends nothing to the ports of outgoing connections, the doctor's among them.
        rule = ("rule", "add", "ipproto", "tcp", "dport", "30000-65534", "prohibit")
        subprocess.run(["ip", "-n", namespaces[1], *rule], check=True, timeout=60)
        findings = together()
        blocked = [each for each in findings if each.level == "error" and each.subject.startswith("to ")]
        assert [each.says.split()[0] for each in blocked] == [host.address for host in hosts], findings
        assert _called(findings, "clocks").level == "ok"
