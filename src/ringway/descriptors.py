"""The limits on open files, and what to say when a process has reached one."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

from ringway.errors import RendezvousError


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def used() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # not the one that lists them
    except OSError as error:
        if not is_shortage(error):
            raise
        return limit()  # listing them takes one more


def is_shortage(error: BaseException) -> TypeGuard[OSError]:
    """Whether a call failed because this process, or the whole host, may open no more files."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def shortage(needed: int, what: str, error: OSError | None = None) -> tuple[str, str]:
    """What is wrong, and the remedy, if this process cannot have `needed` more descriptors for `what`."""
    if error is not None and error.errno == errno.ENFILE:
        return f"this host has no descriptor left for {what} (fs.file-max)", "Raise it: sysctl fs.file-max"
    open_now, most = used(), limit()
    return (
        f"pid {os.getpid()} has {open_now} files open, may open {most} (ulimit -n), and needs {needed} more for {what}",
        f"Raise the limit to {open_now + needed} or more: ulimit -n, LimitNOFILE=, docker's --ulimit nofile=",
    )


@contextmanager
def shortage_named(what: str) -> Iterator[None]:
    """Turns an OSError because of too few descriptors into a RendezvousError that says what to raise."""
    try:
        yield
    except OSError as error:
        if not is_shortage(error):
            raise
        raise RendezvousError(". ".join(shortage(1, what, error))) from error
