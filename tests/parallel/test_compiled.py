"""`torch.compile(fullgraph=True)`: the functions and split layers trace, and compute the same as without it."""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.torch_version import TorchVersion

import ringway
from ringway.parallel import (
    all_to_all_in_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    register_model_parallel_hooks,
    scatter_to_group,
    vocabulary_parallel_cross_entropy,
)
from ringway.testing import RankContext, RankPool

SOAK = os.environ.get("RINGWAY_SOAK") == "1"
pytestmark = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="before 2.13, dynamo does not trace groups that are Python objects"
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


def functions(context: RankContext, backend: str) -> None:
    """All of them in one graph, with parts of different lengths, in the world's group and in another."""
    context.start(backend)
    torch.compiler.reset()
    group = ringway.new_group(list(range(context.world_size)))
    uneven = [1] * (context.world_size - 1) + [3]

    def every(x: Tensor) -> Tensor:
        x = reduce_from_group((1.0 + context.rank) * copy_to_group(x)).sin()
        x = gather_from_group(scatter_to_group(x, 1, group, uneven).square(), 1, group, uneven)
        x = gather_from_group(reduce_scatter_to_group(x.cos(), 1, sizes=uneven), 1, sizes=uneven, sum_gradients=True)
        x = gather_from_group(all_to_all_in_group(scatter_to_group(x, 0), 2, 0, group).sin(), 2, group)
        target = torch.zeros(x.shape[:2], dtype=torch.long)
        return vocabulary_parallel_cross_entropy(scatter_to_group(x, 2), target, group, label_smoothing=0.1)

    counted = CompileCounterWithBackend("aot_eager")
    results = []
    for run in (every, torch.compile(every, fullgraph=True, backend=counted)):
        x = torch.randn(2, sum(uneven), 4, generator=torch.Generator().manual_seed(5)).requires_grad_()
        loss = run(x)
        loss.backward()
        results.append((loss, x.grad))
    (plain, gradient), (compiled, its_gradient) = results
    assert counted.frame_count == 1
    assert torch.equal(compiled, plain)
    assert torch.equal(its_gradient, gradient)


def model(context: RankContext, sequence: bool) -> None:
    """The GPT of the examples, with its loss: one graph, the same losses and parameters."""
    context.start("shm")
    torch.compiler.reset()
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example  # the compiler imports what it traces
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    plain = example.GPT(letters=31, context=8, width=16, heads=2, blocks=1)
    twin = copy.deepcopy(plain)
    handles = [register_model_parallel_hooks(one, example.plan(sequence)) for one in (plain, twin)]

    def loss_of(called: Any, letters: Tensor) -> Tensor:
        return vocabulary_parallel_cross_entropy(called(letters[:, :-1]), letters[:, 1:], vocabulary=31)

    counted = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(loss_of, fullgraph=True, backend=counted)
    rule = torch.optim.SGD(plain.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    for step in range(2):
        letters = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(step))
        losses = loss_of(plain, letters), compiled(twin, letters)
        for loss, optimizer in zip(losses, rule, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[1], losses[0])
    assert counted.frame_count == 1
    for one, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, one)
    with pytest.raises(RuntimeError, match="outside the vocabulary"):
        compiled(twin, torch.full((2, 9), 31))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("backend", ["shm", "gloo"] if SOAK else ["shm"])
def test_functions_trace_into_one_graph(pool: RankPool, backend: str) -> None:
    pool.run(functions, backend, world_size=2, timeout=240)


@pytest.mark.parametrize("sequence", [True, False] if SOAK else [True])
def test_a_split_model_compiles_whole(pool: RankPool, sequence: bool) -> None:
    pool.run(model, sequence, world_size=2, timeout=240)
