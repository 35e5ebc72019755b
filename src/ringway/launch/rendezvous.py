"""All ranks meet at one store, or those that came learn which ranks did not.

1. Connect: rank 0 opens the store (or the launcher has), and the others find it.
2. Recognize (`identity.py`): the store names its job; that of another job, or of one with another secret, is refused.
3. Roll call (`roll_call.py`): each rank proves to all others that it belongs to the job. After a failure, rank 0 keeps
   the store open until all have read which ranks were missing.

Waits poll with growing pauses, so that Ctrl-C ends any of them, and all share one deadline.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from ringway.descriptors import is_shortage, shortage_named
from ringway.errors import DiscoveryError, RendezvousError, UsageError
from ringway.keys import Key
from ringway.launch import ports
from ringway.launch.attempts import Attempt, must_agree, of_agreed_attempt, of_this_attempt
from ringway.launch.discover import discover
from ringway.launch.identity import IDENTITY, TOKEN, Job, identity, job_key, recognize, signature
from ringway.launch.info import LaunchInfo
from ringway.launch.roll_call import Place, roll_call
from ringway.launch.run_store import RunStore
from ringway.launch.secret import job_secret
from ringway.launch.witness import RedisStore
from ringway.store import Deadline, KeyedStore, WatchedStore
from ringway.threads import start

_LONGEST_PAUSE = 0.25  # between attempts to reach a store that may not be open yet
_GRACE = 5.0  # time during which another job's store is assumed to be closing
_PROBE = 5.0  # time to connect to a responsive host and read what its store says about itself


def rendezvous(
    info: LaunchInfo, timeout: float, *, token: str = "", path: str | None = None, require_secret: bool = False
) -> Store:
    """Return the job's store once all ranks have arrived at it and proved that they have the job's secret.

    `token` is part of the job's identity, for launchers that give none. With `path`, the store is a file
    (`init_method="file://..."`).
    """
    if info.size == 1 and path is None:
        return HashStore()  # a single rank needs no port and no address
    with shortage_named("the rendezvous"):
        return _rendezvous(info, timeout, token, path, require_secret)


class LastingStore:
    """The store of a job whose ranks come and go. Every rank that signs up in it has the job's secret: the store is
    private, or what it holds is sealed. With `witness`, a URL, it is on that server (`witness.py`)."""

    def __init__(
        self,
        info: LaunchInfo,
        timeout: float,
        *,
        token: str = "",
        require_secret: bool = False,
        witness: str | None = None,
        key: Key | None = None,
    ) -> None:
        """`key` is that of the job's secret, if this process is no rank and does not find it where ranks do."""
        if key is None:
            job = Job.of(info, token, require_secret)
        else:
            job = Job(identity(info.job, token), job_key(key, info.job, token))
        info = replace(info, size=0)
        self._witness: RedisStore | None = None
        with shortage_named("the rendezvous"):
            if witness is None:
                self._inner, _, opened, job = _meet(info, job, Deadline(timeout))
            else:
                self._witness, opened = _at_witness(witness, info, job, timeout)
                self._inner = self._witness
        # torchrun on one host restarts all ranks, with a new secret. On several hosts, ranks that it restarts may find
        # others that live, so all attempts share one list of ranks.
        self._inner = of_this_attempt(self._inner)
        self.opened = opened
        """Tells this start of the job from others."""
        # A secret may be used again: what was sealed in another start of the job proves nothing here.
        self._key = job.key.derive("opened", opened)
        self.store = self._sealed(self._inner, self._key.derive("elastic"))

    def _sealed(self, store: Store, key: Key) -> Store:
        return store if self._key.open or isinstance(self._inner, RunStore) else KeyedStore(store, key)

    def keep(self) -> None:
        """Each rank that runs calls this often, so that the store outlives a long time without a change."""
        if self._witness is not None:
            self._witness.renew()

    def part(self, generation: str, members: str, watch: Callable[[], None]) -> WatchedStore:
        """The part of one generation of ranks. `members` tells this set of processes from any other, so its keys are
        new. `watch` raises if one of them is gone."""
        key = self._key.derive("generation", generation, members)
        return WatchedStore(self._sealed(PrefixStore(f"generation {generation}", self._inner), key), key, watch)


def _at_witness(url: str, info: LaunchInfo, job: Job, timeout: float) -> tuple[RedisStore, str]:
    if not job.name:
        raise UsageError(
            "a witness may serve several jobs, and nothing tells this one from others: set RINGWAY_JOB_TOKEN to a name "
            "of the job, the same on all its ranks"
        )
    try:
        store = RedisStore(url, job.digest, timeout)
        opened = recognize(store, info, job, Place(f"the witness {store}"), _patience(Deadline(timeout)))
    except DistError as error:
        raise RendezvousError(str(error)) from error
    _hosted[:] = [store]
    return store, opened


def _rendezvous(info: LaunchInfo, timeout: float, token: str, path: str | None, require_secret: bool) -> Store:
    deadline = Deadline(timeout)
    from_mpi = path is None and info.socket is None and info.address is None
    job = Job.of(info, token, require_secret and not from_mpi)
    if path is not None:
        if not os.path.isdir(os.path.dirname(path) or "."):  # FileStore would wait for it silently
            raise RendezvousError(f"the folder {os.path.dirname(path)!r} for the store's file {path} does not exist")
        place = Place(path, if_twice=". If the first was an earlier job, remove the file")
        file = FileStore(path, info.size)
        met = _roll_call(file, info, deadline, place, job.key, recognize(file, info, job, place, _patience(deadline)))
        job.all_have_met(info)
        return met
    store, place, opened, job = _meet(info, job, deadline)
    while True:
        try:
            attend = None
            if must_agree(info):
                attempt = Attempt(store, info.rank, info.size, job.key, deadline)
                info, attend = replace(info, attempt=attempt.number), attempt.attend
            met = _roll_call(store, info, deadline, place, job.key, opened, attend)
            job.all_have_met(info)
            return met
        except DistError as error:
            again = _opened_again(info, job, deadline)
            if again is not None and again[2] == opened:
                raise RendezvousError(
                    f"rank {info.rank}: its connection to the store at {place} broke during the rendezvous. The store "
                    "still answers, but the other ranks are in the round that this rank has left: start the job again",
                    arrived={info.rank: socket.gethostname()},
                ) from error
            if again is None:
                raise RendezvousError(
                    f"rank {info.rank}: the store at {place} disappeared during the rendezvous: its host, "
                    f"{_host_of_store(info)}, died or closed it",
                    arrived={info.rank: socket.gethostname()},
                    missing=[] if info.hosted_by_launcher else [0],
                ) from error
            store, place, opened = again


def _meet(info: LaunchInfo, job: Job, deadline: Deadline) -> tuple[Store, Place, str, Job]:
    """Connect to the job's store."""
    if info.socket is not None:
        return *_join_run(info, info.socket, job, deadline), job
    if info.address is None:
        return _agree_through_mpi(info, job, deadline)
    if info.rank == 0 and not info.hosted_by_launcher:
        return *_host(info, job, deadline), job
    return *_join(info, job, deadline), job


_roll_call = roll_call


def admit(
    store: Store, rank: int, size: int, group: str, timeout: float, *, require_secret: bool, lasting: bool = False
) -> Store:
    """A group's part of a store that ringway did not make, once its ranks have proved that they have the secret. The
    store itself if the job has none. A `lasting` store may hold what earlier attempts of the job have left.

    The host's file is left to its maker's exit: the group may be a part of the job, and others may still read it.
    """
    info = LaunchInfo(rank=rank, size=size, source="torch.distributed")
    try:
        launched = discover()
    except DiscoveryError:  # the store says where to meet, whatever the variables say
        launched = info
    key, _ = job_secret(launched, required=require_secret)
    job = Job(group, key.derive("group", group))
    if lasting:
        store = of_agreed_attempt(store, rank, size, timeout, job.key)
    if key.open:
        return store
    place = Place(f"the store of the group {group}")
    deadline = Deadline(timeout)
    return _roll_call(store, info, deadline, place, job.key, recognize(store, info, job, place, _patience(deadline)))


def host_store(listener: socket.socket, address: str, job: str, size: int, timeout: float) -> Store:
    """Open a store without a secret on a socket that already listens, and write its job into it."""
    return _open_store(listener, address, Job(job, Key()), size, timeout)[0]


def _open_store(listener: socket.socket, address: str, job: Job, size: int, timeout: float) -> tuple[Store, str]:
    port = listener.getsockname()[1]
    store = TCPStore(
        ports.loopback_number(address) if ports.is_loopback(address) else address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    opened = secrets.token_hex(16)
    store.set(IDENTITY, job.identity(size, signature(), opened))
    return store, opened


def _host_of_store(info: LaunchInfo) -> str:
    return "the launcher" if info.hosted_by_launcher else "rank 0"


# --- connect

_hosted: list[Store] = []
"""The store that this process opened last, or its client of the store of `ringway run`. It outlives its groups, because
ranks that leave later still use it, and the next start on the same port joins it again. torch's C++ code holds only the
C++ half of a store written in Python."""


_Met = tuple[Store, Place, str]
"""A store, where it is, and the nonce of the process that opened it."""


def _join_run(info: LaunchInfo, path: str, job: Job, deadline: Deadline) -> _Met:
    """The private store of `ringway run`."""
    place = Place(path)
    try:
        store = RunStore(path, job.key, deadline.seconds)
    except DistError as error:
        raise RendezvousError(
            f"{error}. The launcher has ended, or this rank has another secret or another {TOKEN} than the launcher"
        ) from error
    _hosted[:] = [store]
    return store, place, recognize(store, info, job, place, _patience(deadline))


def _host(info: LaunchInfo, job: Job, deadline: Deadline) -> _Met:
    assert info.address is not None
    offered = [info.port] if info.port is not None else ports.choices(job.name)
    for port in offered:
        try:
            listener = ports.listen(info.address, port)
        except OSError as error:
            if is_shortage(error):
                raise
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise RendezvousError(f"rank 0 cannot listen on port {port}: {error}") from error
            owner = ports.holder(port)
            if owner is not None and owner[0] == os.getpid() and info.port is not None:
                return _join(info, job, deadline)  # the store of an earlier start in this process
            if info.port is not None:
                raise RendezvousError(_taken(info.port, error, owner)) from error
            continue
        _check_way_back(info.address, port, deadline)
        store, opened = _open_store(listener, info.address, job, info.size, deadline.seconds)
        _hosted[:] = [store]
        return store, Place(info.address, port, signature()), opened
    raise RendezvousError(f"rank 0 found every port of {offered} taken; set MASTER_PORT to a free port")


def _check_way_back(address: str, port: int, deadline: Deadline) -> None:
    """The other ranks use this address. If rank 0 cannot reach itself there, the address is wrong or unroutable."""
    try:
        socket.create_connection((address, port), timeout=_patience(deadline)).close()
    except OSError as error:
        if is_shortage(error):
            raise
        raise RendezvousError(
            f"rank 0 on {socket.gethostname()} opened port {port}, but cannot reach it as "
            f"{Place(address, port)} ({error}); set MASTER_ADDR to an address of rank 0's host{_for_example()}"
        ) from error


def _patience(deadline: Deadline) -> float:
    """Seconds for one attempt to connect. 0 would not wait for the connection at all."""
    return min(_PROBE, deadline.left()) or 0.001


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


def _join(info: LaunchInfo, job: Job, deadline: Deadline) -> _Met:
    assert info.address is not None
    offered = [info.port] if info.port is not None else ports.choices(job.name)
    obstacles: dict[int, str] = {}
    grace: Deadline | None = None

    def attempt() -> _Met | None:
        nonlocal grace
        for port in offered:
            try:
                return _open(info, job, port, deadline)
            except OSError as error:
                if is_shortage(error):
                    raise
                obstacles[port] = str(error)
            except RendezvousError as error:
                obstacles[port] = str(error)
                # An earlier job may still be closing its store on the port that this job was given. One attempt may
                # take as long as the grace, so that begins with the first answer.
                grace = grace or Deadline(min(_GRACE, deadline.left()))
                if info.port is not None and grace.left() == 0:
                    raise
            except DistError as error:  # it disappeared while being queried
                obstacles[port] = str(error).splitlines()[0]
        return None

    found = deadline.poll(attempt, _LONGEST_PAUSE)
    if found is not None:
        return found
    where = str(Place(info.address, info.port)) + ("" if info.port is not None else f", ports {offered}")
    reasons = sorted(set(obstacles.values()))
    raise RendezvousError(
        f"rank {info.rank} of {info.size} on {socket.gethostname()}: no store at {where} within "
        f"{deadline.seconds:g} s, so its host, {_host_of_store(info)}, is missing ({'; '.join(reasons)})",
        arrived={info.rank: socket.gethostname()},
        missing=[] if info.hosted_by_launcher else [0],
    )


def _opened_again(info: LaunchInfo, job: Job, deadline: Deadline) -> _Met | None:
    """A program that starts again may find rank 0's previous store while it closes: join the next one."""
    if info.rank == 0 or info.hosted_by_launcher or info.address is None:
        return None
    try:
        return _join(info, job, Deadline(min(_GRACE, deadline.left())))
    except RendezvousError:
        return None


def _open(info: LaunchInfo, job: Job, port: int, deadline: Deadline) -> _Met:
    """Connect to one port. Raises OSError if nothing listens there yet, RendezvousError if something else does."""
    assert info.address is not None
    place = Place(info.address, port)
    # TCPStore logs a C++ stack trace for each refused connection, so test the port first.
    socket.create_connection((info.address, port), timeout=_patience(deadline)).close()
    patience = min(3 * _PROBE, deadline.left())
    store = _client(info.address, port, deadline.seconds, patience)
    if store is None:
        raise RendezvousError(
            f"the service at {place} is not a torch.distributed store, or too slow: it did not answer within "
            f"{patience:.2g} s"
        )
    return store, place, recognize(store, info, job, place, _patience(deadline))


def _client(address: str, port: int, timeout: float, patience: float) -> Store | None:
    """A client of the store, or None if the service does not answer like a store within `patience` seconds.

    With a service that stays silent, TCPStore waits forever, whatever its timeout. On a separate thread, that costs
    only the thread. A store may be slow too: both its ends ask the DNS for each other's names, and a lost reply costs
    them 5 s, a second one another 5 s.
    """
    result: list[Store | BaseException] = []

    def connect() -> None:
        try:
            result.append(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout)))
        except BaseException as error:
            result.append(error)

    start("ringway-connect", connect).join(patience)
    if not result:
        return None
    if isinstance(result[0], DistError):
        raise OSError(str(result[0]).splitlines()[0])
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _agree_through_mpi(info: LaunchInfo, job: Job, deadline: Deadline) -> tuple[Store, Place, str, Job]:
    """For several hosts and a launcher that gives no address: MPI itself sends rank 0's address to the others, and a
    secret if the user gave none."""
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
    own = ports.own_address() if info.rank == 0 else ""
    listener = ports.listen(own, 0) if info.rank == 0 else None
    mine = (own, listener.getsockname()[1], secrets.token_hex(32)) if listener else None
    address, port, secret = world.bcast(mine, root=0)
    if job.key.open:
        job = Job(job.name, Key.from_text(secret, "MPI"))
    if listener is not None:
        store, opened = _open_store(listener, address, job, info.size, deadline.seconds)
        return store, Place(address, port, signature()), opened, job
    known = LaunchInfo(rank=info.rank, size=info.size, source=info.source, address=address, port=port)
    return *_join(known, job, deadline), job
