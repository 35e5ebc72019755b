"""Versions: of torch, of the MPIs that are installed, and of what torch was built for."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from ringway.doctor.finding import Finding, Findings, error, ok, warning
from ringway.version import NEWEST_TORCH, VERSION, release

_SECONDS = 20.0
_UNKNOWN = "an unknown MPI"
_ASK_MPI4PY = "from mpi4py import rc; rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def software(environ: Mapping[str, str] = os.environ, python: str = sys.executable) -> Findings:
    """`python` is asked for its mpi4py."""
    facts = (platform.python_version(), platform.machine(), platform.release())
    yield ok("ringway", "{}, Python {}, {}, Linux {}".format(VERSION, *facts))
    yield _torch()
    yield from _mpi(environ, python)


def _torch() -> Finding:
    if release(torch.__version__) > release(NEWEST_TORCH):
        says = f"{torch.__version__} is newer than {NEWEST_TORCH}, the newest that this ringway was tested with"
        return warning("torch", says, "If something fails, look for a newer ringway")
    return ok("torch", torch.__version__)


def _mpi(environ: Mapping[str, str], python: str) -> Findings:
    launchers = _launchers(environ)
    library = _mpi4py(python)
    if library is None:
        if launchers:
            yield ok("MPI", f"{_listed(launchers)}; mpi4py is not installed, so the mpi backend is unavailable")
        return
    # Only the first of each name on PATH is what a user starts.
    first = {Path(path).name: path for path in reversed(launchers)}.values()
    others = {path: launchers[path] for path in first if launchers[path] not in (library, _UNKNOWN)}
    if library == _UNKNOWN:
        others = {}  # it may belong to any of them
    if others:
        yield error(
            "MPI",
            f"mpi4py uses {library}, and {_listed(others)} {'is' if len(others) == 1 else 'are'} on PATH: every rank "
            "would be alone in a job of one",
            f"Start ranks with {library}'s own mpirun, and put it first on PATH",
        )
    else:
        yield ok("MPI", f"mpi4py uses {library}; {_listed(launchers) or 'no mpirun is on PATH'}")


def _listed(launchers: Mapping[str, str]) -> str:
    return ", ".join(f"{path} ({kind})" for path, kind in launchers.items())


def _launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """The MPI launchers on PATH, and the MPI of each."""
    found: dict[str, str] = {}
    for folder in environ.get("PATH", "").split(os.pathsep):
        for name in ("mpirun", "mpiexec"):
            path = shutil.which(name, path=folder)
            if path is not None and not any(Path(path).resolve() == Path(other).resolve() for other in found):
                found[path] = _kind(_said([path, "--version"]))
    return found


def _mpi4py(python: str) -> str | None:
    """The MPI that mpi4py loads. Asked in a process of its own: loading an MPI has lasting effects."""
    said = _said([python, "-c", _ASK_MPI4PY])
    return _kind(said) if said else None


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _kind(text: str) -> str:
    """Open MPI 4 says "Open MPI" and its launcher "OpenRTE" or "Open MPI"; MPICH's launcher is called HYDRA."""
    lowered = text.lower()
    if "open mpi" in lowered or "openrte" in lowered or "prrte" in lowered:
        return "Open MPI"
    if "intel(r) mpi" in lowered:
        return "Intel MPI"
    if "mpich" in lowered or "hydra" in lowered:
        return "MPICH"
    return _UNKNOWN
