"""Asks MPI itself for this process's place, if an MPI launcher started it and set no variable that ringway knows.

A process finds such a launcher by the names of its ancestors. MPI is loaded in a child process with a deadline first: a
library that crashes or hangs there would take this process with it.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from ringway.launch.ancestry import Ancestor, Ancestry
from ringway.launch.info import LaunchInfo

BY_MPI4PY = "mpi4py"
"""The source of a place that MPI told."""

LAUNCHERS = (
    *("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "mpiexec.gforker", "mpirun_rsh", "mpispawn"),
    *("orterun", "orted", "prterun", "prted", "prun", "jsrun", "aprun", "mpiexec.mpd", "pmi_proxy"),
)
"""Names of processes that start MPI programs."""

_LOAD_MPI = (
    "import json, sys; sys.path[:], sys.exec_prefix = json.loads(sys.argv[1]); "
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
)
_LOAD_SECONDS = 30.0
_PATIENCE = 15.0
"""Seconds until MPI's initialization counts as slow."""


def mpi_launcher(ancestry: Ancestry) -> Ancestor | None:
    """The nearest ancestor that is an MPI launcher by its name."""
    return next((ancestor for ancestor in ancestry() if ancestor.name in LAUNCHERS), None)


def described(launcher: Ancestor) -> str:
    return f"{launcher.name} (process {launcher.pid}), an MPI launcher, is above it"


@functools.cache
def mpi_failure(path: tuple[str, ...]) -> str | None:
    """Why mpi4py cannot load MPI, or None. A child process imports it: here the import could initialize MPI."""
    command = [sys.executable, "-c", _LOAD_MPI, json.dumps([path, sys.exec_prefix])]  # beneath which mpi4py looks
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"mpi4py has not loaded MPI within {_LOAD_SECONDS:g} s"
    except OSError:
        return None  # no child can be started, so the first use of MPI finds out
    if child.returncode == 0:
        return None
    said = [line for line in child.stderr.splitlines() if line.strip()]
    named = [line.partition(": ")[2] for line in said if line.startswith(("RuntimeError: ", "ImportError: "))]
    return f"mpi4py cannot load MPI: {(named or said[-1:] or [f'exit status {child.returncode}'])[0]}"


def ask_mpi(info: LaunchInfo, launcher: Ancestor) -> LaunchInfo:
    """The place that MPI knows. If it cannot be asked, or knows of one rank only, `info` with a note that says so."""
    if find_spec("mpi4py") is None:
        return _noted(info, launcher, "mpi4py, which could be asked, is not installed")
    failure = None if "mpi4py.MPI" in sys.modules else mpi_failure(tuple(sys.path))
    if failure is not None:
        return _noted(info, launcher, failure)
    slow = threading.Timer(_PATIENCE, _say, [f"MPI's initialization takes long. {_REMEDY}"])
    slow.daemon = True
    slow.start()
    try:
        from mpi4py import MPI
    finally:
        slow.cancel()
    return _told(info, launcher, MPI)


def _told(info: LaunchInfo, launcher: Ancestor, mpi: Any) -> LaunchInfo:
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return _noted(info, launcher, "MPI, which could be asked, is not initialized in this process")
    world = mpi.COMM_WORLD
    if world.Get_size() == 1:
        return _noted(info, launcher, "MPI, which was asked, knows of this rank only")
    here = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank, local_size = here.Get_rank(), here.Get_size()
    here.Free()
    if world.Get_rank() == 0:
        _say(
            f"{launcher.name} (process {launcher.pid}) set no variable that ringway knows, so MPI was asked through "
            f"mpi4py: {world.Get_size()} ranks. {_REMEDY}"
        )
    return LaunchInfo(
        rank=world.Get_rank(), size=world.Get_size(), source=BY_MPI4PY, local_rank=local_rank, local_size=local_size
    )


_REMEDY = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or auto_mpi_discovery=False, prevent the question"


def _noted(info: LaunchInfo, launcher: Ancestor, why: str) -> LaunchInfo:
    return replace(
        info, notes=(*(note for note in info.notes if note != described(launcher)), f"{described(launcher)}, and {why}")
    )


def _say(line: str) -> None:
    print(f"ringway: {line}", file=sys.stderr, flush=True)
