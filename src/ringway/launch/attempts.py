"""Which attempt of a restarted job this is. torchrun keeps one store for all attempts, in which a restarted rank must
not read what dead ranks have left.

On one host, torchrun's count of restarts names the attempt. On several hosts each agent counts the failures of its own
ranks only, so the ranks agree: rank 0 takes the next number, and gives it to each rank that asks. A rank asks with a
fresh nonce, which only a living rank 0 can answer, so no rank takes the number of an earlier attempt.
"""

from __future__ import annotations

import os
import secrets
import socket

from torch._C._distributed_c10d import PrefixStore, Store

from ringway.errors import DiscoveryError, RendezvousError
from ringway.keys import Key
from ringway.launch.info import LaunchInfo
from ringway.launch.sources import from_torchrun
from ringway.store import Deadline, KeyedStore, read

_LONGEST_PAUSE = 0.1


class Attempt:
    """The attempt that the ranks at one store agree on."""

    def __init__(self, store: Store, rank: int, size: int, key: Key, deadline: Deadline) -> None:
        part = PrefixStore("ringway/attempts", store)
        self._store: Store = part if key.open else KeyedStore(part, key.derive("attempts"))
        self._rank = rank
        self._others = list(range(1, size))
        self._answered: set[bytes] = set()
        self.number = int(self._store.add("latest", 1)) if rank == 0 else self._ask(deadline)

    def _ask(self, deadline: Deadline) -> int:
        nonce = secrets.token_hex(16)
        self._store.set(f"question of rank {self._rank}", nonce)
        answer = deadline.poll(lambda: read(self._store, f"answer to {nonce}"), _LONGEST_PAUSE)
        if answer is None:
            raise RendezvousError(
                f"rank {self._rank} on {socket.gethostname()}: rank 0 did not come to the launcher's store within "
                f"{deadline.seconds:g} s",
                arrived={self._rank: socket.gethostname()},
                missing=[0],
            )
        try:
            number = int(answer)
        except ValueError:
            raise RendezvousError(
                f"rank {self._rank}: a stranger changed the launcher's store: it numbers this attempt {answer[:40]!r}"
            ) from None
        self._store.set(_followed(number, self._rank), "")
        return number

    def attend(self) -> bool:
        """Rank 0 answers those that have asked so far. Whether all ranks have the number."""
        if self._rank != 0 or self._store.check([_followed(self.number, rank) for rank in self._others]):
            return True
        for rank in self._others:
            nonce = read(self._store, f"question of rank {rank}")
            if nonce is not None and nonce not in self._answered:
                self._answered.add(nonce)
                self._store.set(f"answer to {nonce.decode(errors='replace')}", str(self.number))
        return False


def _followed(number: int, rank: int) -> str:
    return f"rank {rank} is in attempt {number}"


def must_agree(info: LaunchInfo) -> bool:
    """Whether the ranks must agree on their attempt: the store outlives it, and its number is not known."""
    return info.hosted_by_launcher and info.socket is None and not info.on_one_host


def of_this_attempt(store: Store) -> Store:
    """The part of a store that belongs to this attempt, if torchrun counts it."""
    launched = _torchrun()
    if launched is None or launched.attempt == 0 or not launched.hosted_by_launcher:
        return store
    return PrefixStore(f"ringway/attempt {launched.attempt}", store)


def of_agreed_attempt(store: Store, rank: int, size: int, timeout: float, key: Key) -> Store:
    """The part of a group's store that belongs to this attempt. Every rank of the group calls this."""
    launched = _torchrun()
    if launched is None or not must_agree(launched):
        return of_this_attempt(store)
    deadline = Deadline(timeout)
    attempt = Attempt(store, rank, size, key, deadline)
    if deadline.poll(lambda: attempt.attend() or None, _LONGEST_PAUSE) is None:
        raise RendezvousError(
            f"rank 0 waited {timeout:g} s for the other {size - 1} ranks of a group, and not all came"
        )
    return PrefixStore(f"ringway/attempt {attempt.number}", store)


def _torchrun() -> LaunchInfo | None:
    try:
        return from_torchrun(os.environ)
    except DiscoveryError:  # the program set variables itself
        return None
