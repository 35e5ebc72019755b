"""Finds the launcher that started this process: the innermost of those whose variables are set."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from ringway.errors import DiscoveryError, UsageError
from ringway.launch.ancestry import Ancestor, Ancestry, ancestors, setter
from ringway.launch.ask_mpi import ask_mpi, described, mpi_launcher
from ringway.launch.ask_ray import ask_ray
from ringway.launch.info import MAX_RANKS, LaunchInfo, Variables
from ringway.launch.sources import LOOPBACK, NO_LAUNCHER, SOURCES, Source, alone

SCHEMES = ("env://", "tcp://", "file://")
"""What an `init_method` may begin with. torch knows others, if the program registers them."""


@dataclass(frozen=True)
class Seen:
    """One launcher whose variables are set, with its information, or the error if they are inconsistent."""

    source: str
    info: LaunchInfo | None
    error: DiscoveryError | None = None


@dataclass(frozen=True)
class Discovery:
    """The chosen launcher, and every launcher that was seen, the chosen one first."""

    info: LaunchInfo
    seen: tuple[Seen, ...]
    mpi_launcher: Ancestor | None = None
    """An MPI launcher above this process, if no launcher's variables are set."""


def discover(
    environ: Mapping[str, str] | None = None,
    *,
    rank: int = -1,
    size: int = -1,
    init_method: str | None = None,
    ignored: Collection[str] = (),
    ancestry: Ancestry | None = None,
    asks_mpi: bool = False,
) -> LaunchInfo:
    """This process's place in the job. Arguments override any launcher; launchers in `ignored` are skipped.

    With `asks_mpi`, MPI is asked if an MPI launcher started this process and set no variable that ringway knows.
    """
    found = explore(environ, rank=rank, size=size, init_method=init_method, ignored=ignored, ancestry=ancestry)
    if asks_mpi and found.info.source == NO_LAUNCHER and found.mpi_launcher is not None:
        return ask_mpi(found.info, found.mpi_launcher)
    return found.info


def explore(
    environ: Mapping[str, str] | None = None,
    *,
    rank: int = -1,
    size: int = -1,
    init_method: str | None = None,
    ignored: Collection[str] = (),
    ancestry: Ancestry | None = None,
) -> Discovery:
    """Like `discover`, but returns everything that was seen. `environ` defaults to this process's environment."""
    if environ is None:
        environ = os.environ
        ancestry = ancestors if ancestry is None else ancestry
    seen = all_seen(environ, ignored, ancestry)
    rank, size = _with_query(init_method, rank, size)
    if rank >= 0 or size >= 0 or _has_address(init_method):
        launcher = seen[0].info if seen else None
        launcher = launcher and _with_job(launcher, environ, ancestry)
        chosen = _from_arguments(environ, rank, size, init_method, launcher)
        return Discovery(chosen, (Seen(chosen.source, chosen), *seen))
    if not seen:
        by_ray = None if ancestry is None else ask_ray()  # only about this process, not about a given environment
        if by_ray is not None:
            return Discovery(by_ray, (Seen(by_ray.source, by_ray),))
        info = alone(environ)
        above = None if ancestry is None else mpi_launcher(ancestry)
        if above is not None:
            info = replace(info, notes=(*info.notes, described(above)))
        return Discovery(info, (Seen(info.source, info),), above)
    first = seen[0]
    if first.error is not None:
        raise first.error
    assert first.info is not None
    return Discovery(_with_job(first.info, environ, ancestry), tuple(seen))


def all_seen(environ: Mapping[str, str], ignored: Collection[str] = (), ancestry: Ancestry | None = None) -> list[Seen]:
    """Every launcher whose variables are set, the innermost first, including those with errors."""
    found: list[tuple[int, Seen]] = []
    for source in SOURCES:
        if source.name in ignored:
            continue
        try:
            info = source.read(environ)
        except DiscoveryError as error:
            found.append((_depth(source, environ, ancestry), Seen(source.name, None, error)))
        else:
            if info is not None:
                found.append((_depth(source, environ, ancestry), Seen(source.name, info)))
    found.sort(key=lambda item: item[0])  # stable: ties keep the order of SOURCES
    return [seen for _, seen in found]


def _depth(source: Source, environ: Mapping[str, str], ancestry: Ancestry | None) -> int:
    value = environ.get(source.mark)
    if ancestry is None or value is None:
        return 0
    return setter(source.mark, value, ancestry)[0]


def _with_job(info: LaunchInfo, environ: Mapping[str, str], ancestry: Ancestry | None) -> LaunchInfo:
    """If all ranks are on this host and the launcher gives no job id and no port, its process identifies the job."""
    if info.job or info.port is not None or not info.on_one_host or ancestry is None or info.size == 1:
        return info
    variable = next(source.mark for source in SOURCES if source.name == info.source)
    _, process = setter(variable, environ.get(variable, ""), ancestry)
    if process is None:
        return info
    return replace(info, job=f"started by process {process.pid}.{process.started}")


def _has_address(init_method: str | None) -> bool:
    return init_method is not None and not init_method.startswith("env://")


def _from_arguments(
    environ: Mapping[str, str], rank: int, size: int, init_method: str | None, launcher: LaunchInfo | None
) -> LaunchInfo:
    """The place given by arguments; missing values come from `launcher`, if there is one."""
    found = Variables(environ, "arguments")
    address, port = found.text("MASTER_ADDR"), found.port("MASTER_PORT")
    if launcher is not None:
        address, port = launcher.address, launcher.port
    if init_method is not None and _has_address(init_method):
        address, port = _read_method(init_method, size)
    if launcher is not None:
        rank = launcher.rank if rank < 0 else rank
        size = launcher.size if size < 0 else size
    if size < 0 and rank <= 0:
        rank, size = 0, 1
    if not 0 <= rank < size <= MAX_RANKS:
        raise UsageError(f"invalid rank={rank} and world_size={size}: 0 <= rank < world_size is required")
    if size > 1 and (address is None or port is None) and launcher is None and not _is_file(init_method):
        raise UsageError(
            f"rank={rank} and world_size={size} were given without an address: pass init_method='tcp://HOST:PORT', "
            "or set MASTER_ADDR and MASTER_PORT"
        )
    notes = (f"init_method {init_method}",) if init_method else ()
    if launcher is not None and (launcher.rank, launcher.size) == (rank, size):
        elsewhere = _has_address(init_method)
        return replace(
            launcher,
            source="arguments",
            address=address,
            port=port,
            socket=None if elsewhere else launcher.socket,
            job="" if elsewhere else launcher.job,
            hosted_by_launcher=launcher.hosted_by_launcher and not elsewhere,
            notes=notes,
        )
    return found.info(rank=rank, size=size, address=address or LOOPBACK, port=port, notes=notes)


def _is_file(init_method: str | None) -> bool:
    return init_method is not None and init_method.startswith("file://")


def _with_query(init_method: str | None, rank: int, size: int) -> tuple[int, int]:
    """The arguments, or else what the URL says: `tcp://HOST:PORT?rank=0&world_size=2`."""
    if init_method is None or _is_file(init_method):
        return rank, size
    try:
        query = dict(pair.split("=", 1) for pair in urlsplit(init_method).query.split("&") if pair)
        rank = int(query.get("rank", rank)) if rank < 0 else rank
        size = int(query.get("world_size", size)) if size < 0 else size
    except ValueError as error:
        raise UsageError(f"init_method={init_method!r} is invalid: {error}") from None
    return rank, size


def _read_method(init_method: str, size: int) -> tuple[str | None, int | None]:
    if _is_file(init_method):
        return None, None
    try:
        url = urlsplit(init_method)
        port = url.port
    except ValueError as error:
        raise UsageError(f"init_method={init_method!r} is invalid: {error}") from None
    if url.scheme != "tcp" or not url.hostname or port is None or (port == 0 and size != 1):
        raise UsageError(f"init_method={init_method!r} is not supported; use tcp://HOST:PORT, file:///PATH or env://")
    return url.hostname, port or None
