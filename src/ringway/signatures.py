"""The signature lane: ranks of one host see at once that they call different things, on any backend.

Rank 0 of a group makes a segment (a memfd) and names it, with a token, in the group's corner of the store; the
others open it through /proc, which only processes of the same user on the same host can. A rank that cannot is
not compared, and its calls are only explained when they stall. The comparing is native (csrc/signatures.h).
"""

from __future__ import annotations

import json
import os
import secrets
import time
import weakref
from typing import Any

from ringway import _core
from ringway.backends.base import GroupInfo
from ringway.call import DTYPES, OPS, Reduce
from ringway.errors import CollectiveMismatch

_KEY = "ringway/signatures"
_PATIENCE = 60.0


class Offer:
    """Rank 0's end: the segment, kept open as long as the group may want it."""

    def __init__(self, info: GroupInfo) -> None:
        self.token = secrets.token_hex(16)
        self.fd = _core.create_signatures(info.size, self.token)
        weakref.finalize(self, os.close, self.fd)
        info.store.set(_KEY, json.dumps({"pid": os.getpid(), "fd": self.fd, "token": self.token}))


def offer(info: GroupInfo) -> Offer | None:
    """Before the backend is made, so that whoever has met the others finds it."""
    if info.rank != 0 or info.size == 1:
        return None
    try:
        return Offer(info)
    except Exception:  # without it calls are still explained when they stall
        return None


def join(info: GroupInfo, offered: Offer | None) -> _core.Signatures | None:
    """This rank's end of the lane, after the backend is made; None where it shares no host with rank 0."""
    if info.size == 1:
        return None
    try:
        if offered is not None:
            return _core.Signatures(offered.fd, info.rank, list(info.ranks), offered.token)
        return _open(info)
    except Exception:
        return None


def _open(info: GroupInfo) -> _core.Signatures | None:
    deadline = time.monotonic() + _PATIENCE
    while not info.store.check([_KEY]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)
    where: dict[str, Any] = json.loads(info.store.get(_KEY))
    fd = os.open(f"/proc/{int(where['pid'])}/fd/{int(where['fd'])}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _core.Signatures(fd, info.rank, list(info.ranks), where["token"])
    finally:
        os.close(fd)


def _describe(call: tuple[Any, ...]) -> str:
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


def _mismatch(group: str, fault: tuple[Any, ...] | None) -> CollectiveMismatch:
    if fault is None:
        return CollectiveMismatch(f"ranks of the group {group} called different things; the rank that saw it is gone")
    rank, own, other, theirs = fault
    sides = {rank: _describe(own), other: _describe(theirs)}
    lines = [f"ranks of the group {group} called different things; the group has ended"]
    lines += [f"  rank {side}: {sides[side]}" for side in sorted(sides)]
    return CollectiveMismatch("\n".join(lines), sides=sides, sequence=own[0])


_core.set_parted_error(_mismatch)
