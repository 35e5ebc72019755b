"""What the doctor says about GPUs that an invented driver and an invented torch report."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from findings import called

from ringway.doctor import Finding, gpus
from ringway.doctor.gpus import ask_driver
from ringway.doctor.place import own_place
from ringway.doctor.ranks import sharing

_CARD = ("NVIDIA H100 80GB HBM3", "GPU-{}", "570.86.15", "Default", "Disabled", "0")
_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t{}\t{}\tPXB\t0-51\t0\t\tN/A
GPU1\t{}\t X \t{}\tNODE\t0-51\t0\t\tN/A
GPU2\t{}\t{}\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPXB\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


class Machine:
    """Three GPUs that torch and nvidia-smi see, until a test says otherwise."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cards = [[str(index), *(part.format(index) for part in _CARD)] for index in range(3)]
        self.visible = [0, 1, 2]
        self.without_access: set[tuple[int, int]] = set()
        self.links("NV18", "NV18", "NV18")
        tool = folder / "nvidia-smi"
        tool.write_text(
            f"#!/bin/sh\ncase \"$1\" in\n--query-gpu=*) cat '{folder}/cards';;\ntopo) cat '{folder}/topology';;\nesac\n"
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(self.visible))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.visible))
        monkeypatch.setattr(torch.cuda, "get_device_properties", self._properties)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", self._access)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))

    def _properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid=f"GPU-{self.visible[index]}")

    def _access(self, one: int, other: int) -> bool:
        return (self.visible[one], self.visible[other]) not in self.without_access

    def links(self, first: str, second: str, third: str) -> None:
        """Of the pairs 0-1, 0-2 and 1-2."""
        text = _TOPOLOGY.format(first, second, first, third, second, third)
        (self.folder / "topology").write_text(text)

    def findings(self, environ: dict[str, str] | None = None) -> list[Finding]:
        (self.folder / "cards").write_text("".join(", ".join(card) + "\n" for card in self.cards))
        return list(gpus(ask_driver(), environ or {}))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_gpus_without_a_fault(machine: Machine) -> None:
    findings = machine.findings()
    assert [each.level for each in findings] == ["ok"] * 3, findings
    assert called(findings, "GPUs").says == "3: NVIDIA H100 80GB HBM3; CUDA 12.8, NCCL 2.27.3"
    assert called(findings, "GPU links").says == "NVLink between all 3"
    assert called(findings, "peer access").says == "direct access between all 3"
    assert own_place(0, ask_driver()).versions["NVIDIA driver"] == "570.86.15"


def test_no_gpu(machine: Machine) -> None:
    machine.visible, machine.cards = [], []
    assert called(machine.findings(), "GPUs").says == "none"
    (machine.folder / "nvidia-smi").unlink()
    assert ask_driver() == []
    assert own_place(0, []).gpus == []


def test_gpus_that_torch_cannot_use(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.visible = []
    hidden = called(machine.findings({"CUDA_VISIBLE_DEVICES": ""}), "GPUs")
    assert (hidden.level, hidden.advice) == ("warning", "Unset it")
    assert called(machine.findings(), "GPUs").level == "error"
    assert "driver 570.86.15" in called(machine.findings(), "GPUs").says
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in called(machine.findings(), "GPUs").says


def test_a_driver_that_hangs_or_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = machine.folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert ask_driver() == []
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(sys.modules["ringway.doctor.gpus"], "_SECONDS", 0.2)  # the package has a function of this name
    assert ask_driver() == []


def test_how_gpus_are_joined(machine: Machine) -> None:
    for ways, says in (
        (("PHB", "PIX", "NODE"), "PCIe between all 3"),
        (("SYS", "SYS", "SYS"), "PCIe across sockets between all 3"),
        (
            ("NV4", "SYS", "PXB"),
            "NVLink between 1 of 3 pairs (0-1); PCIe across sockets between 1 of 3 pairs (0-2); "
            "PCIe between 1 of 3 pairs (1-2)",
        ),
    ):
        machine.links(*ways)
        finding = called(machine.findings(), "GPU links")
        assert (finding.level, finding.says) == ("ok", says)
    (machine.folder / "topology").write_text("Not supported\n")
    assert "GPU links" not in {finding.subject for finding in machine.findings()}


def test_gpus_without_direct_access(machine: Machine) -> None:
    machine.without_access = {(0, 2), (2, 0)}
    finding = called(machine.findings(), "peer access")
    assert finding.level == "warning"
    assert "2 of 6 pairs (0-2, 2-0)" in finding.says
    machine.visible = [0, 1]
    assert called(machine.findings(), "peer access").level == "ok"


def test_compute_mode_slices_and_memory_errors(machine: Machine) -> None:
    machine.cards[0][4] = "Exclusive_Process"
    machine.cards[1][5] = "Enabled"
    machine.cards[2][6] = "2"
    findings = machine.findings()
    assert "at most one process" in called(findings, "GPU 0").says
    assert "MIG" in called(findings, "GPU 1").says
    assert called(findings, "GPU 2").level == "error"
    for card in machine.cards:
        card[4:] = ["Prohibited", "[N/A]", "[N/A]"]
    assert ["no process may use it" in each.says for each in machine.findings() if each.subject[-1:].isdigit()] == [
        True
    ] * 3


def test_ranks_that_share_a_gpu(machine: Machine, tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps")}

    def shared(*visible: list[int]) -> list[Finding]:
        places = []
        for rank, machine.visible in enumerate(visible):
            places.append(replace(own_place(rank, []), cpus=[rank]))
        return [each for each in sharing(places, environ) if each.subject == "GPU sharing"]

    assert not shared([0, 1, 2], [0, 1, 2])
    assert not shared([0], [1]), "each rank sees its own"
    assert not shared([0], [])
    (few,) = shared([0, 1], [0, 1], [0, 1])
    assert (few.level, few.says) == ("warning", "3 ranks share 2, and their kernels take turns")
    (same,) = shared([1], [1], [0, 2])
    assert "ranks 0, 1 share GPU GPU-1" in same.says
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps/control").touch()
    (through_mps,) = shared([0], [0])
    assert (through_mps.level, through_mps.says) == ("ok", "2 ranks share 1, through MPS")
    assert called(shared([0], [1]), "GPU sharing").says == "MPS runs"
