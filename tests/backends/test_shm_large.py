"""Tensors beyond 2 GiB and 2^31 elements on shm. Only `make soak` runs these, because of the memory they take."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import ringway as dist
from ringway.testing import RankContext, RankPool

PERIOD = 251  # a prime, so that data shifted or truncated at a power of two shows
ROWS = 2 * (2**30 // PERIOD + 1000)
ROWS_CHECKED_AT_ONCE = 1 << 20
SECONDS = 900


def _row(offset: int) -> Tensor:
    return torch.arange(PERIOD, dtype=torch.int64).add(offset).to(torch.uint8)


def _filled(rows: int, offset: int) -> Tensor:
    return torch.empty(rows, PERIOD, dtype=torch.uint8).copy_(_row(offset))


def _check(tensor: Tensor, row: Tensor) -> None:
    for part in tensor.view(-1, PERIOD).split(ROWS_CHECKED_AT_ONCE):
        assert bool((part == row).all())


def _beyond_two_gib(context: RankContext) -> int:
    context.start("shm")
    rank = context.rank
    tensor = _filled(ROWS, 3 * rank).view(-1)
    dist.all_reduce(tensor)
    _check(tensor, _row(0) + _row(3))
    tensor.view(-1, PERIOD).copy_(_row(7 + rank))
    dist.broadcast(tensor, src=1)
    _check(tensor, _row(8))
    if rank == 0:
        tensor.view(-1, PERIOD).copy_(_row(20))
        dist.send(tensor, dst=1)
    else:
        dist.recv(tensor, src=0)
        _check(tensor, _row(20))
    # In place: the input is this rank's half of the output.
    half = tensor.chunk(2)[rank]
    half.view(-1, PERIOD).copy_(_row(40 + rank))
    dist.all_gather_into_tensor(tensor, half)
    for source, part in enumerate(tensor.chunk(2)):
        _check(part, _row(40 + source))
    return tensor.numel()


@pytest.mark.skipif(not os.environ.get("RINGWAY_SOAK"), reason="takes 5 GB of memory; make soak")
@pytest.mark.timeout(SECONDS + 60)
def test_tensors_beyond_two_gib(pool: RankPool) -> None:
    for elements in pool.run(_beyond_two_gib, world_size=2, timeout=SECONDS):
        assert elements > 2**31
