"""Threads of ringway's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ringway._core as _core

_SLICE = 0.25


def wait_in_slices(event: threading.Event, timeout: float | None) -> bool:
    """`event.wait(timeout)` that Ctrl-C always ends. CPython handles signals in the main thread, and its sleep in a
    lock is interrupted only by a signal that arrives in that very thread after the sleep began."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while not event.wait(_SLICE if deadline is None else min(_SLICE, max(0.0, deadline - time.monotonic()))):
        if deadline is not None and time.monotonic() >= deadline:
            return False
    return True


def start(name: str, target: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """Starts a daemon: it keeps no program from ending, and the interpreter's end may find it inside torch."""

    def run() -> None:
        _core.stand_still_at_the_end()
        target(*arguments)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
