"""MPIs that do not fit, and the interfaces that they use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from findings import called

from mpi_homes import mpi_home
from ringway.doctor import Finding
from ringway.doctor.mpi import mpi
from ringway.doctor.network import Interface
from ringway.launch.info import LaunchInfo

_ON_TWO_HOSTS = LaunchInfo(rank=0, size=4, source="a test", local_size=2, address="192.0.2.1")


@pytest.mark.processes
def test_two_mpis() -> None:
    mpich, openmpi = mpi_home("mpich"), mpi_home("openmpi")
    environ = {"PATH": f"{openmpi}/bin:{mpich}/bin"}
    finding = called(mpi(None, environ, f"{mpich}/bin/python"), "MPI")
    assert finding.level == "error", finding
    assert "Open MPI" in finding.says, finding
    assert "MPICH" in finding.advice, finding
    for folders in (f"{mpich}/bin", f"{mpich}/bin:{openmpi}/bin"):
        finding = called(mpi(None, {"PATH": folders}, f"{mpich}/bin/python"), "MPI")
        assert finding.level == "ok", finding


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [
        Interface("lo", ("127.0.0.1",), True),
        Interface("eth0", ("10.0.0.1",), True),
        Interface("docker0", ("172.17.0.1",), True),
    ]
    module = sys.modules["ringway.doctor.mpi"]  # the package has a function of this name
    monkeypatch.setattr(module, "interfaces", lambda: there)


def test_an_interface_of_mpi_that_does_not_exist(host: None, tmp_path: Path) -> None:
    def chosen(variable: str, setting: str, info: LaunchInfo | None = None) -> Finding:
        return called(mpi(info, {variable: setting}, "/bin/false", tmp_path), "MPI network")

    for variable in (
        *("OMPI_MCA_btl_tcp_if_include", "PRTE_MCA_prte_if_include", "HYDRA_IFACE", "I_MPI_HYDRA_IFACE"),
        *("MPIR_CVAR_NETWORK_IFACE", "UCX_NET_DEVICES", "FI_TCP_IFACE"),
    ):
        assert chosen(variable, "eth0").level == "ok"
        assert chosen(variable, "lo").level == "ok"
        assert chosen(variable, "lo", _ON_TWO_HOSTS).level == "error", "no other host reaches it"
        finding = chosen(variable, "absent9")
        assert finding.level == "error"
        assert f"{variable} names absent9" in finding.says


def test_settings_of_mpi_that_are_no_names(host: None, tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    for variable, setting, level in (
        ("UCX_NET_DEVICES", "mlx5_0:1,eth0", "ok"),
        ("UCX_NET_DEVICES", "mlx5_7:1", "error"),
        ("UCX_NET_DEVICES", "^absent9", "ok"),
        ("UCX_NET_DEVICES", "all", "ok"),
        ("OMPI_MCA_btl_tcp_if_include", "10.0.0.0/8", "ok"),
    ):
        found = [each for each in mpi(None, {variable: setting}, "/bin/false", tmp_path) if each.subject != "MPI"]
        assert all(each.level == level for each in found), (setting, found)
        assert bool(found) == (setting not in ("all", "^absent9")), (setting, found)


def test_the_interfaces_that_mpi_takes_by_its_own_rules(host: None, tmp_path: Path) -> None:
    assert not [each for each in mpi(None, {"PATH": ""}, "/bin/false") if each.subject == "MPI network"]
    launcher = tmp_path / "mpirun"
    for name, info, level, part in (
        ("mpirun (Open MPI) 5.0.11", None, "ok", "eth0 (10.0.0.1), docker0"),
        ("mpirun (Open MPI) 5.0.11", _ON_TWO_HOSTS, "warning", "docker0 leads to containers"),
        ("HYDRA build details:", _ON_TWO_HOSTS, "ok", "libfabric or UCX"),
    ):
        launcher.write_text(f"#!/bin/sh\necho '{name}'\n")
        launcher.chmod(0o755)
        finding = called(mpi(info, {"PATH": str(tmp_path)}, "/bin/false"), "MPI network")
        assert finding.level == level, finding
        assert part in finding.says, finding
    assert called(mpi(None, {"PATH": str(tmp_path), "HYDRA_IFACE": "eth0"}, "/bin/false"), "MPI network").says == (
        "would use eth0 (HYDRA_IFACE)"
    )
