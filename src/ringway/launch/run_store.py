"""The private store of `ringway run`, as its ranks use it (`store_server.py`, `store_protocol.py`)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from ringway.descriptors import shortage_named
from ringway.errors import UsageError
from ringway.keys import TAG_BYTES, Key
from ringway.launch.store_client import StoreClient, not_an_integer, too_late, unanswered
from ringway.launch.store_protocol import CLIENT, HEAD_BYTES, HELLO_SECONDS, NONCE_BYTES, RUN_BYTES, Session

_FOREVER = (1 << 31) - 1
_TRIES, _PAUSE = 10, 0.05
_MARGIN = 30.0  # seconds for a reply beyond the request's own limit


class RunStore(StoreClient):
    """A client of the launcher's store. A wait blocks only its own caller.

    `place` is the path of a unix socket, or HOST:PORT.
    """

    key: Key
    """The key of everything else between the ranks, once they have held their roll call."""

    def __init__(self, place: str, key: Key, timeout: float) -> None:
        super().__init__()
        self.host, self.port = address_of(place) or ("127.0.0.1", None)
        self._place = place
        self._secret = key
        self.key = key
        self._idle: list[_Link] = []
        self._pid = os.getpid()
        self.set_timeout(timedelta(seconds=timeout))
        self.check([])

    def _ask(self, op: str, *arguments: str | bytes, limit: timedelta | None = None) -> list[bytes]:
        seconds = 0.0 if limit is None else limit.total_seconds()
        fields = [part.encode() if isinstance(part, str) else bytes(part) for part in arguments]
        request = [op.encode(), b"%d" % min(_FOREVER, int(seconds * 1000)), *fields]
        try:
            with shortage_named("the store of ringway run"), self._link() as link:
                values = link.ask(request, seconds + _MARGIN)
        except OSError as error:
            raise unanswered("the store of ringway run", error) from error
        if not values and op == "get" and fields:
            raise too_late([field.decode(errors="replace") for field in fields], seconds)
        return values

    @contextmanager
    def _link(self) -> Iterator[_Link]:
        """A connection that no other thread uses. One whose exchange failed is not used again.

        There is no lock that a forked child could inherit locked: a list's `pop` and `append` are atomic.
        """
        if self._pid != os.getpid():  # in a forked child, these are its parent's
            self._idle, self._pid = [], os.getpid()
        idle = self._idle
        try:
            link = idle.pop()
        except IndexError:
            link = self._new_link()
        try:
            yield link
        except BaseException:
            link.close()
            raise
        idle.append(link)

    def _new_link(self) -> _Link:
        """A new connection. If strangers crowd the server, it may close one that has not proved itself yet."""
        for _ in range(_TRIES - 1):
            try:
                return _Link(self._place, self._secret)
            except (ConnectionResetError, BrokenPipeError):
                time.sleep(_PAUSE)
        return _Link(self._place, self._secret)

    def add(self, key: str, amount: int) -> int:
        total = self._ask("add", key, str(amount))
        if not total:
            raise not_an_integer(key)
        return int(total[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare", key, expected, desired)[0]

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", *keys)[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("get", *keys, limit=self.timeout if timeout is None else timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask("get", *keys, limit=self.timeout)

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        self._ask("set", *(part for pair in zip(keys, values, strict=True) for part in pair))

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key)[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask("count")[0])


def address_of(place: str) -> tuple[str, int] | None:
    """Host and port of a store across hosts; None if the place is the path of a unix socket."""
    if place.startswith("/"):
        return None
    host, _, port = place.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise UsageError(f"'{place}' is no address of a store; use HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def name_of_run(place: str) -> str:
    """What the server at a place says that its run is called. Anyone may say that: the key of the run proves it."""
    with _connected(place) as connection:
        return received(connection, RUN_BYTES).decode("ascii", "replace")


def _connected(place: str) -> socket.socket:
    address = address_of(place)
    if address is not None:
        return socket.create_connection(address, HELLO_SECONDS)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(HELLO_SECONDS)
    try:
        connection.connect(place)
    except BaseException:
        connection.close()
        raise
    return connection


def received(connection: socket.socket, count: int) -> bytes:
    """Exactly this many bytes. Raises ConnectionError if the other side closes the connection before."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts += part
    return bytes(parts)


class _Link:
    """One connection to the server."""

    def __init__(self, place: str, key: Key) -> None:
        self._socket = _connected(place)
        try:
            received(self._socket, RUN_BYTES)  # the key is that of one run only
            server_nonce, client_nonce = received(self._socket, NONCE_BYTES), os.urandom(NONCE_BYTES)
            self._session = Session(key, CLIENT, server_nonce, client_nonce)
            self._socket.sendall(client_nonce + self._session.proof)
            if not self._session.is_proven_by(received(self._socket, TAG_BYTES)):
                raise ConnectionError("it does not have the job's secret")
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: Sequence[bytes], seconds: float) -> list[bytes]:
        self._socket.settimeout(seconds)
        self._socket.sendall(self._session.frame(request))
        head = received(self._socket, HEAD_BYTES)
        return self._session.opened(head, received(self._socket, self._session.body_length(head)))

    def close(self) -> None:
        self._socket.close()
