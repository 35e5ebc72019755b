"""Python objects between ranks. `object_frames.py` says how one travels.

Objects are pickled, so any process that can join the job can run code in it. With a job secret, only holders of the
secret can join, and a message that does not prove it is refused before it is unpickled.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringway.call import Reduce, ReduceOp, parse_reduce
from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.object_frames import HEADER_BYTES, Header, check

_CHUNK = 64 << 20


class ObjectChannel:
    """The object collectives of one communicator. Ranks here are the group's own.

    With `weights_only` an object travels as `torch.save` writes it and is read by `torch.load(weights_only=True)`.
    """

    def __init__(self, communicator: Communicator, limit: int, weights_only: bool = False) -> None:
        self.communicator = communicator
        self._rank = communicator.rank
        self._frames = communicator.frames
        self._limit = limit
        self._weights_only = weights_only

    def _global(self, rank: int) -> int:
        return self.communicator.ranks[rank]

    def _encode(self, obj: Any) -> tuple[Header, Tensor, BaseException | None]:
        return self._frames.encode(obj, self._limit, self._weights_only)

    def _decode(self, header: Header, body: Tensor, sender: int) -> Any:
        return self._frames.decode(header, body, self._global(sender), self._weights_only)

    def _headers(self, mine: Header, cause: BaseException | None) -> list[Header]:
        """The headers of all ranks. Every rank sees the same headers and applies the smallest limit, so either all
        raise or none, and the group stays usable."""
        size, call = self.communicator.size, self._frames.next_collective()
        gathered = torch.empty(size * HEADER_BYTES, dtype=torch.uint8, device="cpu")
        packed = self._frames.pack(mine, call, self._rank)
        self.communicator.all_gather_into_tensor(gathered, packed, log_name="object header")
        rows = gathered.view(size, -1)
        headers = [self._frames.unpack(row, call, i, self._global(i)) for i, row in enumerate(rows)]
        limit = min(header.limit for header in headers)
        for i, header in enumerate(headers):
            check(header, self._global(i), limit, cause if i == self._rank else None)
        return headers

    def _decoded(self, headers: list[Header], bodies: list[Tensor]) -> list[Any]:
        pairs = zip(headers, bodies, strict=True)
        return [self._decode(header, body[: header.nbytes], i) for i, (header, body) in enumerate(pairs)]

    def all_gather(self, obj: Any) -> list[Any]:
        header, body, cause = self._encode(obj)
        headers = self._headers(header, cause)
        bodies = [torch.empty(h.nbytes, dtype=torch.uint8, device="cpu") for h in headers]
        self.communicator.all_gather(bodies, body, log_name="object")
        return self._decoded(headers, bodies)

    def gather(self, obj: Any, root: int) -> list[Any] | None:
        header, body, cause = self._encode(obj)
        headers = self._headers(header, cause)
        longest = max(h.nbytes for h in headers)
        bodies = None
        if self._rank == root:
            bodies = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in headers]
        self.communicator.gather(_stretched(body, longest), bodies, group_dst=root, log_name="object")
        return None if bodies is None else self._decoded(headers, bodies)

    def broadcast(self, obj: Any, root: int) -> Any:
        call = self._frames.next_collective()
        if self._rank == root:
            header, body, cause = self._encode(obj)
            packed = self._frames.pack(header, call, root)
            self.communicator.broadcast(packed, group_src=root, log_name="object header")
            check(header, self._global(root), self._limit, cause)
            self._in_chunks(header, body, lambda piece: self._broadcast_piece(piece, root))
            return obj
        received = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        self.communicator.broadcast(received, group_src=root, log_name="object header")
        return self._take(received, call, root, lambda piece: self._broadcast_piece(piece, root))

    def _broadcast_piece(self, piece: Tensor, root: int) -> None:
        self.communicator.broadcast(piece, group_src=root, log_name="object")

    def send(self, obj: Any, peer: int) -> None:
        header, body, cause = self._encode(obj)
        packed = self._frames.pack(header, self._frames.message(self._rank, peer), self._rank)
        self.communicator.send(packed, group_dst=peer, log_name="object header")
        self._frames.passed(self._rank, peer)
        check(header, self._global(self._rank), self._limit, cause)
        self._in_chunks(header, body, lambda piece: self.communicator.send(piece, group_dst=peer, log_name="object"))

    def recv(self, peer: int | None) -> tuple[Any, int]:
        """The object, and the sender's rank in the group."""
        received = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        source = self.communicator.recv(received, group_src=peer, log_name="object header")
        sender = self.communicator.ranks.index(source)
        call = self._frames.message(sender, self._rank)
        self._frames.passed(sender, self._rank)

        def piece_from(piece: Tensor) -> None:
            self.communicator.recv(piece, group_src=sender, log_name="object")

        return self._take(received, call, sender, piece_from), sender

    def _take(self, received: Tensor, call: str, sender: int, receive: Callable[[Tensor], None]) -> Any:
        """A body larger than this rank's limit is received piece by piece and discarded, so that the group stays in
        step. Then it is refused."""
        header = self._frames.unpack(received, call, sender, self._global(sender))
        if not header.sent:
            check(header, self._global(sender), self._limit)
        body = torch.empty(header.nbytes if header.nbytes <= self._limit else 0, dtype=torch.uint8, device="cpu")
        self._in_chunks(header, body, receive)
        check(header, self._global(sender), self._limit)
        return self._decode(header, body, sender)

    @staticmethod
    def _in_chunks(header: Header, body: Tensor, move: Callable[[Tensor], None]) -> None:
        scrap = torch.empty(min(_CHUNK, header.nbytes) if body.numel() == 0 else 0, dtype=torch.uint8, device="cpu")
        for start in range(0, header.nbytes, _CHUNK):
            stop = min(start + _CHUNK, header.nbytes)
            move(body[start:stop] if body.numel() else scrap[: stop - start])

    def scatter(self, objects: Sequence[Any] | None, root: int) -> Any:
        size, call = self.communicator.size, self._frames.next_collective()
        headers = torch.empty(size * HEADER_BYTES, dtype=torch.uint8, device="cpu")
        bodies: list[Tensor] = []
        cause: BaseException | None = None
        if self._rank == root:
            assert objects is not None
            packed = []
            for place, obj in enumerate(objects):
                header, body, error = self._encode(obj)
                cause = cause or error
                packed.append(self._frames.pack(header, f"{call} to {place}", root))
                bodies.append(body)
            headers = torch.cat(packed)
        self.communicator.broadcast(headers, group_src=root, log_name="object header")
        rows = [
            self._frames.unpack(row, f"{call} to {place}", root, self._global(root))
            for place, row in enumerate(headers.view(size, -1))
        ]
        for row in rows:
            check(row, self._global(root), row.limit, cause)
        longest = max(row.nbytes for row in rows)
        mine = torch.empty(longest, dtype=torch.uint8, device="cpu")
        stretched = [_stretched(body, longest) for body in bodies]
        self.communicator.scatter(mine, stretched, group_src=root, log_name="object")
        header = rows[self._rank]
        check(header, self._global(root), self._limit)  # last, because other ranks may accept more
        return self._decode(header, mine[: header.nbytes], root)


def _stretched(body: Tensor, to: int) -> Tensor:
    longer = torch.empty(to, dtype=torch.uint8, device="cpu")
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
