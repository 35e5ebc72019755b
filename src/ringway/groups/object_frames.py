"""How an object travels: a header, and a body that is verified before anything in it is looked at.

The header has the length of the body and its tag. It can also say that the sender failed, so that a sender's failure
is an error on every rank instead of a hang. A body is a pickle (protocol 5) followed by its large buffers, which are
copied once, or with `weights_only` what `torch.save` writes.

    header     magic, state (4 bytes each); length of the body, the sender's limit (8 each); body tag, tag (16 each)
    tag        over the header, and over what it is the answer to: group, call, sender and receiver. So a replayed or
               redirected message is refused
    body tag   over the length and the keyed hash of the body (csrc/pack/keyed_hash.h)

In a job without a secret everybody knows the key, and the tags are checksums.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

import torch
from torch import Tensor

import ringway._core as _core
from ringway.errors import ObjectError
from ringway.keys import Key

_MAGIC = 0x52574F32
_FIELDS = struct.Struct("<IIQQ16s")
_TAG_BYTES = 16
HEADER_BYTES = _FIELDS.size + _TAG_BYTES
PICKLED, SAVED, TOO_LARGE, NOT_PICKLED = range(4)


@dataclass(frozen=True)
class Header:
    """What a rank says before its body."""

    state: int
    nbytes: int
    limit: int
    """The largest body that the sender accepts from other ranks."""
    body_tag: bytes = bytes(_TAG_BYTES)

    @property
    def sent(self) -> bool:
        """Whether a body follows."""
        return self.state in (PICKLED, SAVED)


class Frames:
    """Makes and verifies the frames of one group, and counts them. All ranks of the group count alike."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._hash_key = key.hash_key()
        self._counts: Counter[str] = Counter()

    def next_collective(self) -> str:
        """What identifies this object collective in the group."""
        self._counts["collective"] += 1
        return f"collective {self._counts['collective']}"

    def message(self, sender: int, receiver: int) -> str:
        """What identifies the next message between two ranks. Call `passed` when its header has been sent or read."""
        return f"message {self._counts[f'{sender} {receiver}']} to {receiver}"

    def passed(self, sender: int, receiver: int) -> None:
        self._counts[f"{sender} {receiver}"] += 1

    def pack(self, header: Header, call: str, sender: int) -> Tensor:
        fields = _FIELDS.pack(_MAGIC, header.state, header.nbytes, header.limit, header.body_tag)
        return torch.frombuffer(bytearray(fields + self._header_tag(fields, call, sender)), dtype=torch.uint8)

    def unpack(self, tensor: Tensor, call: str, sender: int, name: int) -> Header:
        """The header, once it is verified. `name` is the sender's global rank."""
        raw = tensor.numpy().tobytes()
        fields, tag = raw[: _FIELDS.size], raw[_FIELDS.size :]
        if not compare_digest(tag, self._header_tag(fields, call, sender)):
            raise ObjectError(
                f"the object message of rank {name} is corrupt: its header is invalid{self._who}", sender=name
            )
        _, state, nbytes, limit, body_tag = _FIELDS.unpack(fields)
        return Header(state, nbytes, limit, body_tag)

    def _header_tag(self, fields: bytes, call: str, sender: int) -> bytes:
        return self._key.tag("header", call, str(sender), fields)[:_TAG_BYTES]

    def _body_tag(self, body: Any, nbytes: int) -> bytes:
        return self._key.tag("body", str(nbytes), _core.keyed_hash(self._hash_key, body))[:_TAG_BYTES]

    @property
    def _who(self) -> str:
        return "" if self._key.open else ". A process without the job's secret sent or changed it"

    def encode(self, obj: Any, limit: int, weights_only: bool) -> tuple[Header, Tensor, BaseException | None]:
        """The object's header and body. If the body cannot be sent, it is empty, and the error is returned too."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            pieces = _saved(obj) if weights_only else _pickled(obj)
        except Exception as error:
            return Header(NOT_PICKLED, 0, limit), nothing, error
        total = sum(piece.nbytes for piece in pieces)
        if total > limit:
            return Header(TOO_LARGE, total, limit), nothing, None
        body = torch.empty(total, dtype=torch.uint8, device="cpu")
        view, place = _bytes_of(body), 0
        for piece in pieces:
            view[place : place + piece.nbytes] = piece
            place += piece.nbytes
        return Header(SAVED if weights_only else PICKLED, total, limit, self._body_tag(view, total)), body, None

    def decode(self, header: Header, body: Tensor, sender: int, weights_only: bool) -> Any:
        """The object in a verified body. `sender` is a global rank."""
        view = _bytes_of(body)
        if not compare_digest(self._body_tag(view, header.nbytes), header.body_tag):
            raise ObjectError(
                f"the object of rank {sender} arrived damaged: its checksum does not match{self._who}", sender=sender
            )
        if weights_only and header.state != SAVED:
            raise ObjectError(
                f"rank {sender} sent a pickle, and this rank takes weights only; pass weights_only=True on all ranks",
                sender=sender,
            )
        try:
            if header.state == SAVED:
                return torch.load(io.BytesIO(view), weights_only=True)
            return _unpickled(view)
        except Exception as error:
            raise ObjectError(
                f"the object of rank {sender} cannot be unpickled here: {type(error).__name__}: {error}", sender=sender
            ) from error


def _bytes_of(body: Tensor) -> memoryview:
    return memoryview(body.numpy())  # type: ignore[arg-type]


def _saved(obj: Any) -> list[memoryview]:
    file = io.BytesIO()
    torch.save(obj, file)
    return [file.getbuffer()]


def _pickled(obj: Any) -> list[memoryview]:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    lengths = struct.pack(f"<I{len(views) + 1}Q", len(views), len(head), *(view.nbytes for view in views))
    return [memoryview(lengths), memoryview(head), *views]


def _unpickled(view: memoryview) -> Any:
    count, first = struct.unpack_from("<IQ", view)
    lengths = struct.unpack_from(f"<{count}Q", view, 12)
    place = 12 + 8 * count
    head = view[place : place + first]
    place += first
    buffers = []
    for length in lengths:
        buffers.append(view[place : place + length])
        place += length
    return pickle.loads(head, buffers=buffers)


def check(header: Header, sender: int, limit: int, cause: BaseException | None = None) -> None:
    """Raises if the sender, a global rank, could not send its object, or if it is too large."""
    if header.state == NOT_PICKLED:
        raise ObjectError(f"rank {sender} could not pickle its object" + (f": {cause}" if cause else ""), sender=sender)
    if header.state == TOO_LARGE or header.nbytes > limit:
        raise ObjectError(
            f"the object of rank {sender} has {header.nbytes} bytes, and the limit is {limit}; "
            "raise RINGWAY_MAX_OBJECT_BYTES if this is meant",
            sender=sender,
        )
