"""How the ranks of a group come to share a segment.

Rank 0 listens on an abstract unix socket, and puts the socket's name and a token into the group's store. The others
connect, which proves that they are on the same host and in the same network namespace. Both ends check the other's
credentials, so all run as the same user. The token proves that they belong to the group. Each hands over a descriptor
of its own process. Once all are there, rank 0 makes the segment, a memfd, and passes it on, with the descriptors of
those processes that the receiver does not know from an earlier group. No rank begins before every rank has mapped the
segment. Nothing has a name in a file system, so nothing is left behind, however the ranks end.
"""

from __future__ import annotations

import abc
import contextlib
import hmac
import json
import os
import secrets
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.backends.several.hosts import host_identity
from ringway.backends.shm.errors import RAISE_MEMORY
from ringway.backends.shm.link import (
    FDS_A_MESSAGE,
    ask,
    close,
    error_in,
    in_words,
    no_descriptors,
    receive,
    send,
)
from ringway.backends.shm.peers import KnownPeers, Presence, own_pidfd
from ringway.descriptors import is_shortage, limit, used
from ringway.errors import BackendUnavailable, RendezvousError
from ringway.launch.locality import same_user
from ringway.store import Deadline, key_of, read

_KEY = "shm/meeting"
_PATIENCE = 300.0
"""Seconds for a group to meet: its ranks have just talked through the store, so none is far behind."""
_SLICE = 0.1
"""Seconds between two checks whether a missing rank has ended."""
_ASKS_PER_CHECK = 10
"""Looks into the store for a meeting between two such checks."""
_SPARE = 8
"""Descriptors besides those for the members: the segment, the listener, one that arrives twice."""

Group = TypeVar("Group")
Opened = TypeVar("Opened")


@dataclass
class SharedSegment:
    """What a rank gets. Who attaches it owns the descriptor. `cpus` is the number of those that the ranks
    of the group may use at the same time."""

    fd: int
    peers: list[_core.ShmPeer]
    cpus: int


def share_segment(info: GroupInfo, attach: Callable[[SharedSegment], Group]) -> Group:
    """Every rank of the group calls this. All get what their `attach` makes of the same segment, or all raise."""
    if info.size > _core.SHM_MAX_RANKS:
        limit = _core.SHM_MAX_RANKS
        raise BackendUnavailable("shm", f"a group of {info.size} ranks is larger than its limit of {limit}")
    meeting = _Host(info) if info.rank == 0 else _Joiner(info)
    try:
        return meeting.share(attach)
    finally:
        if not meeting.stays_away:
            with contextlib.suppress(Exception):  # the store may be gone
                meeting.presence.withdraw(info.rank)


class _Meeting(abc.ABC):
    """One rank's side of joining a group."""

    def __init__(self, info: GroupInfo) -> None:
        self.info = info
        self.store = info.store
        self.known = info.process.part(KnownPeers)
        self.presence = Presence(info.store)
        self.deadline = Deadline(min(info.timeout, _PATIENCE))
        self.ended: set[int] = set()
        self.stays_away = False
        """Whether this rank has told the others that it does not come."""

    @abc.abstractmethod
    def share(self, attach: Callable[[SharedSegment], Group]) -> Group:
        """What `attach` makes of the segment."""

    def rank(self, member: int) -> str:
        """A member by its global rank, the one users know."""
        return f"rank {self.info.ranks[member]}"

    def hello(self) -> dict[str, Any]:
        cpus = sorted(os.sched_getaffinity(0))
        quota = _core.cpu_quota()
        return {"rank": self.info.rank, "pid": os.getpid(), "name": self.known.own, "cpus": cpus, "quota": quota}

    def check_alive(self, members: Iterable[int]) -> None:
        """Raises if one of the members has ended, or does not come: the group can no longer form."""
        for member in members:
            ended, why_not = self.presence.of(member)
            if why_not is not None:
                self.ended.add(member)
                self.presence.withdraw(member)
                raise error_in({**why_not, "error": f"{self.rank(member)}: {why_not['error']}"})
            pid = self.known.pid_if_dead(self.info.ranks[member]) or ended
            if pid is not None:
                self.ended.add(member)
                self.presence.withdraw(member)
                raise RendezvousError(
                    f"{self.rank(member)} (pid {pid}) ended before the group {self.info.name} had met",
                    missing=[self.info.ranks[member]],
                )

    def say(self, link: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """If the other end has given up or ended, the next receive from it says so."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(link, message, fds, self.deadline)

    def attached(self, segment: SharedSegment, attach: Callable[[SharedSegment], Group]) -> Group:
        try:
            group = attach(segment)
        except BaseException as error:
            close([segment.fd])
            if isinstance(error, MemoryError):
                raise no_memory(error) from None
            raise
        self.known.joined(self.info.ranks, segment.peers)
        return group


@dataclass
class _Member:
    """A rank as rank 0 knows it."""

    peer: _core.ShmPeer
    name: str
    cpus: list[int]
    quota: tuple[int, float] | None
    link: socket.socket | None = None


class _Host(_Meeting):
    """Rank 0's side."""

    def __init__(self, info: GroupInfo) -> None:
        super().__init__(info)
        self._members: dict[int, _Member] = {}
        self._listener: socket.socket | None = None
        self._nameless: dict[int, socket.socket] = {}
        """By descriptor: connections that have not said yet which rank they are."""
        self._turned_away: set[int] = set()

    def share(self, attach: Callable[[SharedSegment], Group]) -> Group:
        try:
            self.presence.post(0)
            self._add(0, self.hello(), own_pidfd())
            if self.info.size > 1:
                self._gather()
            return self._hand_out(attach)
        except BaseException as error:
            named = no_descriptors(1, error) if is_shortage(error) else error
            self._give_up(named)
            for link in self._links().values():
                with contextlib.suppress(OSError):
                    send(link, in_words(named))
            raise named from named.__cause__
        finally:
            self._stop_listening()
            for link in self._links().values():
                link.close()

    def _add(self, rank: int, hello: dict[str, Any], pidfd: int, link: socket.socket | None = None) -> None:
        peer = self.known.add(hello["name"], hello["pid"], pidfd)
        self._members[rank] = _Member(peer, hello["name"], hello["cpus"], hello["quota"], link)

    def _links(self) -> dict[int, socket.socket]:
        return {rank: member.link for rank, member in self._members.items() if member.link is not None}

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.info.size) if rank not in self._members and rank not in self._turned_away]

    def _gather(self) -> None:
        """Accepts the other ranks, each with its descriptor."""
        name, token = f"ringway-shm-{secrets.token_hex(16)}", secrets.token_hex(32)
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("\0" + name)
        listener.listen(self.info.size)
        listener.setblocking(False)
        hidden = key_of(self.store).hide(name, token)
        self.store.set(_KEY, json.dumps({"name": name, "token": hidden, "host": host_identity()}))
        self._accept_all(listener, token)
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is None:
            return
        for link in (self._listener, *self._nameless.values()):
            link.close()
        self._listener = None
        with contextlib.suppress(Exception):  # a later group may meet in the same store under the same name
            self.store.delete_key(_KEY)

    def _give_up(self, error: BaseException) -> None:
        """Tells the ranks that are not members yet why the group does not form: through the store if they come later,
        over the connection if they have one. The store comes first: a rank that has a connection clears its key."""
        with contextlib.suppress(Exception):  # the store may be gone
            for rank in set(self._missing()) - self.ended - {0}:
                self.store.set(_given_up(rank), json.dumps(in_words(error)))
        with contextlib.suppress(OSError):  # until there are no more
            while self._listener is not None:
                link, _ = self._listener.accept()
                self._nameless[link.fileno()] = link
        for link in self._nameless.values():
            if same_user(link):
                with contextlib.suppress(OSError):
                    send(link, in_words(error))

    def _accept_all(self, listener: socket.socket, token: str) -> None:
        refusal = self._descriptor_shortage()
        watched = select.poll()
        watched.register(listener, select.POLLIN)
        while missing := self._missing():
            ready = watched.poll(min(_SLICE, self.deadline.left()) * 1000)
            if not ready:
                self.check_alive(range(1, self.info.size))
                self._check_absent(missing)
            for fd, _ in ready:
                if fd != listener.fileno():
                    watched.unregister(fd)
                    self._admit(self._nameless.pop(fd), token, refusal)
                    continue
                link, _ = listener.accept()
                if same_user(link) and refusal is not None:
                    self._admit(link, token, refusal)
                elif same_user(link):
                    self._nameless[link.fileno()] = link
                    watched.register(link, select.POLLIN)
                else:
                    link.close()
        if refusal is not None:
            raise refusal

    def _check_absent(self, missing: list[int]) -> None:
        if self.deadline.left() == 0:
            ranks = [self.info.ranks[member] for member in missing]
            raise RendezvousError(
                f"rank {', '.join(map(str, ranks))} of the group {self.info.name} did not come to share memory with "
                f"{self.rank(0)} in time",
                missing=ranks,
            )

    def _descriptor_shortage(self) -> BackendUnavailable | None:
        """Why this process cannot have a connection and a pidfd for each member at the same time."""
        needed = self.info.size + sum(not self.known.has(rank) for rank in self.info.ranks) + _SPARE
        return no_descriptors(needed) if used() + needed > limit() else None

    def _admit(self, link: socket.socket, token: str, refusal: BackendUnavailable | None) -> None:
        try:
            hello, fds = receive(link, self.deadline, None)
        except BackendUnavailable as error:
            self.say(link, in_words(error))
            link.close()
            raise
        except (RendezvousError, ValueError):  # it has left, or is not one of us
            link.close()
            return
        rank, said = hello.get("rank"), str(hello.get("token")).encode(errors="replace")
        if not hmac.compare_digest(said, token.encode()) or rank not in self._missing() or not _is_whole(hello):
            close(fds)
            link.close()
            return
        if refusal is not None:  # keeps no descriptor
            close(fds)
            self.say(link, in_words(refusal))
            link.close()
            self._turned_away.add(rank)
            return
        close(fds[1:])
        self._add(rank, hello, fds[0] if fds else -1, link)

    def _hand_out(self, attach: Callable[[SharedSegment], Group]) -> Group:
        """Gives every member the segment, and the descriptors of the processes that it does not know yet."""
        members = [self._members[rank] for rank in range(self.info.size)]
        peers = [member.peer for member in members]
        cpus = _cpus_together(members)
        try:
            segment = SharedSegment(_core.shm_create_segment(self.info.size), peers, cpus)
        except MemoryError as error:
            raise no_descriptors(1) if used() >= limit() else no_memory(error) from None
        links = self._links()
        try:
            names = [member.name for member in members]
            facts = {"names": names, "pids": [peer.pid for peer in peers], "cpus": cpus}
            for link in links.values():
                self.say(link, facts, [segment.fd])
            for rank, link in links.items():
                lacks = ask(link, self.deadline, self.info.ranks[rank])["lacks"]
                lacks = [other for other in lacks if peers[other].pidfd >= 0]
                for at in range(0, len(lacks), FDS_A_MESSAGE):
                    part = lacks[at : at + FDS_A_MESSAGE]
                    fds = [peers[other].pidfd for other in part]
                    self.say(link, {"ranks": part, "descriptors": len(lacks) - at}, fds)
                    ask(link, self.deadline, self.info.ranks[rank])
                self.say(link, {"ranks": []})
            for rank, link in links.items():
                ask(link, self.deadline, self.info.ranks[rank])
        except BaseException:
            close([segment.fd])
            raise
        group = self.attached(segment, attach)
        for link in links.values():
            self.say(link, {"go": True})  # the group itself finds out if this rank is dead by now
        return group


class _Joiner(_Meeting):
    """The side of all other ranks."""

    def share(self, attach: Callable[[SharedSegment], Group]) -> Group:
        with self._introduced() as link:
            try:
                group = self.attached(self._received(link), attach)
            except BaseException as error:
                self.say(link, in_words(error))
                raise
            self.say(link, {"ok": True})
            close(self._next(link)[1])
            return group

    def _introduced(self) -> socket.socket:
        """A connection to rank 0, which has been told who this rank is."""
        self._opened(lambda: self.presence.post(self.info.rank))
        own = self._opened(own_pidfd)
        try:
            link, token = self._connected()
            try:
                if not same_user(link):
                    raise self._not_coming(BackendUnavailable("shm", f"{self.rank(0)} runs as another user"))
                self.say(link, {**self.hello(), "token": token}, [own] if own >= 0 else [])
            except BaseException:
                link.close()
                raise
            return link
        finally:
            close([own])

    def _opened(self, make: Callable[[], Opened]) -> Opened:
        """What `make` opens. If this process may open no more files, the others are told that it does not come."""
        try:
            return make()
        except OSError as error:
            if not is_shortage(error):
                raise
            raise self._not_coming(no_descriptors(1, error)) from None

    def _not_coming(self, why: BackendUnavailable) -> BackendUnavailable:
        self._check_given_up()  # rank 0 no longer reads what others post
        self.presence.refuse(self.info.rank, in_words(why))
        self.stays_away = True
        return why

    def _next(self, link: socket.socket) -> tuple[dict[str, Any], list[int]]:
        """The next message of rank 0. Raises the error that it may report instead."""
        try:
            message, fds = receive(link, self.deadline, self.info.ranks[0])
        except RendezvousError:
            self._check_given_up()  # it closed the connection because it gave up, and wrote why
            raise
        if "error" in message:
            close(fds)
            with contextlib.suppress(Exception):  # the store may be gone
                self.store.delete_key(_given_up(self.info.rank))
            raise error_in(message)
        return message, fds

    def _connected(self) -> tuple[socket.socket, str]:
        """A connection to rank 0, and the token of its group."""
        gone: set[str] = set()  # sockets of an earlier meeting, whose rank 0 was killed
        while True:
            # Whether rank 0 still lives is read from files.
            meeting = self._opened(lambda: self.deadline.poll(self._question(gone)))
            if meeting is None:
                raise RendezvousError(
                    f"{self.rank(0)} did not make the shared segment of the group {self.info.name} in time",
                    missing=[self.info.ranks[0]],
                )
            link = self._opened(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            try:
                link.connect("\0" + meeting["name"])
                return link, key_of(self.store).reveal(meeting["name"], meeting["token"])
            except OSError as error:
                link.close()
                if meeting["host"] == host_identity():
                    gone.add(meeting["name"])
                    continue
                reached = f"{self.rank(self.info.rank)} cannot reach {self.rank(0)}'s socket ({error})"
                raise self._not_coming(BackendUnavailable("shm", f"{reached}: they are not on one host")) from None

    def _question(self, gone: set[str]) -> Callable[[], dict[str, str] | None]:
        asked = 0

        def find_meeting() -> dict[str, str] | None:
            nonlocal asked
            said = read(self.store, _KEY)
            meeting: dict[str, str] = {} if said is None else json.loads(said)
            if meeting.get("name", "") not in {"", *gone}:
                return meeting
            asked += 1
            if asked % _ASKS_PER_CHECK == 0:
                self._check_given_up()
                self.check_alive([0])
            return None

        return find_meeting

    def _check_given_up(self) -> None:
        """Raises if rank 0 has given up because this rank, or another one, had not come."""
        key = _given_up(self.info.rank)
        said = read(self.store, key)
        if said is not None:
            self.store.delete_key(key)
            raise error_in(json.loads(said))

    def _received(self, link: socket.socket) -> SharedSegment:
        facts, fds = self._next(link)
        try:
            known = {rank: self.known.get(name) for rank, name in enumerate(facts["names"])}
            self.say(link, {"lacks": [rank for rank, peer in known.items() if peer is None]})
            while (part := self._next(link))[0]["ranks"]:
                for rank, pidfd in zip(part[0]["ranks"], part[1], strict=True):  # rank 0 passes one for each
                    known[rank] = self.known.add(facts["names"][rank], facts["pids"][rank], pidfd)
                self.say(link, {"ok": True})
            peers = [
                peer or self.known.add(facts["names"][rank], facts["pids"][rank], -1) for rank, peer in known.items()
            ]
            return SharedSegment(fds[0], peers, facts["cpus"])
        except BaseException:
            close(fds)
            raise


def _is_whole(hello: dict[str, Any]) -> bool:
    return isinstance(hello.get("name"), str) and isinstance(hello.get("pid"), int) and {"cpus", "quota"} <= set(hello)


def _given_up(rank: int) -> str:
    return f"shm/given up/{rank}"


def _cpus_together(members: list[_Member]) -> int:
    """The CPUs that the members may use at the same time: all their affinities, and what their quotas allow."""
    quotas = [member.quota for member in members if member.quota]
    allowed = float(len(members) - len(quotas))
    allowed += sum(min(count, dict(quotas)[cgroup]) for cgroup, count in Counter(quota[0] for quota in quotas).items())
    return int(min(len({cpu for member in members for cpu in member.cpus}), allowed))


def no_memory(error: MemoryError) -> BackendUnavailable:
    return BackendUnavailable("shm", str(error), remedy=RAISE_MEMORY)
