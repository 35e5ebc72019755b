"""MPI: whether the launchers on PATH start ranks of the library that mpi4py loads, and the interfaces that it uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ringway.doctor.finding import Finding, Findings, error, ok, warning
from ringway.doctor.network import Interface, absent, interfaces, leads_elsewhere
from ringway.launch.info import LaunchInfo

_SECONDS = 20.0
_UNKNOWN = "an unknown MPI"
_ASK_MPI4PY = "from mpi4py import rc; rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_CHOOSE_INTERFACES = (
    # Open MPI: for data, and between its launchers (before and from version 5)
    *("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include"),
    # MPICH: its launcher, its older TCP module by three names; Intel MPI's launcher
    *("HYDRA_IFACE", "MPIR_CVAR_NEMESIS_TCP_NETWORK_IFACE", "MPIR_CVAR_NETWORK_IFACE", "MPICH_NETWORK_IFACE"),
    "I_MPI_HYDRA_IFACE",
    # what both may be built on
    *("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE"),
)


def mpi(
    info: LaunchInfo | None,
    environ: Mapping[str, str] = os.environ,
    python: str = sys.executable,
    root: Path = Path("/"),
) -> Findings:
    """`python` is asked for its mpi4py; `root` replaces the root of the file system, for tests."""
    library, launchers = _mpi4py(python), _launchers(environ)
    yield from _versions(library, launchers)
    several_hosts = info is not None and not info.on_one_host
    found = interfaces()
    chosen = list(_chosen(found, several_hosts, environ, root))
    yield from chosen
    kind = library or next(iter(launchers.values()), _UNKNOWN)
    if kind != _UNKNOWN and not chosen:
        yield _by_its_own_rules(kind, found, several_hosts)


def _versions(library: str | None, launchers: dict[str, str]) -> Findings:
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


def _chosen(found: list[Interface], several_hosts: bool, environ: Mapping[str, str], root: Path) -> Findings:
    """What the variables say."""
    adapters = [Interface(path.name, (), True) for path in sorted((root / "sys/class/infiniband").glob("*"))]
    for variable in _CHOOSE_INTERFACES:
        setting = environ.get(variable, "").strip()
        if not setting or setting == "all" or setting.startswith("^"):  # "^": all but these
            continue
        # UCX adds a port to the name of an adapter. Networks and patterns are no names.
        names = [name.strip().partition(":")[0] for name in setting.split(",")]
        names = [name for name in names if name and not set("/*[") & set(name)]
        taken = [each for each in found if each.name in names]
        yield (
            absent([*found, *adapters], "MPI network", variable, names)
            or (leads_elsewhere("MPI network", variable, taken, None, several_hosts) if taken else None)
            or ok("MPI network", f"would use {setting} ({variable})")
        )


def _by_its_own_rules(kind: str, found: list[Interface], several_hosts: bool) -> Finding:
    usable = [each for each in found if each.up and each.addresses and not each.loopback]
    listed = ", ".join(map(str, usable)) or "none"
    if kind != "Open MPI":
        says = f"{kind} leaves the choice of {listed} to libfabric or UCX; its launcher uses the host name's address"
        return ok("MPI network", says)
    says = f"Open MPI would use all interfaces but loopback ({listed}), unless UCX or libfabric has a faster adapter"
    virtual = [each.name for each in usable if each.virtual]
    if several_hosts and virtual:
        says += f"; {', '.join(virtual)} leads to containers of this host only"
        advice = f"Set OMPI_MCA_btl_tcp_if_exclude to lo,{','.join(virtual)}"
        return warning("MPI network", says, advice)
    return ok("MPI network", says)


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
