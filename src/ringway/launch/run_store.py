"""The private store of `ringway run`: only processes that have the job's secret can use it.

The server is one thread of the launcher, so it survives any rank. It listens on a unix socket of mode 0600,
and both sides of every connection prove that they have the secret:

    server -> client    nonce (32 bytes)
    client -> server    nonce (32), tag over both nonces
    server -> client    tag over both nonces

Then requests and replies alternate, in frames: length (4 bytes), body. The kernel keeps the connection private. One
that says anything else is closed. The body of a request is an op's name, a time limit in ms, and the op's arguments; a
reply is a list of values, or empty for a wait that timed out or an `add` to a value that is not an integer.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from ringway.descriptors import shortage_named
from ringway.keys import TAG_BYTES, Key
from ringway.threads import start

_NONCE_BYTES = 32
_LENGTH = struct.Struct("<I")
_FRAME_LIMIT = 64 << 20
_HELLO_SECONDS = 10.0
_FOREVER = (1 << 31) - 1
_MARGIN = 30.0  # seconds for a reply beyond the request's own limit


def _pack(fields: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(field)) + field for field in fields)


def _unpack(body: bytes) -> list[bytes]:
    fields, at = [], 0
    while at < len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size + length
        if at > len(body):
            raise ValueError("a field is cut off")
        fields.append(body[at - length : at])
    return fields


def _proof(key: Key, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return key.tag("store connection", side, server_nonce, client_nonce)


def _frame(fields: Sequence[bytes]) -> bytes:
    body = _pack(fields)
    return _LENGTH.pack(len(body)) + body


class StoreServer:
    """Serves the store on a listening socket until it is closed."""

    def __init__(self, listener: socket.socket, key: Key) -> None:
        self._key = key
        self._listener = listener
        self._values: dict[bytes, bytes] = {}
        self._waiting: list[_Waiting] = []
        self._peers: set[_Peer] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = start("ringway-store", self._run)

    def close(self) -> None:
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for ready, _ in self._selector.select(self._patience()):
                if ready.fileobj is self._woken:
                    return self._end()
                if ready.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(ready.data)
            self._look_at_clock()

    def _end(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        self._selector.close()
        self._listener.close()
        self._woken.close()

    def _patience(self) -> float | None:
        moments = [waiting.until for waiting in self._waiting]
        moments += [peer.hello_until for peer in self._peers if not peer.proved]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._peers if not peer.proved and peer.hello_until <= now]:
            self._drop(peer)
        late = [waiting for waiting in self._waiting if waiting.until <= now]
        self._waiting = [waiting for waiting in self._waiting if waiting.until > now]
        for waiting in late:
            self._reply(waiting.peer, [])

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer has gone, or descriptors ran out: it tries again
            time.sleep(0.01)
            return
        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._send(peer, peer.nonce)

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        self._waiting = [waiting for waiting in self._waiting if waiting.peer is not peer]
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _serve(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
            if not data:
                raise ConnectionError("it closed the connection")
            peer.received += data
            if not peer.proved:
                proof = peer.prove(self._key)
                if proof is None:
                    return
                self._send(peer, proof)
            while (body := peer.next_body()) is not None:
                self._answer(peer, _unpack(body))
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, IndexError, struct.error):  # it does not speak the protocol
            self._drop(peer)

    def _send(self, peer: _Peer, data: bytes) -> None:
        """Sends all of it. A peer that does not read its replies for so long is dropped."""
        try:
            peer.connection.settimeout(_HELLO_SECONDS)
            peer.connection.sendall(data)
        except OSError:
            self._drop(peer)
        else:
            peer.connection.setblocking(False)

    def _reply(self, peer: _Peer, values: Sequence[bytes]) -> None:
        self._send(peer, _frame(values))

    def _answer(self, peer: _Peer, request: list[bytes]) -> None:
        op, limit, *arguments = request
        values = self._values
        match op, arguments:
            case b"get", keys:
                waiting = _Waiting(peer, keys, time.monotonic() + int(limit) / 1000)
                if not self._try(waiting):
                    self._waiting.append(waiting)
                return
            case b"check", keys:
                self._reply(peer, [b"%d" % all(key in values for key in keys)])
                return
            case b"set", pairs if len(pairs) % 2 == 0:
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    values[key] = value
                self._reply(peer, [b""])
            case b"add", [key, amount]:
                try:
                    values[key] = b"%d" % (int(values.get(key, b"0")) + int(amount))
                except ValueError:
                    self._reply(peer, [])
                    return
                self._reply(peer, [values[key]])
            case b"append", [key, more]:
                values[key] = values.get(key, b"") + more
                self._reply(peer, [b""])
            case b"compare", [key, expected, desired]:
                if values.get(key, b"") == expected:
                    values[key] = desired
                self._reply(peer, [values.get(key, expected)])
            case b"delete", [key]:
                self._reply(peer, [b"%d" % (values.pop(key, None) is not None)])
            case b"count", []:
                self._reply(peer, [b"%d" % len(values)])
            case _:
                raise ValueError("an unknown request")
        self._waiting = [waiting for waiting in self._waiting if not self._try(waiting)]

    def _try(self, waiting: _Waiting) -> bool:
        """Answers a wait whose keys are all there."""
        if not all(key in self._values for key in waiting.keys):
            return False
        self._reply(waiting.peer, [self._values[key] for key in waiting.keys])
        return True


class _Peer:
    """One connection, as the server sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = os.urandom(_NONCE_BYTES)
        self.received = bytearray()
        self.proved = False
        self.hello_until = time.monotonic() + _HELLO_SECONDS

    def prove(self, key: Key) -> bytes | None:
        """The server's answer to the client's proof; None if not all of that is here. Raises if it proves nothing."""
        if len(self.received) < _NONCE_BYTES + TAG_BYTES:
            return None
        nonce, proof = self._take(_NONCE_BYTES), self._take(TAG_BYTES)
        if not hmac.compare_digest(proof, _proof(key, "client", self.nonce, nonce)):
            raise ConnectionError("the client does not have the job's secret")
        self.proved = True
        return _proof(key, "server", self.nonce, nonce)

    def next_body(self) -> bytes | None:
        """The next request, or None if not all of it is here."""
        if len(self.received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self.received)
        if not 0 < length <= _FRAME_LIMIT:
            raise ConnectionError("a frame has an impossible length")
        if len(self.received) < _LENGTH.size + length:
            return None
        return self._take(_LENGTH.size + length)[_LENGTH.size :]

    def _take(self, count: int) -> bytes:
        taken = bytes(self.received[:count])
        del self.received[:count]
        return taken


class _Waiting:
    """A request for values that are not there yet."""

    def __init__(self, peer: _Peer, keys: Sequence[bytes], until: float) -> None:
        self.peer, self.keys, self.until = peer, keys, until


class RunStore(Store):
    """A client of the store. Any number of threads may use it: a wait blocks only its own caller."""

    key: Key
    """The key of everything else between the ranks, once they have held their roll call."""
    host = "127.0.0.1"
    """All ranks are on this host, so they reach each other here."""
    timeout: timedelta  # torch's property

    def __init__(self, path: str, key: Key, timeout: float) -> None:
        super().__init__()
        self._path = path
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
            raise DistNetworkError(f"the store of ringway run does not answer: {error}") from error
        if not values and op == "get" and fields:
            keys = ", ".join(field.decode(errors="replace") for field in fields[:4])
            raise DistStoreError(f"wait timeout after {seconds:g} s, keys: {keys}")
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
            link = _Link(self._path, self._secret)
        try:
            yield link
        except BaseException:
            link.close()
            raise
        idle.append(link)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key, limit=self.timeout)[0]

    def add(self, key: str, amount: int) -> int:
        total = self._ask("add", key, str(amount))
        if not total:
            raise ValueError(f"add: the value of {key!r} in the job's store is not an integer")
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

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._ask("set", *(part for pair in zip(keys, values, strict=True) for part in pair))

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key)[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask("count")[0])

    deleteKey = delete_key  # noqa: N815 - the names that torch's C++ code calls
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> RunStore:
        return self


class _Link:
    """One connection to the server."""

    def __init__(self, path: str, key: Key) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_HELLO_SECONDS)
            self._socket.connect(path)
            server_nonce, client_nonce = self._receive(_NONCE_BYTES), os.urandom(_NONCE_BYTES)
            self._socket.sendall(client_nonce + _proof(key, "client", server_nonce, client_nonce))
            if not hmac.compare_digest(self._receive(TAG_BYTES), _proof(key, "server", server_nonce, client_nonce)):
                raise ConnectionError("it does not have the job's secret")
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: Sequence[bytes], seconds: float) -> list[bytes]:
        self._socket.settimeout(seconds)
        self._socket.sendall(_frame(request))
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        return _unpack(self._receive(length))

    def _receive(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise ConnectionError("it closed the connection")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self._socket.close()


class PrivateSocket:
    """A listening unix socket of mode 0600. Its file is removed at once, so nothing is left behind even if this process
    is killed: `path` leads to it through a descriptor of this process, which only the same user may follow."""

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = tempfile.mkdtemp(prefix="ringway-")  # of mode 0700
        try:
            self._fd = self._bind(folder)
        except BaseException:
            self.listener.close()
            raise
        finally:
            os.rmdir(folder)
        self.listener.listen(1024)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def _bind(self, folder: str) -> int:
        where = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        name = f"/proc/self/fd/{where}/store"  # the address of a unix socket holds only 107 bytes
        try:
            self.listener.bind(name)
            try:
                os.chmod(name, 0o600)
                return os.open(name, os.O_PATH | os.O_CLOEXEC)
            finally:
                os.unlink(name)
        finally:
            os.close(where)

    def __enter__(self) -> PrivateSocket:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        self.listener.close()
