"""Signs of life between hosts: whether the ranks of other hosts live, and whether the job's store answers.

The process table shows only the deaths of this host. A host that loses power, or its network, closes no connection, so
its ranks are known to be gone only by their silence.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import DistError

from ringway.job.elastic.roster import Generation, Member, Roster
from ringway.launch.processes import pid_namespace
from ringway.threads import start

_TICKS = 10
"""Silent ticks until a rank or the store counts as out of reach. Ticks are counted, not seconds: a process that was
stopped itself, or was short of CPU time, must not blame others for it."""


class Server:
    """The host of the job's store. Its name is looked up now: it may not resolve once the network is cut."""

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._addresses = {information[4][:2] for information in found}

    def hang_up(self) -> None:
        """End this process's connections to it. torch's store waits for an answer without a limit; now it raises."""
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:  # OSError: no connection
                peer = connection.getpeername()
                if isinstance(peer, tuple) and (peer[0].removeprefix("::ffff:"), peer[1]) in self._addresses:
                    connection.shutdown(socket.SHUT_RDWR)


class Pulse:
    """Writes this member's sign of life, and reads those of other hosts.

    `silent` is called with a member of the followed generation after `grace` seconds without a sign of it, and with
    None after `grace` seconds without an answer of the store. It is called on a thread.
    """

    def __init__(
        self,
        roster: Roster,
        member: Member,
        server: Server,
        grace: float,
        silent: Callable[[Member | None], None],
    ) -> None:
        self._roster = roster
        self._member = member
        self._server = server
        self._tick = grace / _TICKS
        self._silent = silent
        self._followed: list[Member] = []
        self._answers = 0
        self._ended = threading.Event()
        start("ringway-pulse", self._beat)
        start("ringway-pulse-watch", self._watch_the_store)

    def follow(self, generation: Generation) -> None:
        """Read the signs of this generation's members on other hosts from now on."""
        here = pid_namespace()
        self._followed = [member for member in generation.members if member.process.namespace != here]

    def stop(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        seen: dict[int, tuple[int, int]] = {}  # of each member: its last sign, and the ticks since
        reported: set[int] = set()
        while not self._ended.wait(self._tick):
            with suppress(DistError):  # the store is watched by the other thread
                self._roster.beat(self._member)
                for member in self._followed:
                    sign, (last, ticks) = self._roster.beats_of(member), seen.get(member.number, (-1, 0))
                    seen[member.number] = (sign, 0 if sign != last else ticks + 1)
                    if seen[member.number][1] < _TICKS:
                        reported.discard(member.number)
                    elif member.number not in reported:
                        self._silent(member)
                        reported.add(member.number)  # unless the store failed: then again at the next tick
                self._answers += 1

    def _watch_the_store(self) -> None:
        answers = ticks = 0
        while not self._ended.wait(self._tick):
            ticks = 0 if self._answers != answers else ticks + 1
            answers = self._answers
            if ticks == _TICKS:
                self._server.hang_up()
                self._silent(None)
