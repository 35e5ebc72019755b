"""This process's MPI: one initialization, one lock, one end.

Every MPI call is short and is made under one lock, so MPI_THREAD_SERIALIZED is enough. Only the creation of a
communicator blocks inside MPI, and all its ranks have arrived by then.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringway.backends.base import GroupInfo
from ringway.backends.exchange import exchange
from ringway.backends.mpi import REMEDY
from ringway.call import Call
from ringway.errors import BackendUnavailable, CollectiveMismatch, CommTimeout, PeerLost, RingwayError
from ringway.launch.cpus import usable_cpus
from ringway.store import read

try:
    from mpi4py import MPI
except ImportError:
    raise
except RuntimeError as error:  # mpi4py is there, but the MPI library it was built for is not
    raise BackendUnavailable("mpi", str(error).splitlines()[0], remedy=REMEDY) from error

__all__ = [
    "LOCK",
    "MPI",
    "Departures",
    "abandon",
    "anything_abandoned",
    "connect",
    "cuda_aware",
    "finish",
    "left",
    "mapped",
    "pause",
]

LOCK = threading.RLock()

_SPIN_SECONDS = 0.002
_SPIN_RATE = 0.5e9
_NAP_LEAST = 20e-6
_NAP_MOST = 1e-3
_LOOK_AROUND = 0.01
"""Seconds after which a wait checks whether it can still succeed: ranks may have called different things."""
_LEAVE_SECONDS = 10.0
_LAST_WORDS = 0.5
"""Seconds for the launcher to print what a rank said before it ended the job: MPICH's drops the rest."""

# The variable that each launcher sets, and the MPI that understands it.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", "Open MPI"),
    ("PMI_SIZE", "a launcher that speaks PMI (MPICH's or Intel MPI's mpiexec, or Slurm)", "MPICH"),
)

_abandoned: list[tuple[Any, Any]] = []
"""Requests that were given up, with their buffers: MPI may still write to them."""

_rank_in_words = ""


class Departures:
    """Ranks that left the job without destroying a group. They say so in the group's store.

    To MPI, a rank that called sys.exit looks like a slow one: its MPI_Finalize waits for all ranks, and they for it.
    """

    _FIRST_LOOK = 2.0
    _EVERY = 1.0
    _GRACE = 5.0
    """Seconds in which a call may still end, if the rank did its part before it left."""

    def __init__(self, info: GroupInfo) -> None:
        self._info = info
        self._next_look = 0.0
        self._seen: tuple[float, int] | None = None
        _groups.add(self)

    def forget(self) -> None:
        """The group was destroyed: ranks may leave now."""
        _groups.discard(self)

    def tell(self) -> None:
        with suppress(Exception):  # the store may be gone; then the deadline ends the wait
            self._info.store.set(_LEFT, str(self._info.ranks[self._info.rank]))

    def missing(self, waited: float) -> int | None:
        """A rank that has left, if the call has waited long enough to ask."""
        now = time.monotonic()
        if waited < self._FIRST_LOOK or now < self._next_look:
            return None
        self._next_look = now + self._EVERY
        if self._seen is None:
            with suppress(Exception):
                rank = read(self._info.store, _LEFT)
                self._seen = None if rank is None else (now, int(rank))
        return self._seen[1] if self._seen is not None and now - self._seen[0] > self._GRACE else None


_LEFT = "ringway/mpi/left"
_groups: set[Departures] = set()


def left(call: Call, rank: int) -> PeerLost:
    return PeerLost(
        f"{call.describe()} waits for rank {rank}, which has left the job without destroying the group", rank=rank
    )


def library() -> str:
    """The MPI library in one line."""
    return str(MPI.Get_library_version()).split("\n", 1)[0].split(",", 1)[0].strip().rstrip("\0")


def require_threads() -> None:
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise BackendUnavailable(
            "mpi",
            f"MPI was initialized with thread level {level}, and a progress thread needs MPI_THREAD_SERIALIZED",
            remedy="Do not set mpi4py.rc.threads = False, and initialize MPI with MPI_THREAD_MULTIPLE",
        )


def connect(info: GroupInfo, whole_world: bool) -> Any:
    """A communicator of the group's members in the group's order. torch and MPI may number the ranks differently, so
    the ranks exchange their MPI ranks."""
    require_threads()
    mine, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    said = [tuple(map(int, text.split())) for text in exchange(info, "mpi", f"{mine} {size}".encode())]
    check_worlds(said, info, whole_world)
    global _rank_in_words
    if whole_world:
        _rank_in_words = f"rank {info.rank}"
    with LOCK:
        members = MPI.COMM_WORLD.Get_group().Incl([rank for rank, _ in said])
        # The tag distinguishes groups that share ranks and are made at the same time.
        tag = zlib.crc32(info.name.encode()) % 32768
        communicator = MPI.COMM_WORLD.Create_group(members, tag)
        members.Free()
    return communicator


def check_worlds(said: list[tuple[int, ...]], info: GroupInfo, whole_world: bool) -> None:
    """Checks that the MPI world contains the group. `said` has each member's MPI rank and MPI world size."""
    sizes = {size for _, size in said}
    ranks = [rank for rank, _ in said]
    if sizes == {1} and info.size > 1:
        raise BackendUnavailable(
            "mpi",
            f"each of the group's {info.size} ranks is an MPI world of its own ({library()})" + _foreign_launcher(),
            remedy=f"Start with the mpiexec of that MPI: mpiexec -n {info.size} python script.py",
        )
    if len(sizes) > 1 or len(set(ranks)) < len(ranks):
        raise BackendUnavailable(
            "mpi",
            f"the group's ranks are in different MPI worlds (their MPI ranks are {ranks}, the sizes of their "
            f"worlds {[size for _, size in said]})",
            remedy="Start all ranks with one mpiexec",
        )
    if whole_world and sizes != {info.size}:
        raise BackendUnavailable(
            "mpi",
            f"the MPI world has {sizes.pop()} ranks, and the torch world {info.size}",
            remedy="Start as many ranks with mpiexec as WORLD_SIZE, --nproc or world_size say, or leave those out",
        )


def _foreign_launcher() -> str:
    """mpi4py was built for one MPI and started by another's launcher: every rank is alone in its world."""
    for variable, launcher, speaks in _LAUNCHERS:
        size = os.environ.get(variable, "")
        if size.isdigit() and int(size) > 1 and speaks not in library():
            return f", though {launcher} started {size} (it set {variable}): mpi4py was built for another MPI"
    return ""


def pause(waited: float, nbytes: int) -> None:
    """Pauses between two polls of a request. Spins for as long as the data may take, if every rank here has a core.
    Then sleeps for an eighth of the time waited so far, so that idle ranks yield."""
    if waited < _SPIN_SECONDS + nbytes / _SPIN_RATE:
        if _crowded():
            time.sleep(_NAP_LEAST)
        else:
            os.sched_yield()
    else:
        time.sleep(min(max(waited / 8, _NAP_LEAST), _NAP_MOST))


@functools.cache
def _crowded() -> bool:
    """Whether this host has more ranks than cores, as far as the launcher says. Only the pace depends on it."""
    said = os.environ.get("MPI_LOCALNRANKS") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or ""
    local = int(said) if said.isdigit() else MPI.COMM_WORLD.Get_size()
    return local > usable_cpus()


def abandon(request: Any, keep: Any, *, cancel: bool = False) -> None:
    """Gives a request up. MPI can cancel a receive, but nothing else."""
    if cancel:
        with LOCK:
            request.Cancel()
    _abandoned.append((request, keep))


def anything_abandoned() -> bool:
    return bool(_abandoned)


def finish(
    request: Any, call: Call, deadline: float, closed: Callable[[], bool], departures: Departures, keep: Any
) -> None:
    """Waits for a request until the deadline. Ctrl-C and a rank that leaves end the wait too. `keep` holds buffers that
    must live as long as MPI may use them."""
    began = time.monotonic()
    try:
        while True:
            with LOCK:
                if request.Test():
                    return
            waited = time.monotonic() - began
            if began + waited > deadline:
                raise CommTimeout(
                    f"{call.describe()} timed out after {waited:.1f} s",
                    op=call.op.name,
                    sequence=call.sequence,
                    waited=waited,
                )
            if closed():
                raise RingwayError(f"{call.describe()} ended: its group {call.group} was destroyed")
            if waited > _LOOK_AROUND and call.check is not None:
                call.check()
            missing = departures.missing(waited)
            if missing is not None:
                raise left(call, missing)
            pause(waited, call.nbytes)
    except MPI.Exception as error:
        raise mapped(error, call) from None
    except BaseException:
        abandon(request, keep)
        raise


def mapped(error: Any, call: Call) -> RingwayError:
    """MPI's error as one of ringway's."""
    text = str(error).strip()
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return CollectiveMismatch(f"{call.describe()}: another rank sent more than this rank expects ({text})")
    return RingwayError(f"{call.describe()} failed in MPI: {text}")


def cuda_aware() -> bool:
    """Whether the MPI library says that it accepts pointers to GPU memory."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libmpi" in line}
    for path in sorted(paths):
        if re.search(r"libmpi(ch)?\.so", path):
            query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
            if query is not None:
                return bool(query())
    return False


def _leave() -> None:
    """Ends this process's MPI. MPI_Finalize waits for all ranks: a rank that failed, or that left others in a
    collective, would hang there and they with it. So it ends the job instead."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    error = getattr(sys, "last_value", None)
    if error is not None and MPI.COMM_WORLD.Get_size() > 1:
        _abort(f"ends by an uncaught {type(error).__name__}: {error}")
    for group in list(_groups):
        group.tell()
    deadline = time.monotonic() + _LEAVE_SECONDS
    while _abandoned and time.monotonic() < deadline:
        _abandoned[:] = [(request, keep) for request, keep in _abandoned if not request.Test()]
        time.sleep(0.01)
    if _abandoned and MPI.COMM_WORLD.Get_size() > 1:
        _abort(f"leaves {len(_abandoned)} collectives behind that other ranks never came to")
    with LOCK:
        MPI.Finalize()


def _abort(why: str) -> None:
    who = _rank_in_words or f"MPI rank {MPI.COMM_WORLD.Get_rank()}"
    print(f"ringway: {who} {why}; ending the MPI job", file=sys.stderr, flush=True)
    sys.stdout.flush()
    time.sleep(_LAST_WORDS)
    MPI.COMM_WORLD.Abort(1)
    os._exit(1)  # some MPIs only ask their launcher to end the job


def _forget_in_child() -> None:
    """A forked child is no MPI process: its exit must not finalize its parent's MPI."""
    atexit.unregister(_leave)


atexit.register(_leave)
os.register_at_fork(after_in_child=_forget_in_child)
