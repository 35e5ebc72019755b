"""What the launcher's private store and its clients say to each other. Both sides of every connection prove that they
have the job's secret:

    server -> client    name of the run (32 bytes), nonce (32)
    client -> server    nonce (32), tag over both nonces
    server -> client    tag over both nonces

Then requests and replies alternate, in frames: length (4 bytes), tag (32), body. The tag covers the direction, the
number of the frame and the body, under a key that only this connection has: nobody on the network can add, change,
repeat or drop a frame unnoticed. The contents are not encrypted. The body of a request is an op's name, a time limit in
ms, and the op's arguments; a reply is a list of values, or empty for a wait that timed out or an `add` to a value that
is not an integer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ringway.keys import TAG_BYTES, Key

RUN_BYTES = 32
NONCE_BYTES = 32
HELLO_SECONDS = 10.0
LENGTH = struct.Struct("<I")
HEAD_BYTES = LENGTH.size + TAG_BYTES
_FRAME_LIMIT = 64 << 20

CLIENT, SERVER = "client", "server"


def pack(fields: Sequence[bytes]) -> bytes:
    return b"".join(LENGTH.pack(len(field)) + field for field in fields)


def unpack(body: bytes) -> list[bytes]:
    fields, at = [], 0
    while at < len(body):
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size + length
        if at > len(body):
            raise ValueError("a field is cut off")
        fields.append(body[at - length : at])
    return fields


class Session:
    """One connection after its hello, as one side of it sees it."""

    def __init__(self, key: Key, side: str, server_nonce: bytes, client_nonce: bytes) -> None:
        self._key = key.derive("store connection", server_nonce, client_nonce)
        self._side, self._other = (CLIENT, SERVER) if side == CLIENT else (SERVER, CLIENT)
        self._sent = self._received = 0
        self.proof = self._key.tag("proof", self._side)

    def is_proven_by(self, proof: bytes) -> bool:
        """Whether the other side has the job's secret."""
        return self._key.proves(proof, "proof", self._other)

    def frame(self, fields: Sequence[bytes]) -> bytes:
        """The next frame to send."""
        body = pack(fields)
        self._sent += 1
        return LENGTH.pack(len(body)) + self._key.tag(self._side, str(self._sent), body) + body

    @staticmethod
    def body_length(head: bytes | bytearray) -> int:
        """The length of a frame's body. It is not proven yet."""
        (length,) = LENGTH.unpack_from(head)
        if length > _FRAME_LIMIT:
            raise ConnectionError("a frame has an impossible length")
        return int(length)

    def opened(self, head: bytes, body: bytes) -> list[bytes]:
        """The fields of the next frame that was received."""
        self._received += 1
        if not self._key.proves(head[LENGTH.size :], self._other, str(self._received), body):
            raise ConnectionError("a frame does not come from the other side of the connection")
        return unpack(body)
