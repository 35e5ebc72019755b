"""The environments with MPICH and Open MPI that tests run in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from mpi_env import mpi_env


def mpi_home(mpi: str) -> Path:
    """The folder of the environment. Skips the test if it cannot be made, as on a machine without a package index; in
    CI, that is a failure."""
    try:
        return mpi_env(mpi)
    except subprocess.SubprocessError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{mpi} cannot be installed here: {error}")
