"""Ops that a backend does not have, composed of those it has. Decided once, when a communicator is built.

Each composition sends one kind of message, all of it when the call is issued, and does the rest locally. So an
asynchronous composition keeps the group's order: nothing is issued from a completion callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringway import call as ops
from ringway.backends.base import Backend, supports
from ringway.backends.staging import BOOL_AS_BYTES, SMALL_INTEGERS, Runner, divide, native
from ringway.call import Call, Op, Reduce
from ringway.errors import BackendUnavailable
from ringway.work import DONE, Handle, Together

_HALVES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Routes:
    """How each op runs on one backend: its runner, and where it comes from, in words."""

    runners: dict[str, Runner]
    origins: dict[str, str]


def routes_of(backend: Backend) -> Routes:
    """Decides for every op: native, composed, or refused by name when the communicator is built."""
    if backend.own_routes is not None:
        return backend.own_routes
    runners: dict[str, Runner] = {}
    origins: dict[str, str] = {}
    for op in ops.OPS:
        if supports(backend, op.name):
            runners[op.name] = native(backend, getattr(backend, op.name))
            origins[op.name] = backend.origins.get(op.name, "native")
    for op, needs, compose in _COMPOSITIONS:
        if op.name in runners:
            continue
        if needs.name not in runners:
            raise BackendUnavailable(
                backend.name, f"it has neither {op.name} nor {needs.name}, from which it could be composed"
            )
        runners[op.name] = compose(backend, runners[needs.name])
        origins[op.name] = f"composed of {needs.name}"
    missing = [op.name for op in ops.OPS if op.name not in runners]
    if missing:
        raise BackendUnavailable(backend.name, f"it lacks {', '.join(missing)}")
    exchange = runners[ops.ALL_TO_ALL.name]
    runners[ops.ALL_GATHER.name] = _even_or(runners[ops.ALL_GATHER.name], _uneven_all_gather(exchange))
    runners[ops.REDUCE_SCATTER.name] = _even_or(runners[ops.REDUCE_SCATTER.name], _uneven_reduce_scatter(exchange))
    return Routes(runners, origins)


# Reducing locally


def reduce_rows(rows: Sequence[Tensor], reduce: Reduce, factor: Any = None) -> Tensor:
    """Reduces tensors of equal shape in order. Half types accumulate in fp32 and are rounded once."""
    dtype = rows[0].dtype
    if dtype is torch.bool:
        as_bytes = [row.view(torch.uint8) for row in rows]
        return reduce_rows(as_bytes, BOOL_AS_BYTES[reduce]).view(torch.bool)
    wide = torch.float32 if dtype in _HALVES else dtype
    if reduce is Reduce.AVG and dtype in SMALL_INTEGERS:
        wide = torch.int64
    total = rows[0].to(wide, copy=True)
    if reduce is Reduce.PREMUL_SUM:
        total.mul_(factor)
    for row in rows[1:]:
        _accumulate(total, row.to(wide), reduce, factor)
    if reduce is Reduce.AVG:
        divide(total, len(rows))
    return total.to(dtype)


def padded(flat: Tensor, parts: int) -> Tensor:
    """The tensor, with zeros at its end if it does not divide into equal parts."""
    short = -flat.numel() % parts
    return torch.cat([flat, flat.new_zeros(short)]) if short else flat


def reduced_share(call: Call, exchange: Callable[[Tensor, Tensor], None]) -> Tensor:
    """This rank's share of a reduction that the library does not have, or would round at each step.

    `exchange(source, target)` sends an equal part of `source` to each rank. The parts are reduced here, in rank order.
    """
    source = padded(call.inputs[0].reshape(-1), call.size)
    received = torch.empty_like(source)
    exchange(source, received)
    return reduce_rows(list(received.view(call.size, -1)), call.reduce, call.factor)


def reduced(call: Call, exchange: Callable[[Tensor, Tensor], None], gather: Callable[[Tensor, Tensor], None]) -> Tensor:
    """The whole of such a reduction. `gather(share, whole)` joins every rank's share, wherever the result is needed."""
    with in_parts():
        share = reduced_share(call, exchange)
        whole = share.new_empty(share.numel() * call.size)
        gather(share, whole)
    return whole[: call.inputs[0].numel()].view(call.inputs[0].shape)


def _accumulate(total: Tensor, row: Tensor, reduce: Reduce, factor: Any) -> None:
    if reduce in (Reduce.SUM, Reduce.AVG):
        total.add_(row)
    elif reduce is Reduce.PREMUL_SUM:
        total.add_(row * factor)
    elif reduce is Reduce.PRODUCT:
        total.mul_(row)
    elif reduce is Reduce.MIN:
        torch.minimum(total, row, out=total)
    elif reduce is Reduce.MAX:
        torch.maximum(total, row, out=total)
    elif reduce is Reduce.BAND:
        total.bitwise_and_(row)
    elif reduce is Reduce.BOR:
        total.bitwise_or_(row)
    else:
        total.bitwise_xor_(row)


# Compositions


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    parts = [t.contiguous().view(-1) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scatter_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _all_to_all(backend: Backend, single: Runner) -> Runner:
    """The list form, through one flat exchange with splits."""

    def run(call: Call) -> Handle:
        received = torch.empty(
            sum(t.numel() for t in call.outputs), dtype=call.outputs[0].dtype, device=call.outputs[0].device
        )
        handle = single(
            replace(
                call,
                op=ops.ALL_TO_ALL_SINGLE,
                inputs=[_flat(call.inputs)],
                outputs=[received],
                input_splits=[t.numel() for t in call.inputs],
                output_splits=[t.numel() for t in call.outputs],
            )
        )
        return handle.then(lambda: _scatter_back(received, call.outputs))

    return run


def _all_to_all_single(backend: Backend, lists: Runner) -> Runner:
    """The flat form, through the list form on views of the buffers."""

    def run(call: Call) -> Handle:
        def pieces(tensor: Tensor, splits: Sequence[int] | None) -> list[Tensor]:
            rows = tensor.shape[0] // call.size
            return list(tensor.split(list(splits) if splits is not None else [rows] * call.size))

        return lists(
            replace(
                call,
                op=ops.ALL_TO_ALL,
                inputs=pieces(call.inputs[0], call.input_splits),
                outputs=pieces(call.outputs[0], call.output_splits),
                input_splits=None,
                output_splits=None,
            )
        )

    return run


def _reduce_scatter_single(backend: Backend, single: Runner) -> Runner:
    """Each share is sent once; each rank reduces its own, in rank order."""

    def run(call: Call) -> Handle:
        source, output = call.inputs[0].contiguous().view(-1), call.outputs[0]
        received = torch.empty_like(source)
        handle = single(replace(call, op=ops.ALL_TO_ALL_SINGLE, inputs=[source], outputs=[received]))

        def finish() -> None:
            rows = list(received.view(call.size, -1))
            output.copy_(reduce_rows(rows, call.reduce, call.factor).view(output.shape))

        return handle.then(finish)

    return run


def _reduce_scatter(backend: Backend, single: Runner) -> Runner:
    def run(call: Call) -> Handle:
        return single(replace(call, op=ops.REDUCE_SCATTER_SINGLE, inputs=[_flat(call.inputs)]))

    return run


def _all_gather(backend: Backend, single: Runner) -> Runner:
    def run(call: Call) -> Handle:
        source = call.inputs[0].contiguous().view(-1)
        gathered = source.new_empty(source.numel() * call.size)
        handle = single(replace(call, op=ops.ALL_GATHER_SINGLE, inputs=[source], outputs=[gathered]))
        return handle.then(lambda: _scatter_back(gathered, call.outputs))

    return run


def _all_gather_single(backend: Backend, lists: Runner) -> Runner:
    def run(call: Call) -> Handle:
        output = call.outputs[0]
        gathered = output if output.is_contiguous() else output.new_empty(output.shape)
        parts = list(gathered.view(-1).chunk(call.size)) if output.numel() else [gathered.view(-1)] * call.size
        handle = lists(replace(call, op=ops.ALL_GATHER, inputs=[call.inputs[0].reshape(-1)], outputs=parts))
        return handle if gathered is output else handle.then(lambda: _discard(output.copy_(gathered)))

    return run


def _discard(_: object) -> None:
    """For a callback that must return nothing."""


def _all_reduce_coalesced(backend: Backend, one: Runner) -> Runner:
    """One all_reduce per dtype, over the joined tensors."""

    def run(call: Call) -> Handle:
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in call.inputs:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        return _together(partial(_joined, call, tensors, one) for tensors in by_kind.values())

    return run


def _together(starts: Iterable[Callable[[], Handle]]) -> Handle:
    """Starts the parts of one call."""
    handles: list[Handle] = []
    for start in starts:
        with in_parts() if handles else nullcontext():
            handles.append(start())
    return Together(handles)


@contextmanager
def in_parts() -> Iterator[None]:
    """Around what follows the first part of a call that is sent in several. The other ranks wait for the rest, so an
    error here, such as a signal handler's, ends the group (`groups/health.py`)."""
    try:
        yield
    except BaseException as error:
        error.sent_in_part = True  # type: ignore[attr-defined]
        raise


def _joined(call: Call, tensors: list[Tensor], one: Runner) -> Handle:
    if len(tensors) == 1 or call.size == 1:  # joining them saves messages, and one rank sends none
        alone = (replace(call, op=ops.ALL_REDUCE, inputs=[each], outputs=[each]) for each in tensors)
        return _together(partial(one, part) for part in alone)
    flat = _flat(tensors)
    handle = one(replace(call, op=ops.ALL_REDUCE, inputs=[flat], outputs=[flat]))
    return handle.then(lambda: _scatter_back(flat, tensors))


def _one_by_one(op: Op) -> Callable[[Backend, Runner], Runner]:
    """A coalesced call as its members, in order, under one handle."""

    def compose(backend: Backend, one: Runner) -> Runner:
        def run(call: Call) -> Handle:
            if not call.inputs:
                return DONE
            width = len(call.outputs) // len(call.inputs)
            members = (
                replace(call, op=op, inputs=[x], outputs=call.outputs[i * width : (i + 1) * width])
                for i, x in enumerate(call.inputs)
            )
            return _together(partial(one, member) for member in members)

        return run

    return compose


def _even_or(even: Runner, uneven: Runner) -> Runner:
    """For list forms whose shares may differ in size. Every rank sees the same sizes and decides alike."""

    def run(call: Call) -> Handle:
        counts = {t.numel() for t in (*call.inputs, *call.outputs)}
        return (even if len(counts) == 1 else uneven)(call)

    return run


def _uneven_all_gather(exchange: Runner) -> Runner:
    """An all_to_all that sends the same to every rank."""

    def run(call: Call) -> Handle:
        return exchange(replace(call, op=ops.ALL_TO_ALL, inputs=[call.inputs[0]] * call.size))

    return run


def _uneven_reduce_scatter(exchange: Runner) -> Runner:
    """Each share is sent once; each rank reduces its own, in rank order."""

    def run(call: Call) -> Handle:
        output = call.outputs[0]
        rows = [output.new_empty(output.shape) for _ in range(call.size)]
        handle = exchange(replace(call, op=ops.ALL_TO_ALL, outputs=rows))
        return handle.then(lambda: _discard(output.copy_(reduce_rows(rows, call.reduce, call.factor))))

    return run


_COMPOSITIONS: tuple[tuple[Op, Op, Callable[[Backend, Runner], Runner]], ...] = (
    (ops.ALL_TO_ALL_SINGLE, ops.ALL_TO_ALL, _all_to_all_single),
    (ops.ALL_TO_ALL, ops.ALL_TO_ALL_SINGLE, _all_to_all),
    (ops.ALL_GATHER_SINGLE, ops.ALL_GATHER, _all_gather_single),
    (ops.ALL_GATHER, ops.ALL_GATHER_SINGLE, _all_gather),
    (ops.REDUCE_SCATTER_SINGLE, ops.ALL_TO_ALL_SINGLE, _reduce_scatter_single),
    (ops.REDUCE_SCATTER, ops.REDUCE_SCATTER_SINGLE, _reduce_scatter),
    (ops.ALL_REDUCE_COALESCED, ops.ALL_REDUCE, _all_reduce_coalesced),
    (ops.ALL_GATHER_COALESCED, ops.ALL_GATHER, _one_by_one(ops.ALL_GATHER)),
    (ops.REDUCE_SCATTER_COALESCED, ops.REDUCE_SCATTER_SINGLE, _one_by_one(ops.REDUCE_SCATTER_SINGLE)),
)
