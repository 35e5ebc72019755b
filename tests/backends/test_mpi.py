"""The mpi backend under real MPICH and Open MPI, in environments made from PyPI wheels, started by their mpiexec."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpi_homes import mpi_home
from programs import run_launched
from ringway.testing import RankPool

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.processes

SOAK = bool(os.environ.get("RINGWAY_SOAK"))

PROGRAM = Path(__file__).with_name("mpi_ranks.py")
LAUNCH = {"mpich": ["mpiexec"], "openmpi": ["mpiexec", "--allow-run-as-root", "--oversubscribe"]}
# mpi must need no other variable, and variables of other launchers must not mislead it.
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK", "PMI_SIZE")


def launch(
    pool: RankPool,
    mpi: str,
    scenario: str,
    ranks: int,
    folder: Path,
    *,
    python: str | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a scenario under one MPI's mpiexec, with the mpi4py of the same environment or of the other one."""
    launcher, *flags = LAUNCH[mpi]
    environment = {name: value for name, value in os.environ.items() if name not in CLEAN}
    return run_launched(
        pool,
        [mpi_home(mpi) / "bin" / launcher, *flags, "-n", str(ranks)],
        PROGRAM,
        scenario,
        str(folder),
        ranks=ranks,
        environment=environment,
        prefix=mpi_home(python or mpi),
        timeout=timeout,
    )


def found(folder: Path, ranks: int, run: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The result of each rank. If a rank wrote none, fails the test with the output."""
    missing = [rank for rank in range(ranks) if not (folder / f"{rank}.json").exists()]
    assert not missing, f"ranks {missing} wrote nothing (exit {run.returncode}):\n{run.stdout}\n{run.stderr}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mpi", "ranks"), [("openmpi", 3), *([("mpich", 4), ("openmpi", 4)] if SOAK else [])])
def test_conformance_and_training(pool: RankPool, mpi: str, ranks: int, tmp_path: Path) -> None:
    """One launch: the cases on the world and on sub-groups; then DDP and FSDP2."""
    run = launch(pool, mpi, "conformance", ranks, tmp_path)
    results = found(tmp_path, ranks, run)
    assert [result["findings"] for result in results] == [[]] * ranks
    assert run.returncode == 0, run.stderr
    assert results[-1]["cases"] > 200
    for result in results:
        assert result["expected"][-1] < result["expected"][0]
        assert result["ddp"] == pytest.approx(result["expected"], rel=1e-4)
        assert result["fsdp2"] == pytest.approx(result["expected"], rel=1e-4)


@pytest.mark.timeout(300)
def test_conformance_and_mpi_between_hosts_with_shared_memory_inside(pool: RankPool, tmp_path: Path) -> None:
    """One launch: the cases on the world; then on hosts, whose groups between them are MPI's sub-groups."""
    run = launch(pool, "mpich", "hierarchical", 4, tmp_path)
    for result in found(tmp_path, 4, run):
        assert result["findings"] == []
        assert result["cases"] > 70
        assert result["parts"] == ["shm", "mpi", "gloo"]
        assert result["by hosts"] > 60
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("mpi", LAUNCH)
def test_errors_can_be_caught_and_other_groups_stay_usable(pool: RankPool, mpi: str, tmp_path: Path) -> None:
    results = found(tmp_path, 3, launch(pool, mpi, "misuse", 3, tmp_path))
    assert "rank 0 sends 12 bytes to rank 1, which expects 20" in results[1]["short message"]
    text, sides = results[2]["short message"]
    assert "rank 1 sends 12 bytes to rank 2, which expects 20" in text
    assert set(sides) == {"1", "2"}  # keys of JSON
    assert "send (12 bytes, peer 2, group " in sides["1"]
    assert "recv #0 (float32[5], peer 1, tag 0, group " in sides["2"]
    for result in results[1:]:
        text, waited = result["timeout"]
        assert "all_reduce" in text
        assert "rank" in text
        assert waited >= 1.0
        assert result["again"] == text
    for result in results:
        assert "takes tags from 0 to" in result["tag"]
        assert result["afterwards"] == 3.0
        assert result["overlap"] == 1.0
        assert result["idle"] < 0.5
        text, waited = result["mismatch"]
        assert "called different things" in text
        assert waited < 30
    sums, plain = [3.0 * i for i in range(10)], [float(i) for i in range(10)]
    for rank, result in enumerate(results):
        in_parts = result["sums in parts"]
        assert in_parts[:3] == [sums, plain, plain]
        assert in_parts[3] == sums or rank > 0
        assert in_parts[4] == sums
        assert in_parts[5] == [3.0 * i for i in range(10 * rank, 10 * rank + 10)]
        for said, took, again in result["error between parts"]:
            assert took < 30  # and not the group's 60 s
            what = "was interrupted by LookupError in the middle of a call of the group"
            if rank == 1:
                assert (said, f"this rank {what}" in again) == ("LookupError: between two parts", True), again
            else:
                assert f"rank 1 {what}" in again, again
                assert again.startswith("PeerLost: ")
                assert said in (again, "no error")
        told = [said for said, _, _ in result["error between parts"]]
        assert "no error" not in told or (rank, told.index("no error")) == (2, 3)  # only the root waits in reduce


@pytest.mark.skipif(not SOAK, reason="takes 10 GB of memory and minutes; make soak")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mpi", LAUNCH)
def test_messages_beyond_two_to_the_31_elements(pool: RankPool, mpi: str, tmp_path: Path) -> None:
    for result in found(tmp_path, 2, launch(pool, mpi, "large", 2, tmp_path, timeout=800)):
        assert result["broadcast"] == [1, 2, 3, 4, 5]
        assert result["all_reduce"] == result["received"] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("mpi", LAUNCH)
def test_a_rank_that_fails_ends_the_job(pool: RankPool, mpi: str, tmp_path: Path) -> None:
    run = launch(pool, mpi, "crash", 2, tmp_path)
    assert run.returncode != 0
    said = run.stdout + run.stderr
    assert "rank 1 ends by an uncaught ValueError: this rank has had enough; ending the MPI job" in said
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("mpi", LAUNCH)
def test_a_rank_that_leaves_is_named_and_the_job_ends(pool: RankPool, mpi: str, tmp_path: Path) -> None:
    """The error comes long before the timeout, and a rank that catches it can continue with the remaining ranks."""
    run = launch(pool, mpi, "leave", 3, tmp_path, timeout=150)
    assert run.returncode != 0
    for rank in (0, 2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["rank"] == 1
        assert "rank 1, which has left the job" in result["said"]
    assert "ends by an uncaught PeerLost" in run.stdout + run.stderr


def test_a_world_size_that_differs_from_mpis_is_refused_and_a_program_written_for_torch_runs(
    pool: RankPool, tmp_path: Path
) -> None:
    for result in found(tmp_path, 2, launch(pool, "mpich", "torch_only", 2, tmp_path)):
        assert "the MPI world has 2 ranks, and the torch world 1" in result["error"]
        assert result["sum"] == 2.0


def test_mpi4py_of_open_mpi_under_mpichs_launcher_is_refused(pool: RankPool, tmp_path: Path) -> None:
    for result in found(tmp_path, 2, launch(pool, "mpich", "alone", 2, tmp_path, python="openmpi")):
        assert "is an MPI world of its own" in result["error"]
        assert "mpi4py was built for another MPI" in result["error"]


def test_mpi4py_of_mpich_under_open_mpis_launcher_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """MPICH itself refuses to start and says why."""
    run = launch(pool, "openmpi", "alone", 2, tmp_path, python="mpich")
    assert run.returncode != 0
    assert "unsupported PMI version" in run.stdout + run.stderr
