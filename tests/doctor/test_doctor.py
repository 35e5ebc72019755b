"""The doctor names faults that are planted for real where this machine allows it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from findings import called, needs_root
from typer.testing import CliRunner

from ringway.cli import app
from ringway.doctor import Finding, examine
from ringway.doctor.leftovers import leftovers
from ringway.doctor.network import Interface, nccl_interfaces, network
from ringway.launch.info import LaunchInfo
from ringway.testing import RankContext, RankPool

_CLONE_NEWNS, _CLONE_NEWUTS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000000, 4096, 16384, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)
_ON_TWO_HOSTS = LaunchInfo(rank=0, size=4, source="a test", local_size=2, address="192.0.2.1")


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
    findings = list(network(None, {"GLOO_SOCKET_IFNAME": "absent9", "NCCL_SOCKET_IFNAME": "=absent9"}))
    for subject in ("gloo", "NCCL"):
        finding = called(findings, subject)
        assert finding.level == "error"
        assert "absent9" in finding.says


def test_an_interface_that_does_not_lead_to_the_other_hosts() -> None:
    finding = called(network(_ON_TWO_HOSTS, {"GLOO_SOCKET_IFNAME": "lo"}), "gloo")
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
    assert called(network(_ON_TWO_HOSTS, {}), "NCCL").level == "ok"
    # MASTER_ADDR is this host's own name, which is loopback here.
    _finds(monkeypatch, loopback, ethernet, towards="127.0.0.1")
    findings = list(network(_ON_TWO_HOSTS, {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}))
    assert [called(findings, name).level for name in ("NCCL", "gloo")] == ["ok", "ok"]
    assert called(network(_ON_TWO_HOSTS, {"NCCL_SOCKET_IFNAME": "lo"}), "NCCL").level == "error"
    # The host's name is loopback, and the advice about it was followed.
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert called(network(_ON_TWO_HOSTS, {"GLOO_SOCKET_IFNAME": "eth0"}), "host name").level == "ok"
    assert called(network(None, {}), "host name").level == "warning"


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
    assert "does not resolve" in called(findings, "host name").says
    assert called(findings, "port").level == "warning"


def test_a_store_that_ends_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: object) -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr("ringway.doctor.discover", lambda asks_mpi: _ON_TWO_HOSTS)
    monkeypatch.setattr("ringway.doctor.rendezvous", lambda info, seconds: None)
    monkeypatch.setattr("ringway.doctor.compare_hosts", ends)
    finding = called(examine(1.0) or (), "other ranks")
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
        assert called(leftovers(tmp_path), "leftover ranks").level == level, launcher


def _with_own_mounts(context: RankContext, hosts_file: str) -> list[Finding]:
    """What the doctor says where this host's name resolves to 127.0.1.1."""
    assert _LIBC.unshare(_CLONE_NEWNS | _CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    assert _LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
    assert _LIBC.mount(hosts_file.encode(), b"/etc/hosts", None, _MS_BIND, None) == 0
    socket.sethostname("planted")
    return list(network(_ON_TWO_HOSTS, {}))


@pytest.mark.ranks
def test_a_host_name_that_is_loopback(pool: RankPool, tmp_path: Path) -> None:
    needs_root()
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n127.0.1.1 planted\n")
    pool.replace()
    try:
        (findings,) = pool.run(_with_own_mounts, str(hosts_file), world_size=1, timeout=60)
    finally:
        pool.replace()
    finding = called(findings, "host name")
    assert finding.level == "warning", "ringway's own groups do not use the name"
    assert "127.0.1.1" in finding.says
    assert "/etc/hosts" in finding.advice


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        info = LaunchInfo(rank=0, size=2, source="a test", local_size=2, address="127.0.0.1", port=port)
        finding = called(network(info, {}), "port")
    assert finding.level == "error"
    assert str(port) in finding.says


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
