"""Other processes of the job: their names, and whether they are gone, according to this host's process table."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_OVER = ("Z", "X", "gone")


@dataclass(frozen=True)
class ProcessName:
    """A process, wherever it runs."""

    host: str
    pid: int
    namespace: str

    @staticmethod
    def own() -> ProcessName:
        return ProcessName(socket.gethostname(), os.getpid(), pid_namespace())

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    def seems_gone(self) -> bool:
        return seems_gone(self.pid, self.namespace)


@cache
def boot_id() -> str:
    """Another one after each start of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Equal for processes to which a pid means the same process. The boot id is part of it: the first PID namespace of
    every host has the same number."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def seems_gone(pid: int, namespace: str) -> bool:
    """Whether a process is gone. False for processes of other hosts."""
    return process_state(pid, namespace)[0] in _OVER


def process_state(pid: int, namespace: str) -> tuple[str, int | None]:
    """The state letter of /proc/PID/stat, 'gone', or '' if unknown; and the signal that killed the process. The kernel
    reports the signal only until the process is reaped."""
    if not _is_neighbour(namespace):
        return "", None
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # gone, or hidden from this user, or this process has no descriptor left
        return ("" if _exists(pid) else "gone"), None
    status = int(fields[49]) if len(fields) > 49 else 0
    return fields[0], (status & 0x7F) or None if fields[0] in _OVER else None


def _is_neighbour(namespace: str) -> bool:
    """Whether a pid of that namespace means the same process here."""
    try:
        return bool(namespace) and namespace == pid_namespace()
    except OSError:
        return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True
