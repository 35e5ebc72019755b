"""Proves between the ranks themselves whether all of them are on one host.

Rank 0 listens on an abstract unix socket and puts the socket's random name in the job's store. These sockets are not
reachable from outside the network namespace. So a rank that connects, and finds a process of its own user there, shares
rank 0's kernel and namespace. No host name and no variable is trusted.

Other users of the host can see the name and connect, too. Rank 0 takes every connection and closes it, and ranks try
again while the queue is full, so strangers cannot keep a rank out.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ringway.threads import start

_PATIENCE, _PAUSE = 10.0, 0.002
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: Linux's struct ucred


@contextmanager
def meeting_point() -> Iterator[str]:
    """On rank 0: a name that ranks on this host can connect to while the block lasts."""
    name = f"ringway-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(socket.SOMAXCONN)
        thread = start("ringway-meeting", lambda: _empty_queue(listener))
        try:
            yield name
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
            thread.join()


def _empty_queue(listener: socket.socket) -> None:
    """A connection proves what it has to by being queued."""
    while True:
        try:
            listener.accept()[0].close()
        except ConnectionError:
            continue
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                return
            time.sleep(_PAUSE)


def shares_host(name: str) -> bool:
    """On the other ranks: whether the process behind the name is on this host and belongs to the same user."""
    until = time.monotonic() + _PATIENCE
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        while True:
            try:
                probe.connect("\0" + name)
                return same_user(probe)
            except BlockingIOError:  # the queue is full
                if time.monotonic() > until:
                    return False
                time.sleep(_PAUSE)
            except OSError:
                return False


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket belongs to this process's user."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())
