"""The call board: ranks of one host learn at once, on any backend, that they called different things.

The first rank of each host that joins a group creates a board (a memfd) and puts its address, with a token, into the
group's store. The host's other ranks open it through /proc, which works only for processes of the same user on the
same host. A rank that cannot open it counts as a host of its own. The comparison itself is native
(csrc/record/call_board.h). Ranks of different hosts are compared through the store (compare/across_hosts.py).
"""

from __future__ import annotations

import json
import os
import secrets
import weakref
from contextlib import suppress
from typing import Any

import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.backends.several.hosts import host_identity
from ringway.call import DTYPES, OPS, Reduce, describe_call
from ringway.errors import CollectiveMismatch, mismatch_error
from ringway.store import key_of, read

_BOARDS = "ringway/call boards"
_SEATS_AT_LEAST = 64


class HostBoard:
    """A board that this rank created. It stays open as long as a rank of the group may still want to join it."""

    def __init__(self, info: GroupInfo) -> None:
        self.token = secrets.token_hex(16)
        seats = min(info.size, max(_SEATS_AT_LEAST, 2 * (os.cpu_count() or 1)))
        self.fd = _core.create_call_board(info.size, seats, self.token)
        self.address = json.dumps(
            {"pid": os.getpid(), "fd": self.fd, "token": key_of(info.store).hide(_BOARDS, self.token)}
        )
        self._close = weakref.finalize(self, os.close, self.fd)

    def withdraw(self) -> None:
        self._close()


def join_board(info: GroupInfo) -> tuple[_core.CallBoard | None, HostBoard | None]:
    """This rank's seat at its host's board, and the board itself if this rank created it.

    Call it before the backend is made. Making the backend waits for all ranks, so `spans_hosts` is known after that.
    """
    if info.size == 1:
        return None, None
    try:
        return _join_board(info)
    except Exception:  # without a board, calls are still compared across hosts, and explained when they stall
        with suppress(Exception):  # if the store is gone, the backend fails with a better message
            info.store.add(_BOARDS, 1)
        return None, None


def spans_hosts(info: GroupInfo) -> bool:
    """Whether the group has more than one board. Call it after the backend is made: every rank has joined by then."""
    return info.size > 1 and int(info.store.add(_BOARDS, 0)) > 1


def _join_board(info: GroupInfo) -> tuple[_core.CallBoard | None, HostBoard | None]:
    key = f"ringway/call board/{host_identity()}"
    offered = read(info.store, key)
    joined = None if offered is None else _open(info, offered)
    if joined is not None:
        return joined, None
    board = HostBoard(info)
    stored = info.store.compare_set(key, "", board.address)
    if stored.decode() != board.address:  # another rank of this host was faster
        joined = _open(info, stored)
        if joined is not None:
            board.withdraw()
            return joined, None
    info.store.add(_BOARDS, 1)
    return _core.CallBoard(board.fd, info.rank, list(info.ranks), board.token), board


def _open(info: GroupInfo, address: bytes) -> _core.CallBoard | None:
    """Another rank's board; None if it cannot be opened, and this rank counts as a host of its own."""
    where = json.loads(address)
    try:
        fd = os.open(f"/proc/{int(where['pid'])}/fd/{int(where['fd'])}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        token = key_of(info.store).reveal(_BOARDS, where["token"])
        return _core.CallBoard(fd, info.rank, list(info.ranks), token)
    except RuntimeError:
        return None
    finally:
        os.close(fd)


def describe_posted(group: str, call: tuple[Any, ...]) -> str:
    """A call in words, from the facts that ranks compare. The root is a global rank."""
    sequence, op, nbytes, dtype, reduce, root, place = call
    return describe_call(
        OPS[op],
        sequence,
        dtype=DTYPES[dtype] if dtype < len(DTYPES) else None,
        nbytes=nbytes,
        reduce=Reduce(reduce),
        peer=root,
        group=group,
        place=place,
    )


def board_error(group: str, fault: tuple[Any, ...] | None) -> CollectiveMismatch:
    if fault is None:
        return CollectiveMismatch(
            f"ranks of the group {group} called different things; the rank that found out exited before it said more"
        )
    rank, own, other, theirs = fault
    return mismatch_error(group, {rank: describe_posted(group, own), other: describe_posted(group, theirs)}, own[0])
