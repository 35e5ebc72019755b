"""Conformance: collectives that reduce. Every valid combination of op and dtype, by `ringway.call.reduces`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ringway.call import Reduce
from ringway.testing.conformance import case, large_case
from ringway.testing.probe import LARGE, SIZES, Probe, reductions, torch_op
from ringway.testing.reference import PERIOD, reduced, relative_tolerance, small_values

_KINDS = [(dtype, reduce, count) for dtype, reduce in reductions() for count in SIZES]
_LARGE_KINDS = [(torch.float32, Reduce.SUM, LARGE), (torch.bfloat16, Reduce.MAX, LARGE)]
_Kinds = Sequence[tuple[torch.dtype, Reduce, int]]


def _inputs(probe: Probe, count: int, dtype: torch.dtype, reduce: Reduce) -> list[Tensor]:
    """Each rank's input."""
    return [small_values(count, dtype, rank, reduce) for rank in range(probe.size)]


@functools.lru_cache(maxsize=1024)
def _known(rank: int, size: int, count: int, dtype: torch.dtype, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """A rank's input and what all ranks' reduce to. Several cases use the same, and computing them takes most of the
    suite's time, so that only the first period is computed."""
    inputs = [small_values(min(count, PERIOD), dtype, member, reduce) for member in range(size)]
    return _repeated(inputs[rank], count), _repeated(reduced(inputs, reduce), count)


def _repeated(period: Tensor, count: int) -> Tensor:
    return period if count <= PERIOD else period.repeat(-(-count // PERIOD))[:count]


def _input(probe: Probe, count: int, dtype: torch.dtype, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """This rank's input, which may be written to, and the expected reduction."""
    own, expected = _known(probe.rank, probe.size, count, dtype, reduce)
    return own.clone(), expected


@case()
def all_reduce(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    for dtype, reduce, count in kinds:
        probe.at(dtype=dtype, op=reduce.name, count=count)
        tensor, expected = _input(probe, count, dtype, reduce)
        probe.dist.all_reduce(tensor, torch_op(probe.dist, reduce), group=probe.group)
        probe.same(tensor, expected, rtol=relative_tolerance(dtype, reduce, probe.size))


all_reduce_large = large_case(all_reduce, _LARGE_KINDS)


@case()
def all_reduce_zero_dimensional(probe: Probe) -> None:
    for dtype in (torch.float32, torch.int64, torch.bool):
        probe.at(dtype=dtype)
        inputs = [small_values(1, dtype, rank).reshape(()) for rank in range(probe.size)]
        expected = reduced(inputs, Reduce.SUM)
        tensor = inputs[probe.rank]
        probe.dist.all_reduce(tensor, group=probe.group)
        probe.same(tensor, expected)


@case()
def all_reduce_of_unsigned_bytes_wraps(probe: Probe) -> None:
    tensor = torch.full((9,), 200, dtype=torch.uint8)
    probe.dist.all_reduce(tensor, group=probe.group)
    probe.same(tensor, torch.full((9,), 200 * probe.size % 256, dtype=torch.uint8))


@case()
def all_reduce_of_large_integers_is_exact(probe: Probe) -> None:
    """Integers must not go through floating point: 2**53 + 1 has no double."""
    value = 2**53 + 1
    tensor = torch.tensor([value, -value, probe.rank])
    probe.dist.all_reduce(tensor, group=probe.group)
    probe.same(tensor, torch.tensor([value * probe.size, -value * probe.size, sum(range(probe.size))]))


@case()
def all_reduce_gives_the_same_bits_everywhere(probe: Probe) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for count in (5, 100_003):
            probe.at(dtype=dtype, count=count)
            inputs = [
                torch.randn(count, generator=torch.Generator("cpu").manual_seed(rank), device="cpu").to(
                    torch.get_default_device(), dtype
                )
                for rank in range(probe.size)
            ]
            # Sums of a few normal numbers: the bound is on the terms, since they may cancel.
            bound = sum(part.double().abs() for part in inputs) * 2 * probe.size * torch.finfo(dtype).eps
            expected = reduced(inputs, Reduce.SUM)
            tensor = inputs[probe.rank].clone()
            probe.dist.all_reduce(tensor, group=probe.group)
            off = (tensor.double() - expected.double()).abs() > bound
            probe.holds(not off.any(), f"{int(off.sum())} of {count} sums are beyond the bound of rounding")
            outputs = [torch.empty_like(tensor) for _ in range(probe.size)]
            probe.dist.all_gather(outputs, tensor, group=probe.group)
            for rank, output in enumerate(outputs):
                probe.same_bits(output, tensor, f"the sum on rank {rank}")


@case()
def reduce(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    for number, (dtype, reduce, count) in enumerate(kinds):
        root = number % probe.size
        probe.at(dtype=dtype, op=reduce.name, count=count, root=root)
        tensor, expected = _input(probe, count, dtype, reduce)
        op = torch_op(probe.dist, reduce)
        probe.dist.reduce(tensor, op=op, group=probe.group, **probe.root(number, "dst"))
        if probe.rank == root:
            probe.same(tensor, expected, rtol=relative_tolerance(dtype, reduce, probe.size))


reduce_large = large_case(reduce, _LARGE_KINDS)


@case()
def reduce_scatter(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    size = probe.size
    for dtype, reduce, count in kinds:
        probe.at(dtype=dtype, op=reduce.name, count=count)
        own, total = _input(probe, count * size, dtype, reduce)
        expected = total.reshape(size, count)[probe.rank]
        rtol = relative_tolerance(dtype, reduce, size)
        output = torch.zeros(count, dtype=dtype)
        parts = [part.clone() for part in own.reshape(size, count)]
        probe.dist.reduce_scatter(output, parts, torch_op(probe.dist, reduce), group=probe.group)
        probe.same(output, expected, rtol=rtol)


reduce_scatter_large = large_case(reduce_scatter, _LARGE_KINDS, parts=True)


@case()
def reduce_scatter_of_different_sizes(probe: Probe) -> None:
    """Each rank's part may have its own size."""
    inputs = [
        [small_values(3 * target + 1, torch.float32, rank) for target in range(probe.size)]
        for rank in range(probe.size)
    ]
    expected = reduced([parts[probe.rank] for parts in inputs], Reduce.SUM)
    output = torch.zeros(3 * probe.rank + 1)
    probe.dist.reduce_scatter(output, inputs[probe.rank], group=probe.group)
    probe.same(output, expected)


@case()
def reduce_scatter_tensor(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    size = probe.size
    for dtype, reduce, count in kinds:
        own, total = _input(probe, count * size, dtype, reduce)
        expected = total.reshape(size, count)[probe.rank]
        rtol = relative_tolerance(dtype, reduce, size)
        for form, given in (("joined", own), ("stacked", own.reshape(size, count))):
            probe.at(dtype=dtype, op=reduce.name, count=count, form=form)
            output = torch.zeros(count, dtype=dtype)
            op = torch_op(probe.dist, reduce)
            probe.dist.reduce_scatter_tensor(output, given.clone(), op, group=probe.group)
            probe.same(output, expected, rtol=rtol)


reduce_scatter_tensor_large = large_case(reduce_scatter_tensor, _LARGE_KINDS, parts=True)


@case()
def all_reduce_coalesced(probe: Probe) -> None:
    for dtype in (torch.float32, torch.int32, torch.float16):
        for reduce in (Reduce.SUM, Reduce.MAX, Reduce.AVG):
            for counts in ((1,), (3, 0, 1031), (2, 2)):
                probe.at(dtype=dtype, op=reduce.name, counts=counts)
                given = [_inputs(probe, count, dtype, reduce) for count in counts]
                expected = [reduced(inputs, reduce) for inputs in given]
                tensors = [inputs[probe.rank] for inputs in given]
                probe.dist.all_reduce_coalesced(tensors, torch_op(probe.dist, reduce), group=probe.group)
                for place, tensor in enumerate(tensors):
                    rtol = relative_tolerance(dtype, reduce, probe.size)
                    probe.same(tensor, expected[place], f"tensor {place}", rtol)


@case(own_names=True)
def inference_all_reduce(probe: Probe) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        for reduce in (Reduce.SUM, Reduce.MAX):
            for count in SIZES:
                probe.at(dtype=dtype, op=reduce.name, count=count)
                tensor, expected = _input(probe, count, dtype, reduce)
                probe.dist.inference_all_reduce(tensor, torch_op(probe.dist, reduce), group=probe.group)
                probe.same(tensor, expected)


@case(own_names=True)
def reduce_scatter_coalesced(probe: Probe) -> None:
    """Each rank gets its share of each tensor, flat. The last shares are shorter if sizes do not divide evenly."""
    size, rank = probe.size, probe.rank
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        for shapes in (((1,),), ((3, 5), (0,), (1031,)), ((size * 2, 3),)):
            probe.at(dtype=dtype, shapes=shapes)
            counts = [math.prod(shape) for shape in shapes]
            given = [_inputs(probe, count, dtype, Reduce.SUM) for count in counts]
            tensors = [inputs[rank].reshape(shape) for inputs, shape in zip(given, shapes, strict=True)]
            shares = probe.dist.reduce_scatter_coalesced(tensors, group=probe.group)
            probe.equal(len(shares), len(shapes), "number of shares")
            for place, (inputs, share) in enumerate(zip(given, shares, strict=True)):
                length = -(-counts[place] // size)
                probe.same(share, reduced(inputs, Reduce.SUM)[length * rank :][:length], f"share {place}")
