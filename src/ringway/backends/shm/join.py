"""How the ranks of a group come to share a segment.

Rank 0 makes the segment, a memfd, listens on an abstract unix socket, and puts the socket's name and a token into the
group's store. The others connect, which proves that they are on the same host and in the same network namespace. Both
ends check the other's credentials, so all run as the same user. The token proves that they belong to the group. Each
hands over a descriptor of its own process, and gets the segment and the descriptors of all. No rank begins before every
rank has mapped the segment. Nothing has a name in a file system, so nothing is left behind, however the ranks end.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as c10d

import ringway._core as _core
from ringway.errors import BackendUnavailable, RendezvousError
from ringway.store import Deadline, read

_KEY = "shm/meeting"
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: Linux's struct ucred
_MESSAGE_BYTES = 64 << 10
_FDS_A_MESSAGE = 200  # the kernel takes 253
_PATIENCE = 300.0
"""Seconds for a group to meet: its ranks have just talked through the store, so none is far behind."""


Group = TypeVar("Group")


@dataclass
class SharedSegment:
    """What a rank gets. The descriptors are its own; -1 where the kernel has no pidfds. `cpus` are those that any rank
    of the group may run on."""

    fd: int
    pids: list[int]
    pidfds: list[int]
    cpus: set[int] = field(default_factory=lambda: set(os.sched_getaffinity(0)))

    def close(self) -> None:
        _close([self.fd, *self.pidfds])


def share_segment(
    store: c10d.Store, rank: int, size: int, timeout: float, attach: Callable[[SharedSegment], Group]
) -> Group:
    """Every rank of the group calls this. All get what their `attach` makes of the same segment, or all raise."""
    if size > _core.SHM_MAX_RANKS:
        raise BackendUnavailable("shm", f"a group of {size} ranks is larger than its limit of {_core.SHM_MAX_RANKS}")
    deadline = Deadline(min(timeout, _PATIENCE))
    if rank == 0:
        return _host(store, size, deadline, attach)
    return _join(store, rank, size, deadline, attach)


# Rank 0's side


def _host(store: c10d.Store, size: int, deadline: Deadline, attach: Callable[[SharedSegment], Group]) -> Group:
    try:
        fd = _core.shm_create_segment(size)
    except MemoryError as error:
        store.set(_KEY, json.dumps({"error": str(error)}))
        raise _no_memory(str(error)) from None
    segment = SharedSegment(fd, [os.getpid()] + [0] * (size - 1), [_own_pidfd()] + [-1] * (size - 1))
    members: dict[int, socket.socket] = {}
    try:
        if size > 1:
            _gather(store, segment, members, deadline)
        for member in members.values():
            _send_segment(member, segment)
        answers = {rank: _read(member, deadline, f"rank {rank}") for rank, member in members.items()}
        for rank, answer in answers.items():
            if "error" in answer:
                raise _error_in({**answer, "error": f"rank {rank}: {answer['error']}"})
        group = _attached(segment, attach)
        for member in members.values():
            _send(member, {"go": True})
    except BaseException as error:
        for member in members.values():
            with contextlib.suppress(OSError):
                _send(member, _in_words(error))
        segment.close()
        raise
    finally:
        for member in members.values():
            member.close()
    return group


def _gather(store: c10d.Store, segment: SharedSegment, members: dict[int, socket.socket], deadline: Deadline) -> None:
    """Accepts the other ranks, each with its descriptor."""
    size = len(segment.pids)
    name, token = f"ringway-shm-{secrets.token_hex(16)}", secrets.token_hex(32)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen(size)
        store.set(_KEY, json.dumps({"name": name, "token": token}))
        while len(members) < size - 1:
            missing = [rank for rank in range(1, size) if rank not in members]
            try:
                member = _accept(listener, deadline)
            except TimeoutError:
                raise RendezvousError(
                    f"rank {', '.join(map(str, missing))} of {size} did not come to share memory with rank 0 in time",
                    missing=missing,
                ) from None
            if not _same_user(member):
                member.close()
                continue
            hello, fds = _receive(member, deadline, "a rank that connected")
            rank = hello.get("rank")
            if not hmac.compare_digest(str(hello.get("token")), token) or rank not in missing:
                _close(fds)
                member.close()
                continue
            segment.pids[rank] = int(hello["pid"])
            segment.pidfds[rank] = fds[0] if fds else -1
            segment.cpus |= set(hello["cpus"])
            members[rank] = member


def _accept(listener: socket.socket, deadline: Deadline) -> socket.socket:
    listener.settimeout(deadline.left() or 0.001)
    connection, _ = listener.accept()
    return connection


def _send_segment(member: socket.socket, segment: SharedSegment) -> None:
    """Sends the memfd and the pidfds, in as many messages as they need."""
    have = [rank for rank, fd in enumerate(segment.pidfds) if fd >= 0]
    parts = [have[at : at + _FDS_A_MESSAGE] for at in range(0, len(have), _FDS_A_MESSAGE)] or [[]]
    for index, ranks in enumerate(parts):
        fds = [segment.pidfds[rank] for rank in ranks] + ([segment.fd] if index == 0 else [])
        reported = {"pids": segment.pids, "cpus": sorted(segment.cpus), "ranks": ranks, "more": index + 1 < len(parts)}
        _send(member, reported, fds)


# The others' side


def _join(
    store: c10d.Store, rank: int, size: int, deadline: Deadline, attach: Callable[[SharedSegment], Group]
) -> Group:
    said = deadline.poll(lambda: read(store, _KEY))
    if said is None:
        raise RendezvousError("rank 0 did not make the group's shared segment in time", missing=[0])
    meeting = json.loads(said)
    if "error" in meeting:
        raise _no_memory(meeting["error"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        try:
            link.connect("\0" + meeting["name"])
        except OSError as error:
            raise BackendUnavailable(
                "shm", f"rank {rank} cannot reach rank 0's socket ({error}): they are not on one host"
            ) from None
        if not _same_user(link):
            raise BackendUnavailable("shm", "rank 0 runs as another user")
        own = _own_pidfd()
        hello = {"token": meeting["token"], "rank": rank, "pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0))}
        _send(link, hello, [own] if own >= 0 else [])
        _close([own])
        segment = _receive_segment(link, size, deadline)
        try:
            group = _attached(segment, attach)
        except BaseException as error:
            segment.close()
            with contextlib.suppress(OSError):
                _send(link, _in_words(error))
            raise
        _send(link, {"ok": True})
        answer = _read(link, deadline, "rank 0")
        if "error" in answer:
            raise _error_in(answer)
        return group


def _receive_segment(link: socket.socket, size: int, deadline: Deadline) -> SharedSegment:
    segment = SharedSegment(-1, [0] * size, [-1] * size)
    more = True
    while more:
        part, fds = _receive(link, deadline, "rank 0")
        if "error" in part:
            segment.close()
            raise _error_in(part)
        segment.pids = list(part["pids"])
        segment.cpus = set(part["cpus"])
        for rank, fd in zip(part["ranks"], fds, strict=False):
            segment.pidfds[rank] = fd
        if len(fds) > len(part["ranks"]):
            segment.fd = fds[-1]
        more = bool(part["more"])
    return segment


# Both


def _no_memory(reason: str) -> BackendUnavailable:
    return BackendUnavailable("shm", reason, remedy="Raise the memory limit of the job or its container")


def _attached(segment: SharedSegment, attach: Callable[[SharedSegment], Group]) -> Group:
    """The group, which owns the segment's descriptors from now on."""
    try:
        group = attach(segment)
    except MemoryError as error:
        raise _no_memory(str(error)) from None
    segment.fd, segment.pidfds = -1, []
    return group


def _in_words(error: BaseException) -> dict[str, Any]:
    """An error, for the other ranks to raise as well."""
    if isinstance(error, BackendUnavailable):
        return {"error": error.reason, "unavailable": True}
    return {"error": str(error), "unavailable": False}


def _error_in(reported: dict[str, Any]) -> BackendUnavailable | RendezvousError:
    return _no_memory(reported["error"]) if reported["unavailable"] else RendezvousError(reported["error"])


def _own_pidfd() -> int:
    """A descriptor that shows the end of this process, or -1 where the kernel has none."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1


def _same_user(link: socket.socket) -> bool:
    _, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


def _send(link: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    socket.send_fds(link, [json.dumps(message).encode()], list(fds))


def _receive(link: socket.socket, deadline: Deadline, who: str) -> tuple[dict[str, Any], list[int]]:
    link.settimeout(deadline.left() or 0.001)
    fds = array.array("i")
    try:
        # Not socket.recv_fds, which drops the flag: a program that this one starts must inherit nothing.
        room = socket.CMSG_LEN((_FDS_A_MESSAGE + 1) * fds.itemsize)
        data, extra, _, _ = link.recvmsg(_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise RendezvousError(f"{who} connected to share memory, but then stopped responding") from None
    except OSError as error:
        raise RendezvousError(f"{who} ended while the group met ({error})") from None
    for _, _, part in extra:
        fds.frombytes(part[: len(part) // fds.itemsize * fds.itemsize])
    if not data:
        raise RendezvousError(f"{who} ended while the group met")
    return json.loads(data), list(fds)


def _read(link: socket.socket, deadline: Deadline, who: str) -> dict[str, Any]:
    message, fds = _receive(link, deadline, who)
    _close(fds)
    return message


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
