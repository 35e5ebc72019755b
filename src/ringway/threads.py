"""ringway's threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def start(name: str, target: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """Starts a daemon: it does not keep the program from exiting."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
