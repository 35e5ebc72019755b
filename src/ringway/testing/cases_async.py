"""Conformance: asynchronous collectives, waited for in any order, with futures and with callbacks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ringway.call import Reduce
from ringway.testing.conformance import case
from ringway.testing.probe import Probe
from ringway.testing.reference import reduced, small_values

_Checked = tuple[Any, Callable[[], None]]


def _values(rank: int, count: int = 33) -> Tensor:
    return small_values(count, torch.float32, rank)


def _sum(size: int, count: int = 33) -> Tensor:
    return reduced([_values(rank, count) for rank in range(size)], Reduce.SUM)


def _by_name(*functions: Callable[[], _Checked]) -> dict[str, Callable[[], _Checked]]:
    return {function.__name__: function for function in functions}


def _list_forms(probe: Probe) -> dict[str, Callable[[], _Checked]]:
    """Functions that issue each op over lists, and return the work and the check to run once it is done."""
    dist, group, size, rank = probe.dist, probe.group, probe.size, probe.rank

    def check_each(what: str, tensors: list[Tensor]) -> Callable[[], None]:
        def check() -> None:
            for source, tensor in enumerate(tensors):
                probe.same(tensor, _values(source), f"{what} {source}")

        return check

    def all_gather() -> _Checked:
        outputs = [torch.zeros(33) for _ in range(size)]
        work = dist.all_gather(outputs, _values(rank), group=group, async_op=True)
        return work, check_each("all_gather", outputs)

    def gather() -> _Checked:
        outputs = [torch.zeros(33) for _ in range(size)] if rank == 0 else None
        work = dist.gather(_values(rank), outputs, group=group, group_dst=0, async_op=True)
        return work, check_each("gather", outputs or [])

    def scatter() -> _Checked:
        output = torch.zeros(33)
        inputs = [_values(target) for target in range(size)] if rank == 0 else None
        work = dist.scatter(output, inputs, group=group, group_src=0, async_op=True)
        return work, lambda: probe.same(output, _values(rank), "scatter")

    def reduce_scatter() -> _Checked:
        output = torch.zeros(33)
        inputs = [_values(rank) for _ in range(size)]
        work = dist.reduce_scatter(output, inputs, group=group, async_op=True)
        return work, lambda: probe.same(output, _sum(size), "reduce_scatter")

    def all_to_all() -> _Checked:
        outputs = [torch.zeros(33) for _ in range(size)]
        work = dist.all_to_all(outputs, [_values(rank) for _ in range(size)], group=group, async_op=True)
        return work, check_each("all_to_all", outputs)

    def all_reduce_coalesced() -> _Checked:
        tensors = [_values(rank), _values(rank, 5)]
        work = dist.all_reduce_coalesced(tensors, group=group, async_op=True)

        def check() -> None:
            probe.same(tensors[0], _sum(size), "all_reduce_coalesced 0")
            probe.same(tensors[1], _sum(size, 5), "all_reduce_coalesced 1")

        return work, check

    def all_gather_coalesced() -> _Checked:
        outputs = [[torch.zeros(33)] for _ in range(size)]
        work = dist.all_gather_coalesced(outputs, [_values(rank)], group=group, async_op=True)
        return work, check_each("all_gather_coalesced", [row[0] for row in outputs])

    return _by_name(all_gather, gather, scatter, reduce_scatter, all_to_all, all_reduce_coalesced, all_gather_coalesced)


def _single_forms(probe: Probe) -> dict[str, Callable[[], _Checked]]:
    """Like `_list_forms`, for ops over one tensor."""
    dist, group, size, rank = probe.dist, probe.group, probe.size, probe.rank

    def broadcast() -> _Checked:
        tensor = _values(rank)
        work = dist.broadcast(tensor, group=group, group_src=size - 1, async_op=True)
        return work, lambda: probe.same(tensor, _values(size - 1), "broadcast")

    def all_reduce() -> _Checked:
        tensor = _values(rank)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return work, lambda: probe.same(tensor, _sum(size), "all_reduce")

    def reduce() -> _Checked:
        tensor = _values(rank)
        work = dist.reduce(tensor, group=group, group_dst=0, async_op=True)

        def check() -> None:
            if rank == 0:
                probe.same(tensor, _sum(size), "reduce")

        return work, check

    def all_gather_into_tensor() -> _Checked:
        output = torch.zeros(33 * size)
        work = dist.all_gather_into_tensor(output, _values(rank), group=group, async_op=True)
        expected = torch.cat([_values(source) for source in range(size)])
        return work, lambda: probe.same(output, expected, "all_gather_into_tensor")

    def reduce_scatter_tensor() -> _Checked:
        output, given = torch.zeros(33), _values(rank).repeat(size)
        work = dist.reduce_scatter_tensor(output, given, group=group, async_op=True)
        return work, lambda: probe.same(output, _sum(size), "reduce_scatter_tensor")

    def all_to_all_single() -> _Checked:
        output, given = torch.zeros(33 * size), _values(rank).repeat(size)
        work = dist.all_to_all_single(output, given, group=group, async_op=True)
        expected = torch.cat([_values(source) for source in range(size)])
        return work, lambda: probe.same(output, expected, "all_to_all_single")

    def barrier() -> _Checked:
        return dist.barrier(group=group, async_op=True), lambda: None

    return _by_name(
        broadcast, all_reduce, reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, barrier
    )


@case()
def every_op_asynchronously(probe: Probe) -> None:
    for name, issue in {**_single_forms(probe), **_list_forms(probe)}.items():
        probe.at(op=name)
        work, check = issue()
        probe.holds(work is not None, "async_op=True returned None")
        work.wait()
        check()
        if torch.get_default_device().type == "cuda":
            torch.cuda.synchronize()  # there, wait orders the stream
        # For some coalesced forms, torch returns a future, not a work.
        completed = getattr(work, "is_completed", None) or work.done
        probe.holds(completed(), "not completed after wait()")
        work.wait()


@case()
def every_op_in_flight_at_once(probe: Probe) -> None:
    """Issue all ops before waiting for any; wait in order, in reverse, and with the odd ones first."""
    issues = {**_single_forms(probe), **_list_forms(probe)}
    for order in ("forwards", "backwards", "odd first"):
        probe.at(order=order)
        pending = [issue() for issue in issues.values()]
        if order == "backwards":
            pending.reverse()
        elif order == "odd first":
            pending = pending[1::2] + pending[::2]
        for work, check in pending:
            work.wait()
            check()


@case()
def many_in_flight(probe: Probe) -> None:
    tensors = [_values(probe.rank) * place for place in range(100)]
    works = [probe.dist.all_reduce(tensor, group=probe.group, async_op=True) for tensor in tensors]
    for place in range(99, -1, -1):
        works[place].wait()
        probe.same(tensors[place], _sum(probe.size) * place, f"all_reduce {place} of 100")


@case()
def large_in_flight(probe: Probe) -> None:
    tensors = [torch.full((200_003,), float(probe.rank + place)) for place in range(8)]
    works = [probe.dist.all_reduce(tensor, group=probe.group, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for place, tensor in enumerate(tensors):
        total = float(sum(range(probe.size)) + place * probe.size)
        probe.same(tensor, torch.full((200_003,), total), f"all_reduce {place}")


@case()
def synchronous_returns_none(probe: Probe) -> None:
    dist, group = probe.dist, probe.group
    probe.equal(dist.all_reduce(torch.ones(2), group=group), None, "all_reduce")
    probe.equal(dist.broadcast(torch.ones(2), group=group, group_src=0), None, "broadcast")
    probe.equal(dist.barrier(group=group), None, "barrier")
    outputs = [torch.zeros(2) for _ in range(probe.size)]
    probe.equal(dist.all_gather(outputs, torch.ones(2), group=group), None, "all_gather")


@case()
def polled_until_completed(probe: Probe) -> None:
    tensor = _values(probe.rank)
    work = probe.dist.all_reduce(tensor, group=probe.group, async_op=True)
    probe.eventually(work.is_completed, "completion")
    work.wait()
    probe.same(tensor, _sum(probe.size))


@case()
def wait_with_a_timeout(probe: Probe) -> None:
    tensor = _values(probe.rank)
    work = probe.dist.all_reduce(tensor, group=probe.group, async_op=True)
    work.wait(timedelta(seconds=60))
    probe.same(tensor, _sum(probe.size))


@case()
def futures(probe: Probe) -> None:
    tensor = _values(probe.rank)
    future = probe.dist.all_reduce(tensor, group=probe.group, async_op=True).get_future()
    value = future.wait()
    probe.same(value[0] if isinstance(value, list | tuple) else value, _sum(probe.size), "value of the future")
    probe.same(tensor, _sum(probe.size))

    tensor = _values(probe.rank)
    future = probe.dist.all_reduce(tensor, group=probe.group, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    probe.same(doubled.wait(), _sum(probe.size) * 2 + 1, "value of a chain of callbacks")

    works = [probe.dist.all_reduce(_values(probe.rank), group=probe.group, async_op=True) for _ in range(3)]
    for result in torch.futures.wait_all([work.get_future() for work in works]):
        probe.same(result[0], _sum(probe.size), "value of one of several futures")


@case()
def a_callback_issues_the_next_collective(probe: Probe) -> None:
    """Like PowerSGD's hook: a chain of reductions, each started when the last one ends, with others queued behind."""
    dist, group, size = probe.dist, probe.group, probe.size

    def again(done: Any) -> Tensor:
        tensor: Tensor = done.value()[0]
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        return tensor

    first = dist.all_reduce(_values(probe.rank), group=group, async_op=True).get_future().then(again)
    probe.same(first.wait(), _sum(size) * size, "the reduction of a reduction")
    probe.still_works()


@case()
def result_dropped_before_completion(probe: Probe) -> None:
    """A Work and a tensor that are not kept alive: the call completes anyway."""
    for _ in range(20):
        probe.dist.all_reduce(_values(probe.rank, 4099), group=probe.group, async_op=True)
    probe.still_works()
