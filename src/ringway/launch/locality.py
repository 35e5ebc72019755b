"""Whether all ranks are on one host, proven between the ranks themselves.

Rank 0 listens on an abstract unix socket whose name, unguessable, stands in the job's store. Such sockets do
not leave the network namespace, so a rank that connects, and sees there a process of its own user, shares
rank 0's kernel and namespace. No name of a host and no variable is trusted.
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
    """Rank 0's side: a name to which ranks of this host can connect while the block lasts."""
    name = f"ringway-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(socket.SOMAXCONN)  # a connection counts once it is queued: nobody has to accept it
        yield name


def shares_host(name: str) -> bool:
    """Another rank's side: whether the process behind the name is on this host and the same user's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(10)
        try:
            probe.connect("\0" + name)
        except OSError:
            return False
        _, uid, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return bool(uid == os.geteuid())
