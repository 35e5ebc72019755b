"""Finds which process set a variable: the launcher is the nearest ancestor that does not have it.

Every rank inherits its launcher's environment and gets the launcher's own variables on top. So the depth at which a
variable first appears tells which of two nested launchers is the inner one. And the launcher's process, the same for
all ranks it started on this host, distinguishes one run from another if no variable does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_GENERATIONS = 64


@dataclass(frozen=True)
class Ancestor:
    """A process above this one. `environ` is None if it cannot be read (another user's process). `name` is its command,
    of which the kernel keeps 15 characters."""

    pid: int
    started: int
    environ: dict[str, str] | None
    name: str = ""


Ancestry = Callable[[], Iterator[Ancestor]]


def ancestors() -> Iterator[Ancestor]:
    """Parent processes, nearest first, as far as /proc shows them. Empty on a system without /proc."""
    pid = os.getppid()
    for _ in range(MAX_GENERATIONS):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The second field is the command in parentheses and may contain anything, so split after it.
                head, _, rest = file.read().rpartition(b")")
                fields = rest.split()
        except OSError:
            return
        yield Ancestor(pid, int(fields[19]), _environ_of(pid), os.fsdecode(head.partition(b"(")[2]))
        pid = int(fields[1])
        if pid <= 0:
            return


def _environ_of(pid: int) -> dict[str, str] | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in entries if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def setter(variable: str, value: str, ancestry: Ancestry = ancestors) -> tuple[int, Ancestor | None]:
    """How many generations up the variable was set to this value, and by which process."""
    depth = 0
    for depth, ancestor in enumerate(ancestry(), start=1):
        if ancestor.environ is None or ancestor.environ.get(variable) != value:
            return depth, ancestor
    return depth + 1, None
