"""What a rank does in each direct collective of CUDA tensors.

Mostly a rank reads the other ranks' memory and writes its own. If all ranks are on one GPU, two calls are better done
otherwise. A broadcast's root writes to all others, so its tensor is read only once. And if the ranks' processes take
turns on the GPU, one rank does a whole all_reduce: a turn of another process costs 200 µs, and streams that only wait
take none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import ringway._core as _core
from ringway import call as ops
from ringway.backends.shm.cuda_device import reduces_as
from ringway.backends.tensors import overlap
from ringway.call import Call

_ALIGNMENT = 64
"""Elements to which a rank's share of a reduction is rounded up, so that all shares are aligned."""

Span = tuple[int, int]
"""The address and the bytes of a piece of device memory."""
Body = Callable[[Any, dict[int, int], list[int]], None]
"""Enqueues a rank's part of a call on a stream, given the addresses of the other ranks' memory by rank, and those of
the memory that this rank offered."""


@dataclass
class Part:
    """A rank's part of a direct call: what it offers to the others, whose memory it needs, and what it does."""

    offered: list[Span]
    wanted: list[tuple[int, int]]
    body: Body
    expected: list[int] = field(default_factory=list)
    """The bytes that an all_to_all receives from each rank."""
    hidden: bool = False
    """Whether the offered memory must be copied before others may read it: this rank writes to parts of it."""
    written: bool = False
    """Whether others write to the offered memory."""
    worker: int = _core.SHM_EVERY_RANK
    """The rank that does all the work."""


class Place(Protocol):
    """A rank of a group, and how it enqueues work on its device."""

    rank: int
    size: int
    takes_turns: bool
    """Whether all ranks are on one GPU, and their processes take turns on it."""
    one_gpu: bool
    """Whether all ranks are on one GPU, and have the kernels."""

    def enqueue_copies(self, stream: Any, copies: list[tuple[int, int, int]]) -> None:
        """Copies to an address, from an address, of a number of bytes."""

    def enqueue_reduction(self, stream: Any, call: Call, ins: list[int], outs: list[int], count: int) -> None:
        """Reduces arrays of `count` elements, in order, into every output."""

    def enqueue_spread(self, stream: Any, source: int, outs: list[int], nbytes: int) -> None:
        """Copies bytes into every output, and reads them once."""


def _others(me: Place) -> list[int]:
    return [rank for rank in range(me.size) if rank != me.rank]


def _all_reduce_part(me: Place, call: Call) -> Part:
    tensor = call.outputs[0]
    count, width = tensor.numel(), tensor.element_size()
    if me.takes_turns and me.rank != 0:
        return Part([_span(tensor)], [], _nothing, written=True, worker=0)
    share = count if me.takes_turns else rounded(-(-count // me.size), _ALIGNMENT)
    start = min(me.rank * share, count)
    mine = min(share, count - start)

    def body(stream: Any, addresses: dict[int, int], own: list[int]) -> None:
        at = [addresses.get(rank, own[0]) + start * width for rank in range(me.size)]
        me.enqueue_reduction(stream, call, at, at, mine)

    wanted = [(rank, 0) for rank in _others(me)]
    return Part([_span(tensor)], wanted, body, written=True, worker=0 if me.takes_turns else _core.SHM_EVERY_RANK)


def _reduce_part(me: Place, call: Call) -> Part:
    source, target = call.inputs[0], call.outputs[0]
    root = me.rank == call.peer
    wanted = [(rank, 0) for rank in _others(me)] if root else []

    def body(stream: Any, addresses: dict[int, int], own: list[int]) -> None:
        if root:
            at = [addresses.get(rank, own[0]) for rank in range(me.size)]
            me.enqueue_reduction(stream, call, at, [target.data_ptr()], source.numel())

    return Part([_span(source)], wanted, body, hidden=root and _overlap_askew(target, source), worker=call.peer)


def _broadcast_part(me: Place, call: Call) -> Part:
    tensor = call.outputs[0]
    root = me.rank == call.peer
    if not me.one_gpu:
        return Part([_span(tensor)], [], _nothing) if root else _pulls(me, [], [(call.peer, 0, tensor)])
    if not root:
        return Part([_span(tensor)], [], _nothing, written=True, worker=call.peer)

    def body(stream: Any, addresses: dict[int, int], own: list[int]) -> None:
        me.enqueue_spread(stream, tensor.data_ptr(), list(addresses.values()), tensor.nbytes)

    return Part([], [(rank, 0) for rank in _others(me)], body, worker=call.peer)


def _gather_part(me: Place, call: Call) -> Part:
    source = call.inputs[0]
    if call.op is ops.ALL_GATHER_SINGLE:
        outputs = list(call.outputs[0].view(-1).split(source.numel())) if source.numel() else []
    else:
        outputs = list(call.outputs)
    worker = call.peer if call.op is ops.GATHER else _core.SHM_EVERY_RANK
    if not outputs:
        return Part([_span(source)], [], _nothing, worker=worker)
    pulled = [(rank, 0, outputs[rank]) for rank in _others(me)]
    part = _pulls(me, [source], pulled, kept=(source, outputs[me.rank]))
    part.worker = worker
    return part


def _scatter_part(me: Place, call: Call) -> Part:
    if me.rank == call.peer:
        return _pulls(me, list(call.inputs), [], kept=(call.inputs[me.rank], call.outputs[0]))
    return _pulls(me, [], [(call.peer, me.rank, call.outputs[0])])


def _all_to_all_part(me: Place, call: Call) -> Part:
    if call.op is ops.ALL_TO_ALL_SINGLE:
        inputs = _pieces(call.inputs[0], call.input_splits, me.size)
        outputs = _pieces(call.outputs[0], call.output_splits, me.size)
    else:
        inputs, outputs = list(call.inputs), list(call.outputs)
    part = _pulls(
        me,
        inputs,
        [(rank, me.rank, outputs[rank]) for rank in _others(me)],
        kept=(inputs[me.rank], outputs[me.rank]),
    )
    part.expected = [output.nbytes for output in outputs]
    return part


def _reduce_scatter_part(me: Place, call: Call) -> Part:
    target = call.outputs[0]
    single = call.op is ops.REDUCE_SCATTER_SINGLE
    inputs = _pieces(call.inputs[0].view(-1), None, me.size) if single else list(call.inputs)

    def body(stream: Any, addresses: dict[int, int], own: list[int]) -> None:
        at = [addresses.get(rank, own[me.rank]) for rank in range(me.size)]
        me.enqueue_reduction(stream, call, at, [target.data_ptr()], target.numel())

    part = Part([_span(tensor) for tensor in inputs], [(rank, me.rank) for rank in _others(me)], body)
    part.hidden = _written_where_read([target], inputs, me.rank) or _overlap_askew(target, inputs[me.rank])
    return part


def _pulls(
    me: Place,
    offered: list[Tensor],
    pulled: list[tuple[int, int, Tensor]],
    kept: tuple[Tensor, Tensor] | None = None,
) -> Part:
    """Copies spans of other ranks into tensors of this one, and `kept` within this rank: one offered, one not."""
    own_place = me.rank if len(offered) > 1 else 0

    def body(stream: Any, addresses: dict[int, int], own: list[int]) -> None:
        copies = []
        if kept is not None and kept[0].data_ptr() != kept[1].data_ptr():
            copies.append((kept[1].data_ptr(), own[own_place], kept[1].nbytes))
        copies += [(target.data_ptr(), addresses[rank], target.nbytes) for rank, _, target in pulled]
        me.enqueue_copies(stream, copies)

    part = Part([_span(tensor) for tensor in offered], [(rank, place) for rank, place, _ in pulled], body)
    targets = [target for _, _, target in pulled]
    if kept is not None and kept[0].data_ptr() != kept[1].data_ptr():
        part.hidden = overlap(*kept)
        targets.append(kept[1])
    unread = me.rank if len(offered) > 1 else -1
    part.hidden = part.hidden or _written_where_read(targets, offered, unread)
    return part


def _span(tensor: Tensor) -> Span:
    return tensor.data_ptr(), tensor.nbytes


def rounded(count: int, to: int = 256) -> int:
    return -(-count // to) * to


def count_of(call: Call) -> int:
    """The elements that the ranks compare, as shm's own calls do."""
    scattered = call.op in (ops.SCATTER, ops.REDUCE_SCATTER, ops.REDUCE_SCATTER_SINGLE)
    return (call.outputs if scattered else call.inputs)[0].numel()


def reduced_as(call: Call) -> tuple[torch.dtype, int]:
    found = reduces_as(call.inputs[0].dtype, call.reduce)
    assert found is not None, "such a call goes through the host"
    return found


def _pieces(tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[Tensor]:
    """A tensor's rows, split among the ranks."""
    rows = tensor.shape[0] if tensor.dim() else 1
    flat = tensor.view(-1)
    width = flat.numel() // rows if rows else 0
    return list(flat.split([rows_of * width for rows_of in splits or [rows // size] * size]))


def _written_where_read(targets: Sequence[Tensor], offered: Sequence[Tensor], unread: int) -> bool:
    """Whether this rank writes to memory that other ranks read. They do not read the block `unread`."""
    return any(overlap(target, source) for target in targets for place, source in enumerate(offered) if place != unread)


def _overlap_askew(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory without being the same."""
    return overlap(one, other) and one.data_ptr() != other.data_ptr()


def _nothing(stream: Any, addresses: dict[int, int], own: list[int]) -> None:
    """For a rank whose memory others use, and that has nothing else to do."""


PARTS: dict[str, Callable[[Place, Call], Part]] = {
    ops.ALL_REDUCE.name: _all_reduce_part,
    ops.REDUCE.name: _reduce_part,
    ops.BROADCAST.name: _broadcast_part,
    ops.ALL_GATHER.name: _gather_part,
    ops.ALL_GATHER_SINGLE.name: _gather_part,
    ops.GATHER.name: _gather_part,
    ops.SCATTER.name: _scatter_part,
    ops.ALL_TO_ALL.name: _all_to_all_part,
    ops.ALL_TO_ALL_SINGLE.name: _all_to_all_part,
    ops.REDUCE_SCATTER.name: _reduce_scatter_part,
    ops.REDUCE_SCATTER_SINGLE.name: _reduce_scatter_part,
}
"""By op: this rank's part of a call."""
