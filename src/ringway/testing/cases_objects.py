"""Conformance: objects of any kind and size that differ between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ringway.call import ReduceOp
from ringway.testing.conformance import case
from ringway.testing.probe import Probe


def _object(rank: int, number: int = 0) -> Any:
    """A different object for each rank: nested, empty, large, and None among them."""
    kinds: list[Any] = [
        {"rank": rank, "nested": [(rank, "text"), {"deep": {rank}}]},
        None,
        b"x" * (300_000 * (rank + 1)),
        [],
        "ünïcode" * rank,
    ]
    return kinds[(rank + number) % len(kinds)]


@case()
def all_gather_object(probe: Probe) -> None:
    for number in range(5):
        probe.at(number=number)
        outputs: list[Any] = ["unset"] * probe.size
        probe.dist.all_gather_object(outputs, _object(probe.rank, number), group=probe.group)
        probe.equal(outputs, [_object(rank, number) for rank in range(probe.size)])


@case()
def broadcast_object_list(probe: Probe) -> None:
    for root in range(2 * probe.size):
        probe.at(root=root)
        sent = [_object(root % probe.size, number) for number in range(3)]
        objects = list(sent) if probe.rank == root % probe.size else [None] * 3
        probe.dist.broadcast_object_list(objects, group=probe.group, **probe.root(root))
        probe.equal(objects, sent)


@case()
def gather_object(probe: Probe) -> None:
    for root in range(2 * probe.size):
        probe.at(root=root)
        outputs: list[Any] | None = ["unset"] * probe.size if probe.rank == root % probe.size else None
        probe.dist.gather_object(_object(probe.rank, root), outputs, group=probe.group, **probe.root(root, "dst"))
        if outputs is not None:
            probe.equal(outputs, [_object(rank, root) for rank in range(probe.size)])


@case()
def scatter_object_list(probe: Probe) -> None:
    for root in range(2 * probe.size):
        probe.at(root=root)
        inputs = [_object(target, root) for target in range(probe.size)]
        output: list[Any] = ["unset"]
        given = inputs if probe.rank == root % probe.size else None
        probe.dist.scatter_object_list(output, given, group=probe.group, **probe.root(root))
        probe.equal(output, [_object(probe.rank, root)])


@case(min_size=2)
def send_and_recv_object_list(probe: Probe) -> None:
    sent = [_object(0, number) for number in range(5)]
    if probe.rank == 0:
        probe.dist.send_object_list(sent, group=probe.group, dst=probe.ranks[1])
    elif probe.rank == 1:
        received: list[Any] = ["unset"] * 5
        source = probe.dist.recv_object_list(received, group=probe.group, src=probe.ranks[0])
        probe.equal(received, sent)
        probe.equal(source, probe.ranks[0], "the source that recv_object_list returned")
    probe.still_works()


@case()
def objects_that_hold_tensors_and_arrays(probe: Probe) -> None:
    def holder(rank: int) -> dict[str, Any]:
        return {
            "tensor": torch.full((500, 3), float(rank)),
            "array": np.arange(1000) + rank,
            "half": torch.ones(2).half(),
        }

    outputs: list[Any] = [None] * probe.size
    probe.dist.all_gather_object(outputs, holder(probe.rank), group=probe.group)
    for rank, output in enumerate(outputs):
        expected = holder(rank)
        probe.same(output["tensor"], expected["tensor"], f"tensor of {rank}")
        probe.same(output["half"], expected["half"], f"half tensor of {rank}")
        probe.holds(bool((output["array"] == expected["array"]).all()), f"array of {rank} is wrong")
        output["tensor"].add_(1)
        output["array"] += 1


@case(own_names=True)
def allgather_object(probe: Probe) -> None:
    result = probe.dist.allgather_object(_object(probe.rank), group=probe.group)
    probe.equal(result, [_object(rank) for rank in range(probe.size)])


@case(own_names=True)
def broadcast_object(probe: Probe) -> None:
    for root in range(probe.size):
        probe.at(root=root)
        given = _object(root) if probe.rank == root else None
        result = probe.dist.broadcast_object(given, src=probe.ranks[root], group=probe.group)
        probe.equal(result, _object(root))


@case(own_names=True)
def reduce_object(probe: Probe) -> None:
    size, rank = probe.size, probe.rank
    total = sum(range(1, size + 1))
    probe.equal(probe.dist.reduce_object(rank + 1, group=probe.group), total, "sum of numbers")
    probe.equal(probe.dist.reduce_object(rank + 1, op=ReduceOp.MAX, group=probe.group), size, "greatest number")
    nested = {"loss": float(rank + 1), "counts": [rank, 1], "pair": (rank + 1, 2)}
    expected = {"loss": float(total), "counts": [total - size, size], "pair": (total, 2 * size)}
    probe.equal(probe.dist.reduce_object(nested, group=probe.group), expected, "sum of a dict")
    tensor = probe.dist.reduce_object({"t": torch.full((3,), float(rank + 1))}, group=probe.group)["t"]
    probe.same(tensor, torch.full((3,), float(total)), "sum of tensors")
    array = probe.dist.reduce_object(np.full(3, rank + 1), group=probe.group)
    probe.equal(array.tolist(), [total] * 3, "sum of arrays")
    mean = probe.dist.reduce_object(float(rank + 1), op=ReduceOp.AVG, group=probe.group)
    probe.equal(mean, total / size, "mean of numbers")


@case(own_names=True)
def reduce_object_with_a_function(probe: Probe) -> None:
    """The function is applied in rank order, so it need not be commutative."""
    result = probe.dist.reduce_object(f"{probe.rank}", op=lambda left, right: left + right, group=probe.group)
    probe.equal(result, "".join(str(rank) for rank in range(probe.size)))
