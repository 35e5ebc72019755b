"""Which ranks of an elastic run are in, out or joining: one line below the output of the ranks on a terminal, or a line
for each new generation otherwise."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from ringway.errors import RingwayError
from ringway.launch.processes import ProcessName, pid_namespace

_LOOK_SECONDS = 0.5
_ERASE = "\r\x1b[2K"


@dataclass(frozen=True)
class Standing:
    """What the job's store says: the current generation, its members, and who waits to be let in."""

    generation: int
    members: Collection[ProcessName]
    waiting: Collection[ProcessName]
    finished: bool = False
    """Whether the last step is made, or all members have left the loop."""


class LiveLine:
    """A line at the bottom of the terminal. What others print appears above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._stream = stream
        self._console = Console(file=stream)
        self._lock = threading.Lock()
        self._text = ""

    @property
    def on(self) -> bool:
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def show(self, text: str) -> None:
        with self._lock:
            if text != self._text:
                self._text = text
                self._draw()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The line is not there while others print."""
        with self._lock:
            if self._text:
                self._write(_ERASE)
            try:
                yield
            finally:
                if self._text:
                    self._draw()

    def _draw(self) -> None:
        from rich.text import Text

        line = Text(self._text, style="bold")
        line.truncate(max(self._console.width - 1, 10), overflow="ellipsis")
        with self._console.capture() as drawn:
            self._console.print(line, end="", soft_wrap=True)
        self._write(_ERASE + drawn.get())

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads the launcher's output any more
            self._stream.write(text)
            self._stream.flush()

    def close(self) -> None:
        with self._lock:
            if self._text:
                self._text = ""
                self._write(_ERASE)


class Progress:
    """Follows an elastic run. `look` reads the job's standing from its store."""

    def __init__(self, store: Store | None, look: Callable[[Store], Standing | None] | None) -> None:
        self.line = LiveLine(sys.stderr)
        self._store = store
        self._look = look
        self._next = 0.0
        self._standing: Standing | None = None
        self._told = 0

    def say(self, line: str) -> None:
        """A line that stays."""
        with self.line.aside():
            print(f"ringway run: {line}", file=sys.stderr, flush=True)

    def update(self, running: Mapping[str, int], out: Collection[str]) -> None:
        """Show where the launcher's ranks are: `running` by their names, with their pids, and those that are `out`."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOOK_SECONDS
        if self._store is not None and self._look is not None:
            with suppress(DistError, RingwayError):  # the ranks report it
                self._standing = self._look(self._store)
        if self._standing is None:
            return
        text = described(self._standing, running, out)
        if self.line.on:
            self.line.show(f"ringway run: {text}")
        elif self._standing.generation > self._told:
            self.say(text)
        self._told = self._standing.generation


def described(standing: Standing, running: Mapping[str, int], out: Collection[str]) -> str:
    """One line: the generation, and where each rank is. A rank may be a process that the launcher's own started: they
    share a session."""
    sessions = [_session(process) for process in standing.members if not process.seems_gone()]
    inside = [name for name, pid in running.items() if pid in sessions]
    joining = [name for name, pid in running.items() if pid not in sessions]
    others = sum(session not in running.values() for session in sessions)
    foreign = sum(_session(process) not in running.values() for process in standing.waiting)
    parts = [
        f"in: {_listed(inside, others)}",
        f"joining: {_listed(joining, foreign)}",
        f"out: {_listed(out)}",
    ]
    return f"generation {standing.generation}; " + "; ".join(parts)


def _listed(names: Collection[str], others: int = 0) -> str:
    parts = ([", ".join(names)] if names else []) + ([f"{others} of other launchers"] if others else [])
    return " and ".join(parts) or "none"


def _session(process: ProcessName) -> int | None:
    """The session of a process of this host; its first process is the one that the launcher started."""
    if process.namespace != pid_namespace():
        return None
    try:
        return os.getsid(process.pid)
    except OSError:  # it has ended
        return None
