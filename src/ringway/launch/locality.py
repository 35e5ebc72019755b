"""Proves between the ranks themselves whether all of them are on one host.

Rank 0 listens on an abstract unix socket and puts the socket's random name in the job's store. These sockets are not
reachable from outside the network namespace. So a rank that connects, and finds a process of its own user there, shares
rank 0's kernel and namespace. No host name and no variable is trusted.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: Linux's struct ucred


@contextmanager
def meeting_point() -> Iterator[str]:
    """On rank 0: a name that ranks on this host can connect to while the block lasts."""
    name = f"ringway-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(socket.SOMAXCONN)  # a queued connection counts: nothing has to accept it
        yield name


def shares_host(name: str) -> bool:
    """On the other ranks: whether the process behind the name is on this host and belongs to the same user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(10)
        try:
            probe.connect("\0" + name)
        except OSError:
            return False
        return same_user(probe)


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket belongs to this process's user."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())
