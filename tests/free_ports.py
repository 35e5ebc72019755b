"""A port for a store that another process opens later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port below those that the system assigns to connections, where a connection to a closed port may reach itself,
    and below those that ringway chooses."""
    while True:
        port = random.randrange(10000, 20000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
