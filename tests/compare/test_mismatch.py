"""Ranks that call different things on gloo get an error before anything wrong is sent, for synchronous calls,
asynchronous calls, and DDP's."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ringway._core as _core
from few_files import leave_descriptors
from ringway.call import OPS
from ringway.compare.one_host import board_error
from ringway.errors import CollectiveMismatch
from ringway.testing import RankContext, RankPool


def reduce_and_wait(dist: Any, tensor: torch.Tensor, asynchronous: bool) -> None:
    work = dist.all_reduce(tensor, async_op=asynchronous)
    if work is not None:
        work.wait()


def part_ways(context: RankContext, late: int, asynchronous: bool) -> Any:
    """One rank reduces eight elements, the others four. Rank `late` arrives last."""
    dist = context.start("gloo", timeout=timedelta(seconds=100))
    dist.barrier()
    if context.rank == late:
        time.sleep(0.5)
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        reduce_and_wait(dist, torch.ones(8 if context.rank == 1 else 4), asynchronous)
    took = time.monotonic() - began
    with pytest.raises(CollectiveMismatch):  # the group has ended
        dist.all_reduce(torch.ones(4))
    other = dist.new_group()  # other groups stay usable
    alive = torch.ones(1)
    dist.all_reduce(alive, group=other)
    context.store.set(f"done{context.rank}", "1")
    context.store.wait([f"done{rank}" for rank in range(context.world_size)])
    dist.destroy_process_group()
    return str(caught.value), caught.value.sides, caught.value.sequence, took, alive.item()


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_rank_gets_the_error_in_any_order_of_arrival(pool: RankPool, late: int, asynchronous: bool) -> None:
    for text, sides, number, took, alive in pool.run(part_ways, late, asynchronous, world_size=3, timeout=90):
        assert "called different things; the group has ended" in text
        assert "all_reduce #1 (float32, 32 bytes, SUM, group " in sides[1]
        assert __file__ in sides[1]
        assert number == 1
        assert took < 30  # and not the group's 100 s
        assert alive == 3.0


def part_ways_in_ddp(context: RankContext) -> Any:
    dist = context.start("gloo", timeout=timedelta(seconds=100))
    # Models of different sizes, which DDP's own check at the start does not see: the gradient reductions differ.
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    if context.rank == 1:
        dist.all_reduce(torch.ones(3))
        return "no error"
    try:
        model(torch.ones(1, 64)).sum().backward()
    except Exception as error:
        return type(error).__name__ + str(error)
    return "no error"


def test_ddp_ends_with_the_mismatch_too(pool: RankPool) -> None:
    began = time.monotonic()
    outcomes = pool.try_run(part_ways_in_ddp, world_size=2, timeout=90)
    assert time.monotonic() - began < 60
    assert outcomes[0].ok
    assert "called different things" in outcomes[0].value
    assert isinstance(outcomes[1].error, CollectiveMismatch)
    assert "DistributedDataParallel" not in str(outcomes[1].error)


def records_of(size: int) -> list[Any]:
    fd = _core.create_call_board(size, size, "t" * 32)
    records = []
    for rank in range(size):
        record = _core.GroupRecord(_core.Recorder(16), "g", size)
        record.compare(_core.CallBoard(fd, rank, [10 * rank for rank in range(size)], "t" * 32))
        records.append(record)
    return records


def test_the_board_compares_what_must_agree_and_nothing_else() -> None:
    """For every op, changes one fact at a time."""
    same = {"bytes": 64, "dtype": 0, "reduce": 0, "root": 0}
    other = {"bytes": 128, "dtype": 1, "reduce": 3, "root": 1}
    for op in OPS:
        if not op.collective:
            continue
        for fact in same:
            first, second = records_of(2)
            first.begin(op.code, *same.values(), 0)
            changed = {**same, fact: other[fact]}
            if fact in op.agree:
                with pytest.raises(_core.CallsDiffer):
                    second.begin(op.code, *changed.values(), 0)
                assert set(board_error("g", second.difference).sides) == {0, 10}
                assert first.difference == second.difference
            else:
                second.begin(op.code, *changed.values(), 0)
                assert first.difference is None


def _board_without_descriptors(context: RankContext) -> str:
    leave_descriptors(0)
    with pytest.raises(RuntimeError) as caught:
        _core.create_call_board(2, 2, "t" * 32)
    return str(caught.value)


def test_a_board_without_a_descriptor_says_so(pool: RankPool) -> None:
    (said,) = pool.run(_board_without_descriptors, world_size=1)
    pool.replace()
    assert said == "no descriptor for the call board of a group: Too many open files"


def test_a_full_board_or_one_of_another_group_is_refused() -> None:
    fd = _core.create_call_board(2, 1, "t" * 32)
    with pytest.raises(RuntimeError, match="another group"):
        _core.CallBoard(fd, 0, [0, 1], "u" * 32)
    with pytest.raises(RuntimeError, match="another group"):
        _core.CallBoard(fd, 0, [0, 1, 2], "t" * 32)
    _core.CallBoard(fd, 0, [0, 1], "t" * 32)
    with pytest.raises(RuntimeError, match="every seat"):
        _core.CallBoard(fd, 1, [0, 1], "t" * 32)
    with os.fdopen(os.memfd_create("small"), "wb") as small, pytest.raises(RuntimeError, match="not a call board"):
        _core.CallBoard(small.fileno(), 0, [0, 1], "t" * 32)
