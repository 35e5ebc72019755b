"""The processes that this one shares memory with.

All groups of a process use one descriptor (a pidfd) for each of them: 64 groups of 256 ranks need 256 pidfds.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as c10d

import ringway._core as _core
from ringway.descriptors import is_shortage
from ringway.launch.processes import pid_namespace
from ringway.store import read


class KnownPeers:
    """This process's name for the others, and those of which it has a pidfd. Part of `Process`."""

    def __init__(self) -> None:
        self.own = secrets.token_hex(8)
        self._by_name: weakref.WeakValueDictionary[str, _core.ShmPeer] = weakref.WeakValueDictionary()
        self._by_rank: weakref.WeakValueDictionary[int, _core.ShmPeer] = weakref.WeakValueDictionary()

    def get(self, name: str) -> _core.ShmPeer | None:
        return self._by_name.get(name)

    def add(self, name: str, pid: int, pidfd: int) -> _core.ShmPeer:
        """Owns `pidfd` from now on; a second one for the same process is closed."""
        known = self._by_name.get(name)
        if known is None:
            known = self._by_name[name] = _core.ShmPeer(pid, pidfd)
        elif pidfd >= 0:
            os.close(pidfd)
        return known

    def joined(self, ranks: Sequence[int], peers: Sequence[_core.ShmPeer]) -> None:
        """This process is in a group of these global ranks. As long as the group exists, no other process can take one
        of its ranks, so a group with a rank that has ended can no longer form."""
        self._by_rank.update(zip(ranks, peers, strict=True))

    def has(self, rank: int) -> bool:
        """Whether the process of this global rank is known."""
        return rank in self._by_rank

    def pid_if_dead(self, rank: int) -> int | None:
        """The pid of a global rank that is known to have ended."""
        peer = self._by_rank.get(rank)
        return peer.pid if peer is not None and peer.pidfd >= 0 and has_ended(peer.pidfd) else None


def own_pidfd() -> int:
    """A descriptor that shows the end of this process, or -1 where the kernel has none."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError) as error:
        if is_shortage(error):
            raise
        return -1


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class Presence:
    """What ranks post in the group's store before they wait for each other: their pid, or why they do not come. So a
    rank that fails on the way is noticed, not only missed at the deadline."""

    def __init__(self, store: c10d.Store) -> None:
        self._store = store

    def post(self, rank: int) -> None:
        self._store.set(_key(rank), json.dumps([os.getpid(), pid_namespace()]))

    def refuse(self, rank: int, why: dict[str, Any]) -> None:
        """The rank does not come. The first rank that reads why withdraws it."""
        self._store.set(_key(rank), json.dumps(why))

    def withdraw(self, rank: int) -> None:
        self._store.delete_key(_key(rank))

    def of(self, rank: int) -> tuple[int | None, dict[str, Any] | None]:
        """The pid that a rank of the group posted, if that process has ended; and why the rank does not come."""
        posted = read(self._store, _key(rank))
        found = None if posted is None else json.loads(posted)
        return (None, found) if isinstance(found, dict) else (found and _pid_if_dead(*found), None)


def _pid_if_dead(pid: int, namespace: str) -> int | None:
    if namespace != pid_namespace():
        return None  # the same number is another process here
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return pid
    except (AttributeError, OSError):
        return None
    try:
        return pid if has_ended(pidfd) else None
    finally:
        os.close(pidfd)


def _key(rank: int) -> str:
    return f"shm/pid/{rank}"
