"""The autograd functions: right values, and gradients that agree with finite differences over real ranks.

A function of one rank's tensor cannot be checked alone, since its result depends on the others'. So each is placed
between functions that turn it into a map from one replicated tensor to another. All ranks then check the same map
together, with the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from ringway.errors import UsageError
from ringway.parallel import (
    all_to_all_in_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
    vocabulary_parallel_cross_entropy,
)
from ringway.testing import RankContext, RankPool


def _replicated(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(5)).requires_grad_()


def _maps(rank: int, size: int) -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    factor = 1.0 + rank
    uneven = [1] * (size - 1) + [3]
    return {
        "copy, reduce": (lambda x: reduce_from_group((factor * copy_to_group(x)).sin()), _replicated(3, 4)),
        "scatter, gather": (
            lambda x: gather_from_group((factor * scatter_to_group(x, 0)).sin(), 0),
            _replicated(2 * size, 3),
        ),
        "uneven scatter, gather": (
            lambda x: gather_from_group(scatter_to_group(x, 1, sizes=uneven).square(), 1, sizes=uneven),
            _replicated(2, sum(uneven)),
        ),
        "copy, reduce_scatter, gather": (
            lambda x: gather_from_group(reduce_scatter_to_group((factor * copy_to_group(x)).sin(), 1), 1),
            _replicated(2, size),
        ),
        "uneven reduce_scatter": (
            lambda x: gather_from_group(
                reduce_scatter_to_group((factor * copy_to_group(x)).sin(), 0, sizes=uneven), 0, sizes=uneven
            ),
            _replicated(sum(uneven), 2),
        ),
        "gather into split work": (
            lambda x: reduce_from_group((factor * gather_from_group(scatter_to_group(x), sum_gradients=True)).sin()),
            _replicated(2, size),
        ),
        "all_to_all": (
            lambda x: gather_from_group(all_to_all_in_group(scatter_to_group(x, 0) * factor, 2, 0).sin(), 2),
            _replicated(size, 2, size),
        ),
    }


def gradients(context: RankContext, backend: str) -> None:
    context.start(backend)
    for name, (function, tensor) in _maps(context.rank, context.world_size).items():
        assert gradcheck(function, (tensor,)), name
        if context.world_size == 2:
            assert gradgradcheck(function, (tensor,)), name


def values(context: RankContext, backend: str) -> None:
    context.start(backend)
    rank, size = context.rank, context.world_size
    whole = torch.arange(float(4 * size)).view(size, 4)
    assert torch.equal(reduce_from_group(torch.full((2, 3), rank + 1.0).t()), torch.full((3, 2), size * (size + 1) / 2))
    assert torch.equal(scatter_to_group(whole, 0), whole[rank : rank + 1])
    assert torch.equal(gather_from_group(whole[rank : rank + 1], 0), whole)
    assert torch.equal(reduce_scatter_to_group(whole, 0), size * whole[rank : rank + 1])
    tokens = torch.arange(2.0 * size * size).view(2 * size, size)  # rows are split, then columns
    exchanged = all_to_all_in_group(tokens[2 * rank : 2 * rank + 2], split_dim=1, concat_dim=0)
    assert torch.equal(exchanged, tokens[:, rank : rank + 1])
    lengths = [rank_ + 1 for rank_ in range(size)]
    ragged = torch.arange(float(sum(lengths)))
    assert torch.equal(gather_from_group(scatter_to_group(ragged, sizes=lengths), sizes=lengths), ragged)
    with pytest.raises(UsageError, match="does not divide"):
        scatter_to_group(torch.zeros(size + 1))
    with pytest.raises(UsageError, match="add up to"):
        scatter_to_group(torch.zeros(size + 1), sizes=[1] * size)
    with pytest.raises(UsageError, match="do not fit"):
        gather_from_group(torch.zeros(3), sizes=[1] * size)
    with pytest.raises(UsageError, match="dimension 2"):
        gather_from_group(torch.zeros(3), dim=2)


def cross_entropy(context: RankContext, backend: str) -> None:
    context.start(backend)
    rank, size = context.rank, context.world_size
    torch.manual_seed(1)
    for vocabulary in (4 * size, 4 * size + 1):
        logits = torch.randn(2, 5, vocabulary, dtype=torch.double)
        target = torch.randint(vocabulary, (2, 5))
        target[0, 1] = -100
        lengths = [vocabulary // size + (r < vocabulary % size) for r in range(size)]
        for smoothing in (0.0, 0.1):
            for reduction in ("mean", "sum", "none"):
                expected_input = logits.clone().requires_grad_()
                expected = F.cross_entropy(
                    expected_input.view(10, -1), target.view(-1), reduction=reduction, label_smoothing=smoothing
                )
                own = logits.split(lengths, -1)[rank].clone().requires_grad_()
                loss = vocabulary_parallel_cross_entropy(
                    own, target, vocabulary=vocabulary, reduction=reduction, label_smoothing=smoothing
                )
                torch.testing.assert_close(loss.view(-1), expected.view(-1))
                weights = torch.arange(1.0, 1 + expected.numel(), dtype=torch.double)
                (expected.view(-1) * weights).sum().backward()
                (loss.view(-1) * weights).sum().backward()
                torch.testing.assert_close(own.grad, expected_input.grad.split(lengths, -1)[rank])
        whole = logits[0, :2].clone().requires_grad_()
        assert gradcheck(
            lambda x, v=vocabulary, t=target[0, :2], n=lengths: vocabulary_parallel_cross_entropy(
                scatter_to_group(x, sizes=n), t, vocabulary=v, label_smoothing=0.1
            ),
            (whole,),
        )
    half = torch.randn(3, 4, dtype=torch.bfloat16)
    assert vocabulary_parallel_cross_entropy(half, torch.zeros(3, dtype=torch.long)).dtype == torch.float32
    with pytest.raises(UsageError, match="outside the vocabulary"):
        vocabulary_parallel_cross_entropy(half, torch.full((3,), 4 * size))
    with pytest.raises(UsageError, match="its share"):
        vocabulary_parallel_cross_entropy(half, torch.zeros(3, dtype=torch.long), vocabulary=40 * size)


GROUPS = [(1, "gloo"), (2, "shm"), (3, "gloo")]
if os.environ.get("RINGWAY_SOAK"):
    GROUPS += [(2, "gloo"), (3, "shm")]


@pytest.mark.parametrize(("size", "backend"), GROUPS)
def test_gradients_agree_with_finite_differences(pool: RankPool, size: int, backend: str) -> None:
    pool.run(gradients, backend, world_size=size)


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (4, "shm")])
def test_values(pool: RankPool, size: int, backend: str) -> None:
    pool.run(values, backend, world_size=size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_cross_entropy_of_a_split_vocabulary(pool: RankPool, size: int) -> None:
    pool.run(cross_entropy, "gloo", world_size=size)
