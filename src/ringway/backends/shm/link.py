"""Messages between two ranks that join a group: JSON and descriptors over a unix socket."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ringway.descriptors import limit, shortage
from ringway.errors import BackendUnavailable, RendezvousError, RingwayError
from ringway.store import Deadline

FDS_A_MESSAGE = 200
"""Descriptors in one message. The receiver confirms each message before the next one is sent, so
no more than these are in flight: the kernel limits what a user has in flight to `ulimit -n`."""

_MOST_FDS = 253
"""The kernel's limit for one message. With room for all, truncation means that this process may open no more."""
_MESSAGE_BYTES = 64 << 10
_RETRY_SECONDS = 0.002


def send(
    link: socket.socket, message: dict[str, Any], fds: Sequence[int] = (), deadline: Deadline | None = None
) -> None:
    """If too many descriptors of this user are in flight, waits until others have received theirs."""
    data = [json.dumps(message).encode()]
    while True:
        try:
            socket.send_fds(link, data, list(fds))
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            if deadline is None or deadline.left() == 0:
                raise _too_many_in_flight() from None
            time.sleep(_RETRY_SECONDS)


def receive(link: socket.socket, deadline: Deadline, rank: int | None) -> tuple[dict[str, Any], list[int]]:
    """The other end's next message, and its descriptors. `rank` is the other end's global rank, if it is known."""
    who, missing = ("a process that connected", []) if rank is None else (f"rank {rank}", [rank])
    link.settimeout(deadline.left() or 0.001)
    fds = array.array("i")
    try:
        # Not socket.recv_fds, which drops the flag: a program that this one starts must inherit nothing.
        room = socket.CMSG_LEN(_MOST_FDS * fds.itemsize)
        try:
            data, extra, flags, _ = link.recvmsg(_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # it closed without reading all; why it did so may be here, after the reset
            data, extra, flags, _ = link.recvmsg(_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise RendezvousError(
            f"{who} connected to share memory, but then stopped responding", missing=missing
        ) from None
    except OSError as error:
        raise RendezvousError(f"{who} ended while the group met ({error})", missing=missing) from None
    for _, _, part in extra:
        fds.frombytes(part[: len(part) // fds.itemsize * fds.itemsize])
    try:
        if not data:
            raise RendezvousError(f"{who} ended while the group met", missing=missing)
        message = _parsed(data)
        if flags & socket.MSG_CTRUNC:  # the kernel closed those for which this process has no number left
            raise no_descriptors(message.get("descriptors", 1))
        return message, list(fds)
    except BaseException:
        close(fds)
        raise


def _parsed(data: bytes) -> dict[str, Any]:
    """Raises ValueError for anything but a message: other processes of this user may connect too."""
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def ask(link: socket.socket, deadline: Deadline, rank: int) -> dict[str, Any]:
    """The other end's next message, which has no descriptors. Raises the error that it may report instead."""
    message, fds = receive(link, deadline, rank)
    close(fds)
    if "error" in message:
        raise error_in({**message, "error": f"rank {rank}: {message['error']}"})
    return message


def no_descriptors(needed: int, error: OSError | None = None) -> BackendUnavailable:
    reason, remedy = shortage(needed, "the group", error)
    return BackendUnavailable("shm", reason, remedy=remedy)


def _too_many_in_flight() -> BackendUnavailable:
    return BackendUnavailable(
        "shm",
        f"other processes of this user keep {limit()} descriptors in flight, which is the limit (ulimit -n)",
        remedy="Raise it: ulimit -n, LimitNOFILE=, docker's --ulimit nofile=",
    )


def in_words(error: BaseException) -> dict[str, Any]:
    """An error, for the other ranks to raise as well."""
    if isinstance(error, BackendUnavailable):
        return {"error": error.reason, "remedy": error.remedy, "unavailable": True}
    missing = error.missing if isinstance(error, RendezvousError) else []
    return {"error": str(error), "missing": missing, "unavailable": False}


def error_in(reported: dict[str, Any]) -> RingwayError:
    if reported["unavailable"]:
        return BackendUnavailable("shm", reported["error"], remedy=reported["remedy"])
    return RendezvousError(reported["error"], missing=reported["missing"])


def close(fds: Iterable[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
