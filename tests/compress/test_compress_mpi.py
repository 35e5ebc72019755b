"""Compressed collectives over mpi, under real MPICH."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpi_homes import mpi_home
from programs import run_launched
from ringway.testing import RankPool

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("mpi_compress.py")
RANKS = 3


@pytest.mark.timeout(300)
def test_the_pool_checks_pass_over_mpi(pool: RankPool, tmp_path: Path) -> None:
    launcher = [mpi_home("mpich") / "bin" / "mpiexec", "-n", str(RANKS)]
    leave = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in leave}
    run = run_launched(
        pool, launcher, PROGRAM, str(tmp_path), ranks=RANKS, environment=environment, prefix=mpi_home("mpich")
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr[-6000:]}"
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {"apart": [], "seen": ["all_to_all_single", "all_gather_into_tensor"] * 2}
