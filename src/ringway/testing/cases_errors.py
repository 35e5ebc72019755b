"""Conformance: invalid calls are rejected before anything is sent.

In each case, only one rank makes an invalid call. If anything had been sent, the next collective, which all ranks make,
would hang or give a wrong result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringway.errors import UsageError
from ringway.testing.conformance import case
from ringway.testing.probe import Probe

_Wrong = partial[object]


def _refused(probe: Probe, calls: Iterator[_Wrong]) -> None:
    for number, call in enumerate(calls):
        probe.at(call=number, op=call.func.__name__, arguments=_in_words(call))
        if probe.rank == number % probe.size:
            error = probe.raises(UsageError, call, group=probe.group)
            probe.holds(len(str(error)) > 20, f"the message says too little: {error}")
        probe.still_works()


def _in_words(call: _Wrong) -> str:
    arguments = [repr(argument)[:40] for argument in call.args]
    return ", ".join(arguments + [f"{name}={value}" for name, value in call.keywords.items()])


def _blanks(count: int) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(count)]


@case(own_names=True)
def lists_of_the_wrong_length(probe: Probe) -> None:
    dist, size, one = probe.dist, probe.size, torch.ones(2)
    here = probe.rank

    def calls() -> Iterator[_Wrong]:
        for wrong in {size - 1, size + 1}:
            yield partial(dist.all_gather, _blanks(wrong), one)
            yield partial(dist.gather, one, _blanks(wrong), group_dst=here)
            yield partial(dist.scatter, one, _blanks(wrong), group_src=here)
            yield partial(dist.reduce_scatter, one, _blanks(wrong))
            yield partial(dist.all_to_all, _blanks(size), _blanks(wrong))
            yield partial(dist.all_to_all, _blanks(wrong), _blanks(size))
            yield partial(dist.all_gather_coalesced, [_blanks(1)] * wrong, _blanks(1))
        yield partial(dist.gather, one, group_dst=here)
        yield partial(dist.scatter, one, group_src=here)

    _refused(probe, calls())


@case(own_names=True)
def shapes_that_do_not_fit(probe: Probe) -> None:
    dist, size = probe.dist, probe.size
    three, too_many, even = torch.zeros(3), torch.zeros(3 * size + 1), torch.zeros(size)
    ones = [1] * size

    def calls() -> Iterator[_Wrong]:
        yield partial(dist.all_gather_into_tensor, too_many, three)
        yield partial(dist.reduce_scatter_tensor, three, too_many)
        yield partial(dist.all_gather, _blanks(size), three)
        yield partial(dist.gather, three, _blanks(size), group_dst=probe.rank)
        yield partial(dist.scatter, three, _blanks(size), group_src=probe.rank)
        yield partial(dist.reduce_scatter, three, _blanks(size))
        if size > 1:
            yield partial(dist.all_to_all_single, torch.zeros(size + 1), torch.zeros(size + 1))
        yield partial(dist.all_to_all_single, torch.zeros(size, 3), torch.zeros(size, 2))
        yield partial(dist.all_to_all_single, torch.zeros(size, 3), torch.zeros(size, 2), ones, ones)
        yield partial(dist.all_to_all_single, even, even, ones, [2] * size)
        yield partial(dist.all_to_all_single, even, even, ones, [1] * (size + 1))
        yield partial(dist.all_to_all_single, even, even, ones, [-1, *ones[1:]])

    _refused(probe, calls())


@case(own_names=True)
def dtypes_that_do_not_fit(probe: Probe) -> None:
    dist, size = probe.dist, probe.size

    def calls() -> Iterator[_Wrong]:
        yield partial(dist.all_gather, _blanks(size), torch.zeros(2, dtype=torch.int32))
        yield partial(dist.all_gather_into_tensor, torch.zeros(2 * size), torch.zeros(2, dtype=torch.float64))
        yield partial(dist.reduce_scatter_tensor, torch.zeros(2, dtype=torch.float16), torch.zeros(2 * size))
        yield partial(dist.all_to_all_single, torch.zeros(size), torch.zeros(size, dtype=torch.int64))

    _refused(probe, calls())


@case(own_names=True)
def reductions_without_a_meaning(probe: Probe) -> None:
    dist, op = probe.dist, probe.dist.ReduceOp

    def calls() -> Iterator[_Wrong]:
        yield partial(dist.all_reduce, torch.ones(2), op.BAND)
        yield partial(dist.all_reduce, torch.ones(2, dtype=torch.bool), op.AVG)
        yield partial(dist.all_reduce, torch.ones(2, dtype=torch.complex64), op.MAX)
        yield partial(dist.all_reduce, torch.ones(2), "sum")

    _refused(probe, calls())


@case(own_names=True)
def ranks_outside_the_group(probe: Probe) -> None:
    dist, size, one = probe.dist, probe.size, torch.ones(2)
    strangers = [1000, -2, *(rank for rank in range(max(probe.ranks)) if rank not in probe.ranks)]

    def calls() -> Iterator[_Wrong]:
        for rank in strangers:
            yield partial(dist.broadcast, one, src=rank)
            yield partial(dist.reduce, one, dst=rank)
            yield partial(dist.send, one, dst=rank)
            yield partial(dist.irecv, one, src=rank)
        yield partial(dist.broadcast, one, group_src=size)
        yield partial(dist.send, one, group_dst=size)
        yield partial(dist.send, one, group_dst=probe.rank)
        yield partial(dist.broadcast, one, src=probe.ranks[0], group_src=0)

    _refused(probe, calls())


@case(own_names=True)
def things_that_are_no_tensors_here(probe: Probe) -> None:
    dist = probe.dist

    def calls() -> Iterator[_Wrong]:
        yield partial(dist.all_reduce, torch.ones(2, device="meta"))
        yield partial(dist.broadcast, torch.ones(2, device="meta"), group_src=0)
        yield partial(dist.all_reduce, [1.0, 2.0])
        yield partial(dist.all_gather, _blanks(probe.size), 3.0)

    _refused(probe, calls())


class _Wrapper(torch.Tensor):
    """A tensor that only wraps others, like DTensor, and has no memory of its own."""

    @staticmethod
    def __new__(cls, size: int) -> _Wrapper:
        made: _Wrapper = torch.Tensor._make_wrapper_subclass(cls, (size,))
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return "a tensor that wraps others"

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise AssertionError(f"{function} was called on a tensor that has no data")


@case(own_names=True)
def tensors_without_memory_of_their_own(probe: Probe) -> None:
    dist, size = probe.dist, probe.size
    with FakeTensorMode():
        fake = torch.ones(2)

    def calls() -> Iterator[_Wrong]:
        for wrong in (fake, _Wrapper(2)):
            yield partial(dist.all_reduce, wrong)
            yield partial(dist.broadcast, wrong, group_src=0)
            yield partial(dist.all_gather, _blanks(size), wrong)
        yield partial(dist.all_reduce, torch.ones(1).expand(4))
        yield partial(dist.all_gather_into_tensor, torch.ones(1).expand(2 * size), torch.ones(2))
        yield partial(dist.all_reduce, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        yield partial(dist.broadcast, torch.eye(3).to_sparse(), group_src=0)

    _refused(probe, calls())


@case(own_names=True)
def arguments_of_the_wrong_type(probe: Probe) -> None:
    dist, size, one = probe.dist, probe.size, torch.ones(2)
    even = torch.zeros(size)

    def calls() -> Iterator[_Wrong]:
        for wrong in ("0", 0.5, [0]):
            yield partial(dist.broadcast, one, src=wrong)
            yield partial(dist.reduce, one, group_dst=wrong)
        yield partial(dist.all_gather, None, one)
        yield partial(dist.all_to_all, _blanks(size), 3)
        yield partial(dist.all_reduce_coalesced, None)
        yield partial(dist.all_gather_coalesced, [None] * size, _blanks(1))
        yield partial(dist.reduce_scatter_coalesced, [1, 2])
        yield partial(dist.all_to_all_single, even, even, [1.0] * size, [1.0] * size)
        yield partial(dist.irecv, one, group_src=probe.next, tag="x")
        yield partial(dist.all_reduce, one, log_name=3)
        yield partial(dist.barrier, timeout="a minute")
        yield partial(dist.monitored_barrier, timeout="a minute")
        yield partial(dist.broadcast_object_list, 5, src=probe.ranks[0])
        yield partial(dist.all_gather_object, None, 1)

    _refused(probe, calls())


@case(own_names=True, whole_world=True)
def an_unknown_backend(probe: Probe) -> None:
    error = probe.raises(UsageError, probe.dist.new_group, backend="glooo")
    probe.holds("did you mean 'gloo'" in str(error), f"the nearest name is not suggested: {error}")
    probe.still_works()


@case(own_names=True)
def a_forked_child_is_no_member(probe: Probe) -> None:
    """A collective in a forked child is rejected, and the child's exit disturbs nothing."""
    child = os.fork()
    if child == 0:
        try:
            probe.dist.all_reduce(torch.ones(2, device="cpu"), group=probe.group)  # CUDA refuses a forked child
        except UsageError:
            os._exit(42)
        os._exit(1)
    status: list[int] = []

    def ended() -> bool:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            status.append(os.waitstatus_to_exitcode(code))
        return bool(pid)

    started = time.monotonic()
    probe.eventually(ended, "the end of the forked child")
    probe.equal(status, [42], f"exit status after {time.monotonic() - started:.1f} s (42: refused)")
    probe.still_works()
