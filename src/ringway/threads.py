"""ringway's threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ringway._core as _core


def start(name: str, target: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """Starts a daemon: it does not keep the program from exiting. The interpreter may exit while it is inside torch."""

    def run() -> None:
        _core.stand_still_at_the_end()
        target(*arguments)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
