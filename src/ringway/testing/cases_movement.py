"""Conformance: collectives that move data. Every dtype arrives bit by bit, whatever the bits mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringway.call import DTYPES
from ringway.testing.conformance import case, large_case
from ringway.testing.probe import LARGE, SIZES, Probe
from ringway.testing.reference import any_bits

_KINDS = [(dtype, count) for dtype in DTYPES for count in SIZES]
_LARGE_KINDS = [(torch.float32, LARGE), (torch.uint8, LARGE)]
_Kinds = Sequence[tuple[torch.dtype, int]]


def _blank(shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A buffer to receive into: zeros, so that missing data shows."""
    return torch.zeros(shape, dtype=dtype)


@case()
def broadcast(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    for number, (dtype, count) in enumerate(kinds):
        root = number % probe.size
        probe.at(dtype=dtype, count=count, root=root)
        expected = any_bits(count, dtype, root, number)
        tensor = expected.clone() if probe.rank == root else _blank(count, dtype)
        probe.dist.broadcast(tensor, group=probe.group, **probe.root(number))
        probe.same_bits(tensor, expected)


broadcast_large = large_case(broadcast, _LARGE_KINDS)


@case()
def all_gather(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    for dtype, count in kinds:
        probe.at(dtype=dtype, count=count)
        outputs = [_blank(count, dtype) for _ in range(probe.size)]
        probe.dist.all_gather(outputs, any_bits(count, dtype, probe.rank), group=probe.group)
        for rank, output in enumerate(outputs):
            probe.same_bits(output, any_bits(count, dtype, rank), f"output {rank}")


all_gather_large = large_case(all_gather, _LARGE_KINDS, parts=True)


@case()
def all_gather_into_tensor(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    for dtype, count in kinds:
        parts = [any_bits((count, 2), dtype, rank) for rank in range(probe.size)]
        for form, expected in (("joined", torch.cat(parts)), ("stacked", torch.stack(parts))):
            probe.at(dtype=dtype, count=count, form=form)
            output = _blank(tuple(expected.shape), dtype)
            probe.dist.all_gather_into_tensor(output, parts[probe.rank].clone(), group=probe.group)
            probe.same_bits(output, expected)


all_gather_into_tensor_large = large_case(all_gather_into_tensor, _LARGE_KINDS, parts=True)


@case()
def all_gather_coalesced(probe: Probe) -> None:
    for dtype in (torch.float32, torch.int16, torch.bfloat16):
        for counts in ((1,), (3, 0, 1031), (5, 5)):
            probe.at(dtype=dtype, counts=counts)
            inputs = [any_bits(count, dtype, probe.rank, place) for place, count in enumerate(counts)]
            outputs = [[_blank(count, dtype) for count in counts] for _ in range(probe.size)]
            probe.dist.all_gather_coalesced(outputs, inputs, group=probe.group)
            for rank, received in enumerate(outputs):
                for place, tensor in enumerate(received):
                    expected = any_bits(counts[place], dtype, rank, place)
                    probe.same_bits(tensor, expected, f"output {rank}, {place}")


@case()
def gather(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    for number, (dtype, count) in enumerate(kinds):
        root = number % probe.size
        probe.at(dtype=dtype, count=count, root=root)
        outputs = [_blank(count, dtype) for _ in range(probe.size)] if probe.rank == root else None
        tensor = any_bits(count, dtype, probe.rank)
        probe.dist.gather(tensor, outputs, group=probe.group, **probe.root(number, "dst"))
        for rank, output in enumerate(outputs or ()):
            probe.same_bits(output, any_bits(count, dtype, rank), f"output {rank}")


gather_large = large_case(gather, _LARGE_KINDS, parts=True)


@case()
def scatter(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    for number, (dtype, count) in enumerate(kinds):
        root = number % probe.size
        probe.at(dtype=dtype, count=count, root=root)
        parts = [any_bits(count, dtype, rank, number) for rank in range(probe.size)]
        tensor = _blank(count, dtype)
        inputs = parts if probe.rank == root else None
        probe.dist.scatter(tensor, inputs, group=probe.group, **probe.root(number))
        probe.same_bits(tensor, parts[probe.rank])


scatter_large = large_case(scatter, _LARGE_KINDS, parts=True)


@case()
def all_to_all(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    for dtype, count in kinds:
        probe.at(dtype=dtype, count=count)
        inputs = [any_bits(count, dtype, probe.rank, target) for target in range(probe.size)]
        outputs = [_blank(count, dtype) for _ in range(probe.size)]
        probe.dist.all_to_all(outputs, inputs, group=probe.group)
        for source, output in enumerate(outputs):
            probe.same_bits(output, any_bits(count, dtype, source, probe.rank), f"output {source}")


all_to_all_large = large_case(all_to_all, _LARGE_KINDS, parts=True)


def _share(source: int, target: int, variant: int) -> int:
    """The number of elements from `source` to `target` in an exchange where all differ and some are empty."""
    return (3 * source + 5 * target) % 7 * variant


@case()
def all_to_all_uneven(probe: Probe) -> None:
    for dtype in (torch.float32, torch.int64, torch.bool):
        for variant in (0, 1, 40):
            probe.at(dtype=dtype, variant=variant)
            counts = [_share(probe.rank, target, variant) for target in range(probe.size)]
            inputs = [any_bits(count, dtype, probe.rank, t) for t, count in enumerate(counts)]
            expected = [
                any_bits(_share(source, probe.rank, variant), dtype, source, probe.rank) for source in range(probe.size)
            ]
            outputs = [_blank(part.numel(), dtype) for part in expected]
            probe.dist.all_to_all(outputs, inputs, group=probe.group)
            for source, output in enumerate(outputs):
                probe.same_bits(output, expected[source], f"output {source}")


@case()
def all_to_all_of_different_shapes(probe: Probe) -> None:
    inputs = [any_bits((target + 1, 3), torch.float32, probe.rank, target) for target in range(probe.size)]
    outputs = [_blank((probe.rank + 1, 3), torch.float32) for _ in range(probe.size)]
    probe.dist.all_to_all(outputs, inputs, group=probe.group)
    for source, output in enumerate(outputs):
        expected = any_bits((probe.rank + 1, 3), torch.float32, source, probe.rank)
        probe.same_bits(output, expected, f"output {source}")


@case()
def all_to_all_single(probe: Probe, kinds: _Kinds = _KINDS) -> None:
    for dtype, count in kinds:
        probe.at(dtype=dtype, count=count)
        inputs = [any_bits((count, 2), dtype, probe.rank, target) for target in range(probe.size)]
        expected = [any_bits((count, 2), dtype, source, probe.rank) for source in range(probe.size)]
        output = _blank((count * probe.size, 2), dtype)
        probe.dist.all_to_all_single(output, torch.cat(inputs), group=probe.group)
        probe.same_bits(output, torch.cat(expected))


all_to_all_single_large = large_case(all_to_all_single, _LARGE_KINDS, parts=True)


@case()
def all_to_all_single_uneven(probe: Probe) -> None:
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
        for variant in (0, 1, 40):
            for columns in ((), (3,)):
                probe.at(dtype=dtype, variant=variant, columns=columns)
                sent = [_share(probe.rank, target, variant) for target in range(probe.size)]
                got = [_share(source, probe.rank, variant) for source in range(probe.size)]
                inputs = [any_bits((n, *columns), dtype, probe.rank, t) for t, n in enumerate(sent)]
                expected = [any_bits((n, *columns), dtype, s, probe.rank) for s, n in enumerate(got)]
                output = _blank((sum(got), *columns), dtype)
                probe.dist.all_to_all_single(output, torch.cat(inputs), got, sent, group=probe.group)
                probe.same_bits(output, torch.cat(expected))


@case()
def all_to_all_single_with_splits_on_one_side(probe: Probe) -> None:
    """Splits may be given for one side only if the other is even."""
    size = probe.size
    data = any_bits(4 * size, torch.int32, probe.rank)
    expected = torch.cat([any_bits(4 * size, torch.int32, source)[4 * probe.rank :][:4] for source in range(size)])
    for splits in ({"output_split_sizes": [4] * size}, {"input_split_sizes": [4] * size}):
        probe.at(splits=splits)
        output = _blank(4 * size, torch.int32)
        probe.dist.all_to_all_single(output, data, group=probe.group, **splits)
        probe.same_bits(output, expected)
