"""The signature lane: ranks of one host see at once that they call different things, on any backend.

The first rank of each host that comes to a group makes a segment (a memfd) and names it, with a token, in the group's
corner of the store; its neighbours open it through /proc, which only processes of the same user on the same host can.
A rank that cannot counts as a host of its own. The comparing is native (csrc/record/signatures.h); ranks of different
hosts are compared through the store (compare/across_hosts.py).
"""

from __future__ import annotations

import json
import os
import secrets
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.backends.several.hosts import host_identity
from ringway.call import DTYPES, OPS, Reduce
from ringway.errors import CollectiveMismatch

_HOSTS = "ringway/signatures/hosts"
_SEATS_AT_LEAST = 64


class Offer:
    """A segment of this rank's, kept open as long as the group may want it."""

    def __init__(self, info: GroupInfo) -> None:
        self.token = secrets.token_hex(16)
        seats = min(info.size, max(_SEATS_AT_LEAST, 2 * (os.cpu_count() or 1)))
        self.fd = _core.create_signatures(info.size, seats, self.token)
        self._close = weakref.finalize(self, os.close, self.fd)

    def withdraw(self) -> None:
        self._close()

    @property
    def address(self) -> str:
        return json.dumps({"pid": os.getpid(), "fd": self.fd, "token": self.token})


def meet(info: GroupInfo) -> tuple[_core.Signatures | None, Offer | None]:
    """This rank's end of its host's lane, and the segment if this rank made it. Before the backend is made: whoever
    has met the others after that can ask whether the group `spans_hosts`."""
    if info.size == 1:
        return None, None
    try:
        return _meet(info)
    except Exception:  # without it calls are still compared across hosts, and explained when they stall
        with suppress(Exception):  # a store that is gone fails the backend, with a better message
            info.store.add(_HOSTS, 1)
        return None, None


def spans_hosts(info: GroupInfo) -> bool:
    """Whether the group has more lanes than one. After the backend is made, so that every rank has counted itself."""
    return info.size > 1 and int(info.store.add(_HOSTS, 0)) > 1


def _meet(info: GroupInfo) -> tuple[_core.Signatures | None, Offer | None]:
    key = f"ringway/signatures/{host_identity()}"
    joined = _open(info, info.store.get(key)) if info.store.check([key]) else None
    if joined is not None:
        return joined, None
    offer = Offer(info)
    stands = info.store.compare_set(key, "", offer.address)
    if stands.decode() != offer.address:  # a neighbour was quicker
        joined = _open(info, stands)
        if joined is not None:
            offer.withdraw()
            return joined, None
    info.store.add(_HOSTS, 1)
    return _core.Signatures(offer.fd, info.rank, list(info.ranks), offer.token), offer


def _open(info: GroupInfo, address: bytes) -> _core.Signatures | None:
    """The segment of a neighbour; None where it cannot be had, and this rank is a host of its own."""
    where = json.loads(address)
    try:
        fd = os.open(f"/proc/{int(where['pid'])}/fd/{int(where['fd'])}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _core.Signatures(fd, info.rank, list(info.ranks), where["token"])
    except RuntimeError:
        return None
    finally:
        os.close(fd)


def describe(call: tuple[Any, ...]) -> str:
    """all_reduce #3 (float32, 64 bytes, SUM) at train.py:8"""
    sequence, code, nbytes, dtype, reduce, peer, place = call
    op = OPS[code]
    facts = []
    if dtype < len(DTYPES):
        facts.append(str(DTYPES[dtype]).removeprefix("torch."))
    if op.name != "barrier":
        facts.append(f"{nbytes} bytes")
    if "reduce" in op.agree:
        facts.append(Reduce(reduce).name)
    if "root" in op.agree:
        facts.append(f"root {peer}")
    details = f" ({', '.join(facts)})" if facts else ""
    return f"{op.name} #{sequence}{details} at {place}"


def parted(group: str, sides: Mapping[int, str], sequence: int) -> CollectiveMismatch:
    """The error for ranks that called different things: `sides` by global rank."""
    lines = [f"ranks of the group {group} called different things; the group has ended"]
    lines += [f"  rank {side}: {sides[side]}" for side in sorted(sides)]
    return CollectiveMismatch("\n".join(lines), sides=sides, sequence=sequence)


def _parted(group: str, fault: tuple[Any, ...] | None) -> CollectiveMismatch:
    if fault is None:
        return CollectiveMismatch(f"ranks of the group {group} called different things; the rank that saw it is gone")
    rank, own, other, theirs = fault
    return parted(group, {rank: describe(own), other: describe(theirs)}, own[0])


_core.set_parted_error(_parted)
