"""Conformance: any tensor. Strided, aliased, in place, viewed, conjugated. Memory around it stays untouched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringway.call import Reduce
from ringway.errors import UsageError
from ringway.testing.conformance import case
from ringway.testing.probe import Probe, torch_op
from ringway.testing.reference import any_bits, reduced, small_values

_GUARD = -99.0
_SHAPE = (6, 5)


def _transposed() -> tuple[Tensor, Tensor]:
    frame = torch.full((5, 6), _GUARD)
    return frame, frame.t()


def _every_second_row() -> tuple[Tensor, Tensor]:
    frame = torch.full((12, 5), _GUARD)
    return frame, frame[::2]


def _inner_columns() -> tuple[Tensor, Tensor]:
    frame = torch.full((6, 9), _GUARD)
    return frame, frame[:, 2:7]


def _offset() -> tuple[Tensor, Tensor]:
    frame = torch.full((31,), _GUARD)
    return frame, frame[1:].view(_SHAPE)


_LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "transposed": _transposed,
    "every second row": _every_second_row,
    "inner columns": _inner_columns,
    "offset": _offset,
}


def _laid_out(layout: str, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A tensor of that layout, and the frame of guard values that it is a view of."""
    frame, view = _LAYOUTS[layout]()
    if values is not None:
        view.copy_(values)
    return frame, view


def _values(rank: int, *key: int) -> Tensor:
    return small_values(30, torch.float32, rank + 5 * sum(key)).reshape(_SHAPE)


def _check_guards(probe: Probe, frame: Tensor, layout: str) -> None:
    expected = frame.numel() - 30
    probe.equal(int((frame == _GUARD).sum()), expected, f"untouched elements around the {layout} tensor")


@case()
def strided_broadcast(probe: Probe) -> None:
    for layout in _LAYOUTS:
        for root in range(probe.size):
            probe.at(layout=layout, root=root)
            frame, tensor = _laid_out(layout, _values(root) if probe.rank == root else None)
            probe.dist.broadcast(tensor, group=probe.group, **probe.root(root))
            probe.same(tensor, _values(root))
            _check_guards(probe, frame, layout)


@case()
def strided_on_one_rank_only(probe: Probe) -> None:
    """Ranks need not agree about the layout, only about the elements and their order."""
    for root in range(probe.size):
        probe.at(root=root)
        values = _values(root)
        if probe.rank == root:
            tensor = _laid_out("transposed", values)[1]
        else:
            tensor = torch.zeros(_SHAPE)
        probe.dist.broadcast(tensor, group=probe.group, group_src=root)
        probe.same(tensor, values)


@case()
def strided_all_reduce_and_reduce(probe: Probe) -> None:
    expected = reduced([_values(rank) for rank in range(probe.size)], Reduce.SUM)
    for layout in _LAYOUTS:
        probe.at(layout=layout)
        frame, tensor = _laid_out(layout, _values(probe.rank))
        probe.dist.all_reduce(tensor, group=probe.group)
        probe.same(tensor, expected, "all_reduce")
        _check_guards(probe, frame, layout)
        frame, tensor = _laid_out(layout, _values(probe.rank))
        probe.dist.reduce(tensor, group=probe.group, group_dst=probe.size - 1)
        if probe.rank == probe.size - 1:
            probe.same(tensor, expected, "reduce")
        _check_guards(probe, frame, layout)


@case()
def strided_all_gather_and_gather(probe: Probe) -> None:
    for layout in _LAYOUTS:
        probe.at(layout=layout)
        outputs = [_laid_out(layout) for _ in range(probe.size)]
        tensor = _laid_out(layout, _values(probe.rank))[1]
        probe.dist.all_gather([view for _, view in outputs], tensor, group=probe.group)
        for rank, (frame, view) in enumerate(outputs):
            probe.same(view, _values(rank), f"all_gather's output {rank}")
            _check_guards(probe, frame, layout)
        outputs = [_laid_out(layout) for _ in range(probe.size)]
        views = [view for _, view in outputs] if probe.rank == 0 else None
        probe.dist.gather(tensor, views, group=probe.group, group_dst=0)
        for rank, view in enumerate(views or ()):
            probe.same(view, _values(rank), f"gather's output {rank}")
            _check_guards(probe, outputs[rank][0], layout)


@case()
def strided_scatter_and_all_to_all(probe: Probe) -> None:
    size = probe.size
    for layout in _LAYOUTS:
        probe.at(layout=layout)
        inputs = [_laid_out(layout, _values(target, 1))[1] for target in range(size)]
        frame, tensor = _laid_out(layout)
        probe.dist.scatter(tensor, inputs if probe.rank == 0 else None, group=probe.group, group_src=0)
        probe.same(tensor, _values(probe.rank, 1), "scatter")
        _check_guards(probe, frame, layout)
        inputs = [_laid_out(layout, _values(probe.rank, target))[1] for target in range(size)]
        outputs = [_laid_out(layout) for _ in range(size)]
        probe.dist.all_to_all([view for _, view in outputs], inputs, group=probe.group)
        for source, (frame, view) in enumerate(outputs):
            probe.same(view, _values(source, probe.rank), f"all_to_all's output {source}")
            _check_guards(probe, frame, layout)


@case()
def strided_reduce_scatter(probe: Probe) -> None:
    expected = reduced([_values(rank, probe.rank) for rank in range(probe.size)], Reduce.SUM)
    for layout in _LAYOUTS:
        probe.at(layout=layout)
        inputs = [_laid_out(layout, _values(probe.rank, target))[1] for target in range(probe.size)]
        frame, output = _laid_out(layout)
        probe.dist.reduce_scatter(output, inputs, group=probe.group)
        probe.same(output, expected)
        _check_guards(probe, frame, layout)


@case()
def strided_single_tensor_forms(probe: Probe) -> None:
    """all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single with rows that are not adjacent."""
    size = probe.size
    shape = (size * 4, 3)
    wholes = [small_values(12 * size, torch.float32, rank).reshape(shape) for rank in range(size)]
    parts = [whole[:4] for whole in wholes]

    def strided(rows: int) -> Tensor:
        return torch.zeros(rows, 6)[:, ::2]

    given = strided(4).copy_(parts[probe.rank])
    output = strided(4 * size)
    probe.dist.all_gather_into_tensor(output, given, group=probe.group)
    probe.same(output, torch.cat(parts), "all_gather_into_tensor")

    given, output = strided(4 * size).copy_(wholes[probe.rank]), strided(4)
    probe.dist.reduce_scatter_tensor(output, given, group=probe.group)
    expected = reduced(wholes, Reduce.SUM)[4 * probe.rank :][:4]
    probe.same(output, expected, "reduce_scatter_tensor")

    output = strided(4 * size)
    probe.dist.all_to_all_single(output, given, group=probe.group)
    expected = torch.cat([whole[4 * probe.rank :][:4] for whole in wholes])
    probe.same(output, expected, "all_to_all_single")


@case()
def input_is_a_slice_of_output(probe: Probe) -> None:
    """all_gather_into_tensor as FSDP calls it."""
    for count in (0, 1, 1031):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            probe.at(count=count, dtype=dtype)
            parts = [any_bits(count, dtype, rank) for rank in range(probe.size)]
            output = torch.zeros(count * probe.size, dtype=dtype)
            own = output[count * probe.rank : count * (probe.rank + 1)].copy_(parts[probe.rank])
            probe.dist.all_gather_into_tensor(output, own, group=probe.group)
            probe.same_bits(output, torch.cat(parts))


@case()
def output_is_a_slice_of_input(probe: Probe) -> None:
    """reduce_scatter_tensor into this rank's part of its input. The other parts stay unchanged."""
    for count in (0, 1, 1031):
        probe.at(count=count)
        inputs = [small_values(count * probe.size, torch.float32, rank) for rank in range(probe.size)]
        own = slice(count * probe.rank, count * (probe.rank + 1))
        expected = inputs[probe.rank].clone()
        expected[own] = reduced(inputs, Reduce.SUM)[own]
        given = inputs[probe.rank].clone()
        probe.dist.reduce_scatter_tensor(given[own], given, group=probe.group)
        probe.same(given, expected)


@case()
def list_element_is_also_the_other_side(probe: Probe) -> None:
    size, rank = probe.size, probe.rank
    outputs = [torch.zeros(7) for _ in range(size)]
    outputs[rank].copy_(small_values(7, torch.float32, rank))
    probe.dist.all_gather(outputs, outputs[rank], group=probe.group)
    for source, output in enumerate(outputs):
        probe.same(output, small_values(7, torch.float32, source), f"all_gather's output {source}")

    gathered = [output.clone().zero_() for output in outputs]
    gathered[rank].copy_(small_values(7, torch.float32, rank))
    probe.dist.gather(gathered[rank], gathered if rank == 0 else None, group=probe.group, group_dst=0)
    for source, output in enumerate(gathered if rank == 0 else ()):
        probe.same(output, small_values(7, torch.float32, source), f"gather's output {source}")

    parts = [small_values(7, torch.float32, 10 + target) for target in range(size)]
    tensor = parts[0] if rank == 0 else torch.zeros(7)
    probe.dist.scatter(tensor, parts if rank == 0 else None, group=probe.group, group_src=0)
    probe.same(tensor, small_values(7, torch.float32, 10 + rank), "scatter")

    inputs = [[small_values(7, torch.float32, 3 * r + t) for t in range(size)] for r in range(size)]
    expected = reduced([row[rank] for row in inputs], Reduce.SUM)
    probe.dist.reduce_scatter(inputs[rank][rank], inputs[rank], group=probe.group)
    probe.same(inputs[rank][rank], expected, "reduce_scatter")


@case(own_names=True)
def all_to_all_in_place_is_right_or_refused(probe: Probe) -> None:
    whole = small_values(6 * probe.size, torch.float32, probe.rank)
    expected = torch.cat(
        [small_values(6 * probe.size, torch.float32, r)[6 * probe.rank :][:6] for r in range(probe.size)]
    )
    try:
        probe.dist.all_to_all_single(whole, whole, group=probe.group)
    except UsageError:
        expected = small_values(6 * probe.size, torch.float32, probe.rank)
    probe.same(whole, expected)
    probe.still_works()


@case()
def outputs_are_slices_of_one_tensor(probe: Probe) -> None:
    whole = torch.full((probe.size, 2, 3), _GUARD)
    probe.dist.all_gather(list(whole[:, 0]), small_values(3, torch.float32, probe.rank), group=probe.group)
    for rank in range(probe.size):
        probe.same(whole[rank, 0], small_values(3, torch.float32, rank), f"output {rank}")
    probe.same(whole[:, 1], torch.full((probe.size, 3), _GUARD), "the elements between")


@case(own_names=True)
def conjugated_and_negated_views(probe: Probe) -> None:
    """Lazy views: their memory does not hold the values they show."""
    numbers = [small_values(9, torch.complex64, rank) for rank in range(probe.size)]
    outputs = [torch.zeros(9, dtype=torch.complex64) for _ in range(probe.size)]
    probe.dist.all_gather(outputs, numbers[probe.rank].conj(), group=probe.group)
    for rank, output in enumerate(outputs):
        probe.same(output, numbers[rank].conj().resolve_conj(), f"all_gather of conj, output {rank}")

    imaginary = numbers[probe.rank].conj().imag
    total = torch.zeros(9 * probe.size)
    probe.dist.all_gather_into_tensor(total, imaginary, group=probe.group)
    probe.same(total, torch.cat([-number.imag for number in numbers]), "all_gather_into_tensor of imag")

    mine = numbers[probe.rank].clone().conj()
    expected = reduced([number.conj().resolve_conj() for number in numbers], Reduce.SUM)
    probe.dist.all_reduce(mine, group=probe.group)
    probe.same(mine, expected, "all_reduce of conj")


@case()
def one_element_of_a_wider_tensor(probe: Probe) -> None:
    """A single element counts as contiguous, whatever its stride."""
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        probe.at(dtype=dtype)
        frame = torch.zeros(4, dtype=dtype)
        frame[0] = probe.rank == 0
        probe.dist.broadcast(frame[::4], group=probe.group, group_src=0)
        probe.same(frame, torch.tensor([1, 0, 0, 0]).to(dtype), "broadcast")
        probe.dist.all_reduce(frame[::4], group=probe.group)
        probe.same(frame, torch.tensor([probe.size, 0, 0, 0]).to(dtype), "all_reduce")


@case(own_names=True)
def a_negated_scalar(probe: Probe) -> None:
    """A single element is contiguous whatever its strides, so only the negation distinguishes it from a plain
    tensor."""
    number = torch.complex(torch.zeros(1), torch.full((1,), float(probe.rank + 1)))
    mine = number.conj().imag if probe.rank == 0 else number.imag.clone()
    probe.dist.all_reduce(mine, group=probe.group)
    probe.same(mine.resolve_neg(), torch.full((1,), float(sum(range(2, probe.size + 1)) - 1)), "all_reduce")


@case()
def tensors_that_require_gradients(probe: Probe) -> None:
    """Parameters are written in place as data, outside autograd, as DDP does when it starts. This includes strided
    parameters and those that are converted on the way."""
    dist, size, total = probe.dist, probe.size, float(sum(range(1, probe.size + 1)))
    parameter = torch.nn.Parameter(torch.full((4, 3), float(probe.rank)))
    dist.broadcast(parameter, group=probe.group, group_src=size - 1)
    probe.same(parameter.detach(), torch.full((4, 3), float(size - 1)), "broadcast")
    dist.all_reduce(parameter, group=probe.group)
    probe.same(parameter.detach(), torch.full((4, 3), float((size - 1) * size)), "all_reduce")
    strided = torch.full((3, 4), float(probe.rank + 1)).t().requires_grad_()
    dist.all_reduce(strided, group=probe.group)
    probe.same(strided.detach(), torch.full((4, 3), total), "all_reduce, strided")
    dist.all_reduce(strided, op=torch_op(dist, Reduce.AVG), group=probe.group)
    probe.same(strided.detach(), torch.full((4, 3), total), "all_reduce, averaged")
    gathered = [torch.zeros(2, requires_grad=True) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(probe.rank), requires_grad=True), group=probe.group)
    for rank, output in enumerate(gathered):
        probe.same(output.detach(), torch.full((2,), float(rank)), f"all_gather, output {rank}")
    share = torch.zeros(2, requires_grad=True)
    work = dist.reduce_scatter_tensor(share, torch.ones(2 * size, requires_grad=True), group=probe.group, async_op=True)
    work.wait()
    probe.same(share.detach(), torch.full((2,), float(size)), "reduce_scatter_tensor")
    for leaf in (parameter, strided, *gathered, share):
        probe.holds(leaf.requires_grad and leaf.grad_fn is None, "a leaf is not a leaf any more")


@case()
def tensors_of_inference_mode(probe: Probe) -> None:
    """Tensors created in inference mode may be reduced in it and outside, even if another thread ends the call."""
    dist, total = probe.dist, float(sum(range(1, probe.size + 1)))
    with torch.inference_mode():
        inside = torch.full((3, 4), float(probe.rank + 1)).t()
        dist.all_reduce(inside, group=probe.group, async_op=True).wait()
        outside = torch.full((3, 4), float(probe.rank + 1)).t()
    dist.all_reduce(outside, group=probe.group, async_op=True).wait()
    for what, tensor in (("inside", inside), ("outside", outside)):
        probe.same(tensor.clone(), torch.full((4, 3), total), f"all_reduce {what} of inference mode")


@case()
def shapes_survive(probe: Probe) -> None:
    """Zero-dimensional tensors and tensors with an empty dimension."""
    scalar = torch.tensor(3.0) if probe.rank == 0 else torch.tensor(0.0)
    probe.dist.broadcast(scalar, group=probe.group, group_src=0)
    probe.same(scalar, torch.tensor(3.0), "broadcast of a scalar")
    outputs = [torch.tensor(0) for _ in range(probe.size)]
    probe.dist.all_gather(outputs, torch.tensor(probe.rank + 1), group=probe.group)
    probe.equal([int(output) for output in outputs], list(range(1, probe.size + 1)), "all_gather of scalars")
    stacked = torch.zeros(probe.size)
    probe.dist.all_gather_into_tensor(stacked, torch.tensor(float(probe.rank)), group=probe.group)
    probe.same(stacked, torch.arange(probe.size, dtype=torch.float32), "all_gather_into_tensor of a scalar")
    empty = torch.zeros(3, 0, 2)
    probe.dist.all_reduce(empty, group=probe.group)
    probe.equal(tuple(empty.shape), (3, 0, 2), "shape of an empty tensor")
    probe.still_works()
