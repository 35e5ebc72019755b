"""The private store of `ringway run`, in the launcher: one thread serves it, so it survives any rank. On one host it
listens on a unix socket of mode 0600; across hosts, on one address. `store_protocol.py` says how clients prove that
they have the job's secret; a connection that says anything else is closed.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from ringway.keys import TAG_BYTES, Key
from ringway.launch.store_protocol import HEAD_BYTES, HELLO_SECONDS, NONCE_BYTES, SERVER, Session
from ringway.threads import start

_MOST_STRANGERS = 256
"""Connections that have proved nothing yet. One makes room for the next: the oldest from the address that has the most.
So a flood drops its own, and not a rank of another host."""


class StoreServer:
    """Serves the store of a run on a listening socket until it is closed."""

    def __init__(self, listener: socket.socket, run: str, key: Key) -> None:
        self._run_name = run.encode()
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
            connection, address = self._listener.accept()
        except OSError:  # the peer has gone, or descriptors ran out: it tries again
            time.sleep(0.01)
            return
        connection.setblocking(False)
        strangers = [peer for peer in self._peers if not peer.proved]
        if len(strangers) >= _MOST_STRANGERS:
            counts = Counter(peer.source for peer in strangers)
            self._drop(min(strangers, key=lambda peer: (-counts[peer.source], peer.hello_until)))
        peer = _Peer(connection, address[0] if address else "")
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._send(peer, self._run_name + peer.nonce)

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
            while (request := peer.next_request()) is not None:
                self._answer(peer, request)
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, IndexError, struct.error):  # it does not speak the protocol
            self._drop(peer)

    def _send(self, peer: _Peer, data: bytes) -> None:
        """Sends all of it. A peer that does not read its replies for so long is dropped."""
        try:
            peer.connection.settimeout(HELLO_SECONDS)
            peer.connection.sendall(data)
        except OSError:
            self._drop(peer)
        else:
            peer.connection.setblocking(False)

    def _reply(self, peer: _Peer, values: Sequence[bytes]) -> None:
        assert peer.session is not None
        self._send(peer, peer.session.frame(values))

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

    def __init__(self, connection: socket.socket, source: str) -> None:
        self.connection = connection
        self.source = source
        self.nonce = os.urandom(NONCE_BYTES)
        self.received = bytearray()
        self.session: Session | None = None
        self.hello_until = time.monotonic() + HELLO_SECONDS

    @property
    def proved(self) -> bool:
        return self.session is not None

    def prove(self, key: Key) -> bytes | None:
        """The server's answer to the client's proof; None if not all of that is here. Raises if it proves nothing."""
        if len(self.received) < NONCE_BYTES + TAG_BYTES:
            return None
        nonce, proof = self._take(NONCE_BYTES), self._take(TAG_BYTES)
        session = Session(key, SERVER, self.nonce, nonce)
        if not session.is_proven_by(proof):
            raise ConnectionError("the client does not have the job's secret")
        self.session = session
        return session.proof

    def next_request(self) -> list[bytes] | None:
        """The next request, or None if not all of it is here."""
        assert self.session is not None
        if len(self.received) < HEAD_BYTES:
            return None
        length = self.session.body_length(self.received)
        if len(self.received) < HEAD_BYTES + length:
            return None
        return self.session.opened(self._take(HEAD_BYTES), self._take(length))

    def _take(self, count: int) -> bytes:
        taken = bytes(self.received[:count])
        del self.received[:count]
        return taken


class _Waiting:
    """A request for values that are not there yet."""

    def __init__(self, peer: _Peer, keys: Sequence[bytes], until: float) -> None:
        self.peer, self.keys, self.until = peer, keys, until


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
