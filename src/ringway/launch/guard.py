"""Ends the processes that a run leaves behind: what ranks started, and the ranks themselves if the launcher is killed.

Runs as a script too, next to every `ringway run`, without importing ringway: the launcher holds a pipe to it, and the
pipe ends with the launcher, even if that dies of SIGKILL.

A process belongs to a launcher if its environment has the launcher's mark, which children inherit, or if it is in the
session of a rank. A run may have several launchers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress

MARK = "RINGWAY_LAUNCHER"
"""The variable that marks a launcher's processes."""
_GRACE = 5.0
_POLL = 0.05
_SESSION = 3
"""The place of the session in /proc/PID/stat, after the name."""


def end_processes(mark: str, sessions: Collection[int], grace: float = _GRACE) -> None:
    """End all processes of a launcher: with SIGTERM, and after `grace` seconds with SIGKILL. One that hangs in the
    kernel does not end then either: give up after another `grace` seconds."""
    deadline = time.monotonic() + grace
    asked: set[int] = set()
    known = set(sessions)
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline + grace:  # one may have started another behind the first look
        late = time.monotonic() >= deadline
        found = _processes(mark, known)
        for pid in found:
            if late or pid not in asked:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= found
        quiet = 0 if found else quiet + 1
        if found or asked:
            time.sleep(_POLL)


def _processes(mark: str, sessions: set[int]) -> set[int]:
    """The launcher's processes. Adds the sessions of those that have its mark: it may have been killed before it told
    of a rank."""
    marked = f"{MARK}={mark}".encode()
    found, others = set(), {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):  # it has just ended, or belongs to another user
                with open(f"/proc/{name}/stat", "rb") as stat:
                    facts = stat.read().rpartition(b") ")[2].split()
                if facts[0] in b"ZX":
                    continue
                others[int(name)] = int(facts[_SESSION])
                with open(f"/proc/{name}/environ", "rb") as environ:
                    if marked in environ.read().split(b"\0"):
                        found.add(int(name))
                        sessions.add(int(facts[_SESSION]))
    return found | {pid for pid, session in others.items() if session in sessions}


class Guard:
    """A process that ends the run's processes if the launcher is killed."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._sessions: list[int] = []
        # The mark goes through the pipe: other users can read a command line.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._tell(mark)

    def add(self, rank: int) -> None:
        """A rank was started with this process id, in a session of its own."""
        self._sessions.append(rank)
        self._tell(str(rank))

    def close(self) -> None:
        """The ranks have ended: end what they left behind, and the guard."""
        end_processes(self._mark, self._sessions)
        self._tell("done")
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody killed the guard
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def _watch() -> None:
    mark, *lines = (line.strip() for line in sys.stdin)
    if mark and lines[-1:] != ["done"]:
        end_processes(mark, [int(line) for line in lines])


if __name__ == "__main__":
    _watch()
