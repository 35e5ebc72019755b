"""Runs a process short of file descriptors."""

from __future__ import annotations

import os
import resource
from contextlib import suppress


def leave_descriptors(spare: int) -> None:
    """Lets this process open exactly so many more files."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + spare + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    for fd in taken[:spare]:
        os.close(fd)
