"""Python objects between ranks.

An object travels on the CPU as a header and a body. The header has the length and the checksum of the body. It can
also say that the sender failed, so that a sender's failure is an error on every rank instead of a hang. A body is a
pickle (protocol 5) followed by its large buffers, which are copied once.

Any process that can join the job can run code in it, because objects are pickled. The security boundary is joining.
"""

from __future__ import annotations

import functools
import operator
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringway._core as _core
from ringway.call import Reduce, ReduceOp, parse_reduce
from ringway.errors import ObjectError, UsageError
from ringway.groups.communicator import Communicator

_MAGIC = 0x52574F31
_HEADER = struct.Struct("<IIQIQI")
_HEADER_BYTES = _HEADER.size
_CHUNK = 64 << 20
_SENT, _TOO_LARGE, _NOT_PICKLED = 0, 1, 2

_FOREIGN_LIMIT = 1 << 62


@dataclass(frozen=True)
class _Header:
    state: int
    nbytes: int
    checksum: int
    limit: int
    """The largest body that the sender accepts from other ranks."""

    def pack(self) -> Tensor:
        plain = _HEADER.pack(_MAGIC, self.state, self.nbytes, self.checksum, self.limit, 0)[:-4]
        return torch.frombuffer(bytearray(plain + struct.pack("<I", _core.crc32c(plain))), dtype=torch.uint8)

    @staticmethod
    def unpack(tensor: Tensor, sender: int) -> _Header:
        raw = tensor.numpy().tobytes()
        magic, state, nbytes, checksum, limit, own = _HEADER.unpack(raw)
        if magic != _MAGIC or own != _core.crc32c(raw[:-4]) or nbytes > _FOREIGN_LIMIT:
            raise ObjectError(f"the object message of rank {sender} is corrupt: its header is invalid", sender=sender)
        return _Header(state, nbytes, checksum, limit)


def _encode(obj: Any, limit: int) -> tuple[_Header, Tensor, BaseException | None]:
    """The object's header and body. If the body cannot be sent, it is empty, and the error is returned too."""
    nothing = torch.empty(0, dtype=torch.uint8)
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    except Exception as error:
        return _Header(_NOT_PICKLED, 0, 0, limit), nothing, error
    views = [buffer.raw() for buffer in buffers]
    lengths = struct.pack(f"<I{len(views) + 1}Q", len(views), len(head), *(view.nbytes for view in views))
    total = len(lengths) + len(head) + sum(view.nbytes for view in views)
    if total > limit:
        return _Header(_TOO_LARGE, total, 0, limit), nothing, None
    body = bytearray(total)
    place = 0
    for piece in (lengths, head, *views):
        size = piece.nbytes if isinstance(piece, memoryview) else len(piece)
        body[place : place + size] = piece
        place += size
    return _Header(_SENT, total, _core.crc32c(body), limit), torch.frombuffer(body, dtype=torch.uint8), None


def _decode(header: _Header, body: Tensor, sender: int) -> Any:
    view = memoryview(body.numpy())  # type: ignore[arg-type]
    if _core.crc32c(view) != header.checksum:
        raise ObjectError(f"the object of rank {sender} arrived damaged: its checksum does not match", sender=sender)
    try:
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
    except Exception as error:
        raise ObjectError(
            f"the object of rank {sender} cannot be unpickled here: {type(error).__name__}: {error}", sender=sender
        ) from error


def _check(header: _Header, sender: int, limit: int, cause: BaseException | None = None) -> None:
    if header.state == _NOT_PICKLED:
        raise ObjectError(f"rank {sender} could not pickle its object" + (f": {cause}" if cause else ""), sender=sender)
    if header.state == _TOO_LARGE or header.nbytes > limit:
        raise ObjectError(
            f"the object of rank {sender} has {header.nbytes} bytes, and the limit is {limit}; "
            "raise RINGWAY_MAX_OBJECT_BYTES if this is meant",
            sender=sender,
        )


class ObjectChannel:
    """The object collectives of one communicator. Ranks here are the group's own."""

    def __init__(self, communicator: Communicator, limit: int) -> None:
        self.communicator = communicator
        self._limit = limit

    def _global(self, rank: int) -> int:
        return self.communicator.ranks[rank]

    def _headers(self, mine: _Header, cause: BaseException | None) -> list[_Header]:
        """The headers of all ranks. Every rank sees the same headers and applies the smallest limit, so either all
        raise or none, and the group stays usable."""
        size = self.communicator.size
        gathered = torch.empty(size * _HEADER_BYTES, dtype=torch.uint8)
        self.communicator.all_gather_into_tensor(gathered, mine.pack(), log_name="object header")
        headers = [_Header.unpack(row, self._global(i)) for i, row in enumerate(gathered.view(size, -1))]
        limit = min(header.limit for header in headers)
        for i, header in enumerate(headers):
            _check(header, self._global(i), limit, cause if i == self.communicator.rank else None)
        return headers

    def _decoded(self, headers: list[_Header], bodies: list[Tensor]) -> list[Any]:
        pairs = zip(headers, bodies, strict=True)
        return [_decode(header, body[: header.nbytes], self._global(i)) for i, (header, body) in enumerate(pairs)]

    def all_gather(self, obj: Any) -> list[Any]:
        header, body, cause = _encode(obj, self._limit)
        headers = self._headers(header, cause)
        bodies = [torch.empty(h.nbytes, dtype=torch.uint8) for h in headers]
        self.communicator.all_gather(bodies, body, log_name="object")
        return self._decoded(headers, bodies)

    def gather(self, obj: Any, root: int) -> list[Any] | None:
        header, body, cause = _encode(obj, self._limit)
        headers = self._headers(header, cause)
        longest = max(h.nbytes for h in headers)
        bodies = None
        if self.communicator.rank == root:
            bodies = [torch.empty(longest, dtype=torch.uint8) for _ in headers]
        self.communicator.gather(_stretched(body, longest), bodies, group_dst=root, log_name="object")
        if bodies is None:
            return None
        return [
            _decode(h, b[: h.nbytes], self._global(i)) for i, (h, b) in enumerate(zip(headers, bodies, strict=True))
        ]

    def broadcast(self, obj: Any, root: int) -> Any:
        if self.communicator.rank == root:
            header, body, cause = _encode(obj, self._limit)
            self.communicator.broadcast(header.pack(), group_src=root, log_name="object header")
            _check(header, self._global(root), self._limit, cause)
            self._in_chunks(header, body, lambda piece: self._broadcast_piece(piece, root))
            return obj
        received = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self.communicator.broadcast(received, group_src=root, log_name="object header")
        return self._take(received, root, lambda piece: self._broadcast_piece(piece, root))

    def _broadcast_piece(self, piece: Tensor, root: int) -> None:
        self.communicator.broadcast(piece, group_src=root, log_name="object")

    def send(self, obj: Any, peer: int) -> None:
        header, body, cause = _encode(obj, self._limit)
        self.communicator.send(header.pack(), group_dst=peer, log_name="object header")
        _check(header, self._global(self.communicator.rank), self._limit, cause)
        self._in_chunks(header, body, lambda piece: self.communicator.send(piece, group_dst=peer, log_name="object"))

    def recv(self, peer: int | None) -> tuple[Any, int]:
        """The object, and the sender's rank in the group."""
        received = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        source = self.communicator.recv(received, group_src=peer, log_name="object header")
        sender = self.communicator.ranks.index(source)

        def piece_from(piece: Tensor) -> None:
            self.communicator.recv(piece, group_src=sender, log_name="object")

        return self._take(received, sender, piece_from), sender

    def _take(self, received: Tensor, sender: int, receive: Callable[[Tensor], None]) -> Any:
        """A body larger than this rank's limit is received piece by piece and discarded, so that the group stays in
        step. Then it is refused."""
        header = _Header.unpack(received, self._global(sender))
        if header.state != _SENT:
            _check(header, self._global(sender), self._limit)
        body = torch.empty(header.nbytes if header.nbytes <= self._limit else 0, dtype=torch.uint8)
        self._in_chunks(header, body, receive)
        _check(header, self._global(sender), self._limit)
        return _decode(header, body, self._global(sender))

    @staticmethod
    def _in_chunks(header: _Header, body: Tensor, move: Callable[[Tensor], None]) -> None:
        scrap = torch.empty(min(_CHUNK, header.nbytes) if body.numel() == 0 else 0, dtype=torch.uint8)
        for start in range(0, header.nbytes, _CHUNK):
            stop = min(start + _CHUNK, header.nbytes)
            move(body[start:stop] if body.numel() else scrap[: stop - start])

    def scatter(self, objects: Sequence[Any] | None, root: int) -> Any:
        size = self.communicator.size
        headers = torch.empty(size * _HEADER_BYTES, dtype=torch.uint8)
        bodies: list[Tensor] = []
        cause: BaseException | None = None
        if self.communicator.rank == root:
            assert objects is not None
            packed = []
            for obj in objects:
                header, body, error = _encode(obj, self._limit)
                cause = cause or error
                packed.append(header.pack())
                bodies.append(body)
            headers = torch.cat(packed)
        self.communicator.broadcast(headers, group_src=root, log_name="object header")
        rows = [
            _Header.unpack(headers[i * _HEADER_BYTES : (i + 1) * _HEADER_BYTES], self._global(root))
            for i in range(size)
        ]
        for row in rows:
            _check(row, self._global(root), row.limit, cause)
        longest = max(row.nbytes for row in rows)
        mine = torch.empty(longest, dtype=torch.uint8)
        stretched = [_stretched(body, longest) for body in bodies]
        self.communicator.scatter(mine, stretched, group_src=root, log_name="object")
        header = rows[self.communicator.rank]
        _check(header, self._global(root), self._limit)  # last, because other ranks may accept more
        return _decode(header, mine[: header.nbytes], self._global(root))


def _stretched(body: Tensor, to: int) -> Tensor:
    longer = torch.empty(to, dtype=torch.uint8)
    longer[: body.numel()] = body
    return longer


# Reducing objects

_LEAVES = (Tensor, np.ndarray, np.generic, int, float, complex)
_OPERATORS: dict[Reduce, Callable[[Any, Any], Any]] = {
    Reduce.SUM: operator.add,
    Reduce.PRODUCT: operator.mul,
    Reduce.BAND: operator.and_,
    Reduce.BOR: operator.or_,
    Reduce.BXOR: operator.xor,
}


def reduce_objects(objects: Sequence[Any], ranks: Sequence[int], op: Any = ReduceOp.SUM) -> Any:
    """Folds the ranks' objects in rank order. AVG is true division of the exact sum, also for types that would wrap or
    overflow; MIN and MAX propagate NaN, as for tensors."""
    if callable(op) and not isinstance(op, ReduceOp):
        return functools.reduce(op, objects)
    reduce, factor = parse_reduce(op)
    if reduce is Reduce.PREMUL_SUM:
        return _joined(objects, ranks, lambda leaves: functools.reduce(operator.add, [x * factor for x in leaves]))
    if reduce is Reduce.AVG:
        return _joined(objects, ranks, _mean)
    if reduce in (Reduce.MIN, Reduce.MAX):
        return _joined(objects, ranks, lambda leaves: _extreme(leaves, reduce is Reduce.MIN))
    return _joined(objects, ranks, lambda leaves: functools.reduce(_OPERATORS[reduce], leaves))


def _joined(
    objects: Sequence[Any], ranks: Sequence[int], join: Callable[[Sequence[Any]], Any], path: str = "the object"
) -> Any:
    """Joins the numbers and arrays at each place of the objects, which must have the same structure."""
    first, others = objects[0], list(zip(ranks[1:], objects[1:], strict=True))
    if isinstance(first, dict) and all(isinstance(other, dict) for _, other in others):
        for rank, other in others:
            if other.keys() != first.keys():
                odd = sorted(map(str, first.keys() ^ other.keys()))
                raise UsageError(f"reduce_object: the keys of {path} differ on rank {rank}: {', '.join(odd)}")
        return {key: _joined([one[key] for one in objects], ranks, join, f"{path}[{key!r}]") for key in first}
    if isinstance(first, (list, tuple)) and all(type(other) is type(first) for _, other in others):
        for rank, other in others:
            if len(other) != len(first):
                raise UsageError(f"reduce_object: {path} has {len(first)} entries, and {len(other)} on rank {rank}")
        entries = [_joined([one[i] for one in objects], ranks, join, f"{path}[{i}]") for i in range(len(first))]
        return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    for rank, other in others:
        if not isinstance(first, _LEAVES) or not isinstance(other, _LEAVES):
            raise UsageError(
                f"reduce_object: {path} is {type(first).__name__}, and {type(other).__name__} on rank {rank}; numbers, "
                "tensors, arrays and dicts, lists and tuples of them can be reduced, or pass a callable as op"
            )
        mine, theirs = (list(getattr(leaf, "shape", ())) for leaf in (first, other))
        if mine != theirs:
            raise UsageError(f"reduce_object: {path} has the shape {mine}, and {theirs} on rank {rank}")
    return join(objects)


def _mean(leaves: Sequence[Any]) -> Any:
    """Summed in double precision. A floating-point type keeps its type."""
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        tensors = [torch.as_tensor(leaf) for leaf in leaves]
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
        if not dtype.is_floating_point and not dtype.is_complex:
            dtype = torch.get_default_dtype()
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return (functools.reduce(operator.add, [tensor.to(wide) for tensor in tensors]) / len(leaves)).to(dtype)
    if any(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves):
        kept = np.result_type(*(np.asarray(leaf).dtype for leaf in leaves))
        kept = kept if kept.kind in "fc" else np.dtype(np.float64)
        width = np.promote_types(kept, np.float64)
        total: Any = functools.reduce(operator.add, [np.asarray(leaf).astype(width) for leaf in leaves])
        return (total / len(leaves)).astype(kept)
    return functools.reduce(operator.add, leaves) / len(leaves)


def _extreme(leaves: Sequence[Any], least: bool) -> Any:
    if any(leaf.is_complex() if isinstance(leaf, Tensor) else np.iscomplexobj(leaf) for leaf in leaves):
        raise UsageError("reduce_object: complex numbers have no minimum or maximum")
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return functools.reduce(torch.minimum if least else torch.maximum, [torch.as_tensor(leaf) for leaf in leaves])
    if any(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves):
        return functools.reduce(np.minimum if least else np.maximum, leaves)
    unordered = [leaf for leaf in leaves if leaf != leaf]  # NaN
    return unordered[0] if unordered else min(leaves) if least else max(leaves)
