"""A port for a store that another process opens later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Below the ports that the system gives to connections, where one may meet itself while nobody listens, and below
    those that ringway chooses."""
    while True:
        port = random.randrange(10000, 20000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
