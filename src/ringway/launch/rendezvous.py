"""All ranks meet at one store, or those that came learn which ranks did not.

1. Connect: rank 0 opens the store (or the launcher has), and the others find it.
2. Recognize: the store names its job; a store of another job is refused.
3. Roll call: each rank signs in with its host and process. The last to arrive, or the first whose deadline expires,
   writes the single outcome that all ranks read. After a failure, rank 0 keeps the store open until all have read it.

Waits poll with growing pauses, so that Ctrl-C ends any of them, and all share one deadline.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from ringway.errors import DiscoveryError, RendezvousError
from ringway.launch import ports
from ringway.launch.info import LaunchInfo
from ringway.store import Deadline, read
from ringway.threads import start

FAREWELL = 5.0
"""Seconds that rank 0 waits, after a failed roll call, for the others to read which ranks were missing."""

_IDENTITY = "ringway/job"
_LONGEST_PAUSE = 0.25  # between attempts to reach a store that may not be open yet
_GRACE = 5.0  # time during which another job's store is assumed to be closing
_PROBE = 5.0  # time to connect to a responsive host and read what its store says about itself


@dataclass
class _StoreAddress:
    """Where the store was found, for messages."""

    address: str
    port: int | None = None
    host: str = ""

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address and self.port else self.address
        return address + (f":{self.port}" if self.port else "") + (f" ({self.host})" if self.host else "")


def rendezvous(info: LaunchInfo, timeout: float, *, token: str = "", path: str | None = None) -> Store:
    """Return the job's store once all ranks have arrived at it.

    `token` is part of the job's identity, for launchers that give none. With `path`, the store is a file
    (`init_method="file://..."`).
    """
    if info.size == 1 and path is None:
        return HashStore()  # a single rank needs no port and no address
    deadline = Deadline(timeout)
    named = identity(info.job, token)
    if path is not None:
        if not os.path.isdir(os.path.dirname(path) or "."):  # FileStore would wait for it silently
            raise RendezvousError(f"the folder {os.path.dirname(path)!r} for the store's file {path} does not exist")
        return _roll_call(FileStore(path, info.size), info, deadline, _StoreAddress(path))
    if info.address is None:
        store, place = _agree_through_mpi(info, named, deadline)
    elif info.rank == 0 and not info.hosted_by_launcher:
        store, place = _host(info, named, deadline)
    else:
        store, place = _join(info, named, deadline)
    while True:
        try:
            return _roll_call(store, info, deadline, place)
        except DistError as error:
            opened = _opened_again(info, named, deadline)
            if opened is None:
                raise RendezvousError(
                    f"rank {info.rank}: the store at {place} disappeared during the rendezvous: its host, "
                    f"{_host_of_store(info)}, died or closed it",
                    arrived={info.rank: socket.gethostname()},
                    missing=[] if info.hosted_by_launcher else [0],
                ) from error
            store, place = opened


def host_store(listener: socket.socket, address: str, job: str, size: int, timeout: float) -> Store:
    """Open a store on a socket that already listens, and write its job into it."""
    port = listener.getsockname()[1]
    store = TCPStore(
        ports.loopback_number(address) if ports.is_loopback(address) else address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    store.set(_IDENTITY, json.dumps({"job": _digest(job), "size": size, "host": _signature()}))
    return store


def identity(job: str, token: str) -> str:
    """Distinguishes a job from others: the launcher's id for it, and the user's token if there is one."""
    return f"{job}\n{token}" if token else job


def _digest(job: str) -> str:
    """A job's id may be secret, and anyone who can reach the store can read its contents."""
    return hashlib.sha256(job.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _signature() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _host_of_store(info: LaunchInfo) -> str:
    return "the launcher" if info.hosted_by_launcher else "rank 0"


# --- connect

_hosted: list[Store] = []
"""The store that this process opened last. It outlives its groups, because ranks that leave later still use it, and the
next start on the same port joins it again."""


def _host(info: LaunchInfo, job: str, deadline: Deadline) -> tuple[Store, _StoreAddress]:
    assert info.address is not None
    offered = [info.port] if info.port is not None else ports.choices(job)
    for port in offered:
        try:
            listener = ports.listen(info.address, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise RendezvousError(f"rank 0 cannot listen on port {port}: {error}") from error
            owner = ports.holder(port)
            if owner is not None and owner[0] == os.getpid() and info.port is not None:
                return _join(info, job, deadline)  # the store of an earlier start in this process
            if info.port is not None:
                raise RendezvousError(_taken(info.port, error, owner)) from error
            continue
        _check_way_back(info.address, port)
        store = host_store(listener, info.address, job, info.size, deadline.seconds)
        _hosted[:] = [store]
        return store, _StoreAddress(info.address, port, _signature())
    raise RendezvousError(f"rank 0 found every port of {offered} taken; set MASTER_PORT to a free port")


def _check_way_back(address: str, port: int) -> None:
    """The other ranks use this address. If rank 0 cannot reach itself there, the address is wrong or unroutable."""
    try:
        socket.create_connection((address, port), timeout=_PROBE).close()
    except OSError as error:
        raise RendezvousError(
            f"rank 0 on {socket.gethostname()} opened port {port}, but cannot reach it as "
            f"{_StoreAddress(address, port)} ({error}); set MASTER_ADDR to an address of rank 0's host{_for_example()}"
        ) from error


def _for_example() -> str:
    try:
        return f", such as {ports.own_address()}"
    except RendezvousError:  # the host has no route, and its name does not resolve
        return ""


def _taken(port: int, error: OSError, owner: tuple[int, str] | None) -> str:
    if error.errno == errno.EACCES:
        return f"this user may not use MASTER_PORT={port}; choose a port above 1023"
    by = f"by pid {owner[0]} ({owner[1]})" if owner else "by a process that the system does not show"
    return f"MASTER_PORT={port} is taken {by}; set another port, or none if ringway run is the launcher"


def _join(info: LaunchInfo, job: str, deadline: Deadline) -> tuple[Store, _StoreAddress]:
    assert info.address is not None
    offered = [info.port] if info.port is not None else ports.choices(job)
    obstacles: dict[int, str] = {}
    # An earlier job may still be closing its store on the port that this job was given.
    grace = Deadline(min(_GRACE, deadline.seconds))

    def attempt() -> tuple[Store, _StoreAddress] | None:
        for port in offered:
            try:
                return _open(info, job, port, deadline)
            except OSError as error:
                obstacles[port] = str(error)
            except RendezvousError as error:
                obstacles[port] = str(error)
                if info.port is not None and grace.left() == 0:
                    raise
            except DistError as error:  # it disappeared while being queried
                obstacles[port] = str(error).splitlines()[0]
        return None

    found = deadline.poll(attempt, _LONGEST_PAUSE)
    if found is not None:
        return found
    where = str(_StoreAddress(info.address, info.port)) + ("" if info.port is not None else f", ports {offered}")
    reasons = sorted(set(obstacles.values()))
    raise RendezvousError(
        f"rank {info.rank} of {info.size} on {socket.gethostname()}: no store at {where} within "
        f"{deadline.seconds:g} s, so its host, {_host_of_store(info)}, is missing ({'; '.join(reasons)})",
        arrived={info.rank: socket.gethostname()},
        missing=[] if info.hosted_by_launcher else [0],
    )


def _opened_again(info: LaunchInfo, job: str, deadline: Deadline) -> tuple[Store, _StoreAddress] | None:
    """A program that starts again may find rank 0's previous store while it closes: join the next one."""
    if info.rank == 0 or info.hosted_by_launcher or info.address is None:
        return None
    try:
        return _join(info, job, Deadline(min(_GRACE, deadline.left())))
    except RendezvousError:
        return None


def _open(info: LaunchInfo, job: str, port: int, deadline: Deadline) -> tuple[Store, _StoreAddress]:
    """Connect to one port. Raises OSError if nothing listens there yet, RendezvousError if something else does."""
    assert info.address is not None
    patience = min(_PROBE, deadline.left()) or 0.001
    # TCPStore logs a C++ stack trace for each refused connection, so test the port first.
    socket.create_connection((info.address, port), timeout=patience).close()
    store = _client(info.address, port, deadline.seconds)
    if store is None:
        raise RendezvousError(f"the service at {_StoreAddress(info.address, port)} is not a torch.distributed store")
    place = _StoreAddress(info.address, port)
    place.host = _recognize(store, info, job, place)
    return store, place


def _client(address: str, port: int, timeout: float) -> Store | None:
    """A client of the store, or None if the service is not a store.

    With a service that stays silent, TCPStore waits forever, whatever its timeout. On a separate thread, that costs
    only the thread.
    """
    result: list[Store | BaseException] = []

    def connect() -> None:
        try:
            result.append(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout)))
        except BaseException as error:
            result.append(error)

    start("ringway-connect", connect).join(_PROBE)
    if not result:
        return None
    if isinstance(result[0], DistError):
        raise OSError(str(result[0]).splitlines()[0])
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _agree_through_mpi(info: LaunchInfo, job: str, deadline: Deadline) -> tuple[Store, _StoreAddress]:
    """For several hosts and a launcher that gives no address: MPI itself sends rank 0's address to the others."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DiscoveryError(
            f"{info.source} started {info.size} ranks on several hosts but gives no address to meet at; "
            "set MASTER_ADDR and MASTER_PORT, or install mpi4py",
            source=info.source,
        ) from error
    world: Any = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (info.rank, info.size):
        raise DiscoveryError(
            f"{info.source} says rank {info.rank} of {info.size}, but mpi4py says {world.Get_rank()} of "
            f"{world.Get_size()}: it was built for another MPI",
            source=info.source,
        )
    listener = ports.listen(None, 0) if info.rank == 0 else None
    mine = (ports.own_address(), listener.getsockname()[1], os.urandom(16).hex()) if listener else None
    address, port, secret = world.bcast(mine, root=0)
    job += secret
    if listener is not None:
        store = host_store(listener, address, job, info.size, deadline.seconds)
        return store, _StoreAddress(address, port, _signature())
    known = LaunchInfo(rank=info.rank, size=info.size, source=info.source, address=address, port=port)
    return _join(known, job, deadline)


# --- recognize


def _recognize(store: Store, info: LaunchInfo, job: str, place: _StoreAddress) -> str:
    """Check that the store belongs to this job, and return its host."""
    mine = {"job": _digest(job), "size": info.size}
    if info.hosted_by_launcher and info.source != "ringway run":
        # torchrun's store does not name its job: the first rank to arrive writes it, and the others compare.
        claim = json.dumps({**mine, "host": "torchrun"})
        said = store.compare_set(_IDENTITY, "", claim)
    else:
        found = Deadline(_PROBE).poll(lambda: read(store, _IDENTITY))
        if found is None:
            raise RendezvousError(f"the store at {place} is not ringway's: it does not name its job")
        said = found
    try:
        theirs = json.loads(said)
        host = str(theirs["host"])
        matches = theirs["job"] == mine["job"]
        size = theirs["size"]
    except (ValueError, TypeError, KeyError):
        raise RendezvousError(f"the store at {place} names its job in an unknown format") from None
    if not matches:
        raise RendezvousError(f"the store at {place} belongs to another job, opened by {host}")
    if size != info.size:
        raise RendezvousError(
            f"the store at {place}, opened by {host}, expects {size} ranks, but rank {info.rank} was started as "
            f"one of {info.size}"
        )
    return host


# --- roll call


def _roll_call(store: Store, info: LaunchInfo, deadline: Deadline, place: _StoreAddress) -> Store:
    # A program may start, end and start again on a store that outlives it. Each start is a separate round, and
    # each rank counts its own.
    rounds = PrefixStore(f"ringway/attempt {info.attempt}", store)
    turn = rounds.add(f"rounds of rank {info.rank}", 1)
    me = _signature()
    if turn > 1:
        before = bytes(rounds.get(f"round {turn - 1}/rank {info.rank}")).decode()
        if before != me:
            raise RendezvousError(
                f"rank {info.rank} has arrived twice at {place}: first from {before}, now from {me}"
                + ("" if place.port else ". If the first was an earlier job, remove the file"),
                arrived={info.rank: before},
            )
    here = PrefixStore(f"round {turn}", rounds)
    here.set(f"rank {info.rank}", me)
    if here.add("arrived", 1) == info.size:
        here.compare_set("outcome", "", "all here")
    outcome = deadline.poll(lambda: read(here, "outcome"), _LONGEST_PAUSE)
    if outcome is None:
        outcome = here.compare_set("outcome", "", "gave up")
    if outcome == b"all here":
        return PrefixStore("job", here)
    arrived = _arrived(here, info.size)
    _leave(here, info, len(arrived))
    missing = sorted(set(range(info.size)) - set(arrived))
    raise RendezvousError(
        f"{len(arrived)} of {info.size} ranks met at {place} within {deadline.seconds:g} s. "
        f"Missing: {_ranges(missing)}. Arrived: "
        + "; ".join(f"{_ranges(ranks)} from {host}" for host, ranks in _by_host(arrived).items()),
        arrived=arrived,
        missing=missing,
    )


def _arrived(here: Store, size: int) -> dict[int, str]:
    found = ((rank, read(here, f"rank {rank}")) for rank in range(size))
    return {rank: bytes(signature).decode() for rank, signature in found if signature is not None}


def _leave(here: Store, info: LaunchInfo, arrived: int) -> None:
    """The store's host leaves last, so that all ranks that arrived can read which did not."""
    if info.rank != 0 or info.hosted_by_launcher:
        here.add("read the outcome", 1)
        return
    Deadline(FAREWELL).poll(lambda: True if here.add("read the outcome", 0) >= arrived - 1 else None)


def _by_host(arrived: dict[int, str]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, signature in arrived.items():
        hosts.setdefault(signature.rpartition(", pid ")[0], []).append(rank)
    return hosts


def _ranges(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return ("ranks " if len(ranks) > 1 else "rank ") + text
