"""The job's key: the one place that says how anything of a job is authenticated.

All ranks of a job have the same 32-byte secret (`launch/secret.py` says where it comes from), and nobody else has it.
From it come keys for each purpose, by HMAC-SHA256 over labels, so that a tag made for one purpose proves nothing for
another. A job without a secret uses a key that everybody knows: the same code runs, and proves nothing.

    tag     HMAC-SHA256 over the parts, each preceded by its length
    sealed  tag (32 bytes) over label, nonce and value; nonce (8); value
    hidden  nonce (8), a short token XOR a tag over label and nonce
"""

from __future__ import annotations

import hashlib
import hmac
import os

import ringway._core as _core

TAG_BYTES = 32
_NONCE_BYTES = 8
_LEAST_CHARACTERS = 32


class Forged(ValueError):
    """A value that does not come from a holder of the key."""


class Key:
    """A key of the job. It shows its secret nowhere: not in `repr`, not in a pickle."""

    __slots__ = ("_secret", "source")

    def __init__(self, secret: bytes | None = None, source: str = "") -> None:
        """`source` says in words where the secret came from."""
        self._secret = secret
        self.source = source

    @classmethod
    def from_text(cls, text: str, source: str) -> Key:
        """A key from a secret that the user chose. Raises ValueError if it is too short to be one."""
        if len(text) < _LEAST_CHARACTERS:
            raise ValueError(
                f"has {len(text)} characters, and at least {_LEAST_CHARACTERS} are needed: try `openssl rand -hex 32`"
            )
        return cls(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest(), source)

    @property
    def open(self) -> bool:
        """Whether the job has no secret."""
        return self._secret is None

    def derive(self, *labels: str | bytes) -> Key:
        """The key for one purpose."""
        return Key(None if self._secret is None else self.tag("derive", *labels), self.source)

    def tag(self, *parts: str | bytes) -> bytes:
        """Proves that someone who has the key said these parts."""
        raw = [part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part for part in parts]
        message = b"".join(len(part).to_bytes(8, "little") + part for part in raw)
        return hmac.digest(self._secret or b"", message, "sha256")

    def token(self, *labels: str) -> str:
        """32 characters that only holders of the key know. They need not be sent to other ranks."""
        return self.tag("token", *labels).hex()[:32]

    def hash_key(self) -> bytes:
        """The long key of `_core.keyed_hash`."""
        return hashlib.shake_256(self.tag("hash")).digest(_core.HASH_KEY_BYTES)

    def hide(self, label: str, token: str) -> str:
        """The token, which is at most 64 hexadecimal digits, so that only holders of the key can read it."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce.hex() + self._masked(label, nonce, token)

    def reveal(self, label: str, hidden: str) -> str:
        nonce = bytes.fromhex(hidden[: 2 * _NONCE_BYTES])
        return self._masked(label, nonce, hidden[2 * _NONCE_BYTES :])

    def _masked(self, label: str, nonce: bytes, digits: str) -> str:
        mask = self.tag("hidden", label, nonce)
        return bytes(a ^ b for a, b in zip(bytes.fromhex(digits), mask, strict=False)).hex()

    def seal(self, label: str, value: bytes) -> bytes:
        """The value, tagged. No two sealed values are equal."""
        nonce = os.urandom(_NONCE_BYTES)
        return self.tag("sealed", label, nonce, value) + nonce + value

    def unseal(self, label: str, sealed: bytes) -> bytes:
        """The value that was sealed under this label. Raises `Forged`."""
        tag, nonce, value = sealed[:TAG_BYTES], sealed[TAG_BYTES:][:_NONCE_BYTES], sealed[TAG_BYTES + _NONCE_BYTES :]
        if not self.proves(tag, "sealed", label, nonce, value):
            raise Forged(label)
        return value

    def proves(self, tag: bytes, *parts: str | bytes) -> bool:
        return hmac.compare_digest(tag, self.tag(*parts))

    def __repr__(self) -> str:
        return "Key(open)" if self.open else f"Key({self.source})"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a key is never pickled")
