"""The connection between a notebook and one of its ranks: a private unix socket, and pickles with their length.

A rank proves with the notebook's token that it belongs to it, before anything it sends is read.
"""

from __future__ import annotations

import hmac
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ringway.launch.locality import same_user
from ringway.launch.run_store import received

TOKEN = "RINGWAY_NOTEBOOK_TOKEN"
"""The variable with the notebook's token: other users can read a process's arguments."""
TOKEN_BYTES = 32
_LENGTH = struct.Struct("<Q")
_RANK = struct.Struct("<I")
_LONGEST = 1 << 32


class Unreadable(Exception):
    """A message that cannot be unpickled here, such as an object of a class that only the other side has."""


class Channel:
    """Messages in both directions. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.owed = 0
        """Questions that the other side has not answered yet. The notebook counts them."""
        self._sending = threading.Lock()

    def send(self, *message: Any, given_up: Callable[[], bool] = lambda: False) -> None:
        """If `given_up` says so, a message that the other side does not read ends the connection: half of one cannot be
        taken back. Ctrl-C must not interrupt it: nobody would know how much was sent."""
        body = pickle.dumps(message)
        rest = memoryview(_LENGTH.pack(len(body)) + body)
        room = select.poll()
        room.register(self.connection, select.POLLOUT)
        with self._sending:
            while rest:
                room.poll(200)
                with suppress(BlockingIOError):
                    rest = rest[self.connection.send(rest, socket.MSG_DONTWAIT) :]
                if rest and given_up():
                    self.connection.shutdown(socket.SHUT_RDWR)
                    raise BrokenPipeError("the other side did not read the message in time")

    def receive(self) -> tuple[Any, ...]:
        """The next message. Raises OSError if the other side has ended, and Unreadable if the message cannot be
        unpickled here. Ctrl-C must not interrupt it: what has just arrived would be lost."""
        (length,) = _LENGTH.unpack(received(self.connection, _LENGTH.size))
        if length > _LONGEST:
            raise OSError(f"a message of {length} bytes is too long")
        body = received(self.connection, length)
        try:
            message: tuple[Any, ...] = pickle.loads(body)
        except Exception as error:  # unpickling runs code that may raise anything
            raise Unreadable(f"{type(error).__name__}: {error}") from None
        return message


def introduce(connection: socket.socket, token: bytes, rank: int) -> Channel:
    """On the rank."""
    connection.sendall(token + _RANK.pack(rank))
    return Channel(connection)


def accept(connection: socket.socket, token: bytes) -> tuple[int, Channel] | None:
    """In the notebook: the rank behind a connection. None if it is a stranger."""
    connection.settimeout(10)
    try:
        if not same_user(connection):
            return None
        said = received(connection, TOKEN_BYTES + _RANK.size)
    except OSError:
        return None
    if not hmac.compare_digest(said[:TOKEN_BYTES], token):
        return None
    connection.settimeout(None)
    return int(_RANK.unpack(said[TOKEN_BYTES:])[0]), Channel(connection)
