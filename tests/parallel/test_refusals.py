"""What the hooks refuse, by name, and that all ranks learn about a rank that differs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from models import TinyGPT
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import ringway
from ringway.errors import CollectiveMismatch, UsageError
from ringway.parallel import Column, register_data_parallel_hooks, register_model_parallel_hooks
from ringway.testing import RankContext, RankPool


def refusals(context: RankContext) -> None:
    context.start("gloo")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    handle = register_data_parallel_hooks(model)
    x = torch.ones(1, 2)
    with pytest.raises(UsageError, match="already"):
        register_data_parallel_hooks(model)
    with pytest.raises(UsageError, match="create_graph"):
        model(x).sum().backward(create_graph=True)
    model.zero_grad()
    model.add_module("2", nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"given parameters \(2.weight, 2.bias\).*register them again"):
        model(x).sum().backward()
    del model[2]
    model[1].bias.requires_grad_(True)
    with pytest.raises(UsageError, match=r"1.bias was frozen"):
        model(x).sum().backward()
    model[1].bias.requires_grad_(False)
    model.zero_grad()
    model.double()
    with pytest.raises(UsageError, match=r"was torch.float32.*register them again"):
        model(x.double()).sum().backward()
    model.float()
    own, model[0].weight = model[0].weight, nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UsageError, match=r"given parameters \(0.weight\)"):
        model(x).sum().backward()
    model[0].weight = own
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(model)
    model.zero_grad()
    model(x * context.rank).sum().backward()  # after all these errors, an ordinary step
    assert torch.equal(model[0].weight.grad[:, 0], model[1].weight.sum(0) * (context.world_size - 1) / 2)
    handle.remove()
    handle.remove()
    model.zero_grad()
    model(x * context.rank).sum().backward()
    assert torch.equal(model[0].weight.grad[:, 0], model[1].weight.sum(0) * context.rank)
    with pytest.raises(UsageError, match="bucket_mb"):
        register_data_parallel_hooks(model, bucket_mb=0)


def refused_gradients(context: RankContext) -> None:
    context.start("gloo")

    class Twice(nn.Module):
        """One layer in two reentrant checkpoints: its gradient arrives in two parts."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 2))

        def forward(self, numbers: Tensor) -> Tensor:
            return F.embedding(numbers, self.table, sparse=True)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True)

        def forward(self, numbers: Tensor) -> Tensor:
            return self.table(numbers) @ self.table.weight.t()

    x = torch.ones(1, 2, requires_grad=True)
    for model, given, reason in (
        (Twice(), x, "second gradient in one backward.*use_reentrant=False"),
        (Lookup(), torch.tensor([1, 2]), "sparse_coo gradient.*must be known in advance"),
        (Tied(), torch.tensor([1, 2]), "its gradient is dense"),
    ):
        handle = register_data_parallel_hooks(model)
        with pytest.raises(UsageError, match=reason):
            model(given).sum().backward()
        handle.remove()

    def take(parameter: Tensor) -> None:
        parameter.grad = None  # like an optimizer that steps inside backward

    for before_ours in (True, False):
        layer = nn.Linear(2, 2)
        if before_ours:
            layer.weight.register_post_accumulate_grad_hook(take)
        handle = register_data_parallel_hooks(layer)
        if not before_ours:
            layer.weight.register_post_accumulate_grad_hook(take)
        with pytest.raises(UsageError, match="took the gradient of parameter 'weight' away"):
            layer(x).sum().backward()
        handle.remove()


def wrong_model(context: RankContext, kind: str) -> str:
    context.start("gloo")
    other = context.rank == 1
    layers: list[nn.Module] = [nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)]
    if other and kind == "shape":
        layers[2] = nn.Linear(3, 4)
    if other and kind == "order":
        layers.reverse()
    if other and kind == "count":
        layers.append(nn.Linear(2, 2))
    if other and kind == "frozen":
        layers[0].requires_grad_(False)
    if other and kind == "dtype":
        layers[1].double()
    if other and kind == "shared":
        layers[2].bias = layers[2].weight = nn.Parameter(torch.zeros(2, 3))
    model = nn.Sequential(*layers)
    with pytest.raises(CollectiveMismatch) as caught:
        register_data_parallel_hooks(model, bucket_mb=1 + other if kind == "setting" else 1)
    assert sorted(caught.value.sides) == [0, 1]
    total = torch.ones(1)
    ringway.all_reduce(total)  # the group still works
    assert total.item() == context.world_size
    return str(caught.value)


def refused_by_one(context: RankContext, kind: str) -> str:
    """If one rank refuses, all ranks get an error; none is left waiting."""
    context.start("gloo")
    other = context.rank == 1
    model = nn.Linear(2, 2)
    settings: dict[str, Any] = {}
    if other and kind == "bucket":
        settings["bucket_mb"] = float("nan")
    if other and kind == "codec":
        settings["codec"] = "int9"
    if other and kind == "sparse":
        model.register_buffer("links", torch.eye(2).to_sparse())
    if other and kind == "expanded":
        model.register_buffer("ones", torch.ones(1).expand(3))
    if other and kind == "lazy":
        model = nn.LazyLinear(2)
    with pytest.raises(UsageError if other else CollectiveMismatch) as caught:
        register_data_parallel_hooks(model, **settings)
    total = torch.ones(1)
    ringway.all_reduce(total)  # the group still works
    assert total.item() == context.world_size
    return str(caught.value)


def hooked_twice(context: RankContext) -> None:
    """A parameter is averaged once, whichever model it is reached through."""
    context.start("gloo")
    shared = nn.Linear(2, 2)
    actor, critic = nn.Sequential(shared, nn.Linear(2, 1)), nn.Sequential(shared, nn.Linear(2, 1))
    handle = register_data_parallel_hooks(actor)
    for again in (actor, actor[0], nn.Sequential(actor), critic):
        with pytest.raises(UsageError, match="has data-parallel hooks already"):
            register_data_parallel_hooks(again)
    shared.requires_grad_(False)
    register_data_parallel_hooks(critic[1]).remove()
    handle.remove()
    register_data_parallel_hooks(critic).remove()


def exchanged_at_the_same_address(context: RankContext) -> None:
    """A module that was deleted and recreated is a different one, even if Python reuses its address."""
    context.start("gloo")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    handle = register_data_parallel_hooks(model)
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    del model[1]
    model.append(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"given parameters \(1.weight, 1.bias\)"):
        model(torch.ones(1, 2)).sum().backward()
    handle.remove()


def half_of_another_kind(context: RankContext) -> None:
    """The same number of bytes, but a different dtype."""
    context.start("gloo")
    for as_views in (True, False):
        model = nn.Linear(2, 2).half()
        handle = register_data_parallel_hooks(model, gradient_as_bucket_view=as_views)
        model.bfloat16()
        with pytest.raises(UsageError, match=r"was torch.float16.*torch.bfloat16"):
            model(torch.ones(1, 2).bfloat16()).sum().backward()
        handle.remove()


def refused_plans(context: RankContext) -> None:
    context.start("gloo")

    def refused(plan: dict[str, Any], model: nn.Module | None = None) -> str:
        model = model or TinyGPT()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UsageError) as caught:
            register_model_parallel_hooks(model, plan)
        for name, value in model.state_dict().items():
            assert value.shape == before[name].shape
        return str(caught.value)

    assert "the plan is empty" in refused({})
    assert "names no module" in refused({"block.*.up": "column"})
    assert "did you mean 'column'" in refused({"head": "colum"})
    assert "named twice" in refused({"blocks.*.up": "column", "blocks.0.up": "row"})
    assert "pass a style" in refused({"head": 3})
    assert "is a LayerNorm, but this style is for Linear" in refused({"blocks.*.up": "column", "norm": "column"})
    assert "splits it differently" in refused({"tokens": "vocabulary", "head": "row"})
    assert "into 5 parts" in refused({"blocks.0.up": Column(parts=5)})
    recurrent = nn.ModuleDict({"inner": nn.LSTM(2, 2)})
    split = register_model_parallel_hooks(recurrent, {"inner": "scatter_output"})
    with pytest.raises(UsageError, match="LSTM gives a tuple"):
        recurrent["inner"](torch.ones(2, 1, 2))
    split.remove()
    assert "max_norm" in refused({"0": "vocabulary"}, nn.Sequential(nn.Embedding(8, 2, max_norm=1.0)))
    assert "gather_output would interleave" in refused({"blocks.0.up": Column(parts=2, gather_output=True)})
    model = TinyGPT()
    hooks = register_data_parallel_hooks(model)
    assert "register the model-parallel hooks first" in refused({"blocks.*.up": "column"}, model)
    hooks.remove()
    assert "'head.weight' is shared" in refused({"tokens": "vocabulary"})
    assert "'tokens.weight' is shared" in refused({"head": "column"})
    assert "'head.weight' is shared" in refused({"tokens": "vocabulary", "head": "scatter_output"})
    assert "needs it whole" in refused({"blocks.0": "sequence_norm", "blocks.0.up": "column"})
    tied = nn.Sequential(nn.Embedding(8, 2), nn.Linear(2, 8))
    tied[1].weight = tied[0].weight
    assert "splits one of them" in refused({"0": "vocabulary", "1": "sequence_norm"}, tied)
    assert "weight is computed" in refused({"0": "column"}, nn.Sequential(weight_norm(nn.Linear(4, 4))))
    norms = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    split = register_model_parallel_hooks(norms, {"0": "sequence_norm", "1": "column"})
    assert "'0' is parallel already" in refused({"0": "sequence_norm"}, norms)
    assert "'1' is parallel already" in refused({"1": "column"}, norms)
    split.remove()
    register_model_parallel_hooks(norms, {"0": "sequence_norm"}).remove()
    with pytest.raises(CollectiveMismatch, match="different models"):
        register_model_parallel_hooks(model, {"head": "column" if context.rank else "row"})


def other_module_names(context: RankContext) -> str:
    """A plan that fits all models but one."""
    context.start("gloo")
    other = context.rank == 1
    model = nn.Sequential(nn.Linear(2, 2)) if other else TinyGPT()
    with pytest.raises(UsageError if other else CollectiveMismatch, match="names no module") as caught:
        register_model_parallel_hooks(model, {"blocks.*.up": "column"})
    return str(caught.value)


def test_refusals(pool: RankPool) -> None:
    pool.run(refusals, world_size=2)
    pool.run(refused_gradients, world_size=2)
    pool.run(refused_plans, world_size=2)
    pool.run(hooked_twice, world_size=2)
    pool.run(exchanged_at_the_same_address, world_size=2)
    pool.run(half_of_another_kind, world_size=2)


@pytest.mark.parametrize("kind", ["shape", "order", "count", "frozen", "dtype", "shared", "setting"])
def test_all_ranks_report_a_rank_with_another_model(pool: RankPool, kind: str) -> None:
    messages = pool.run(wrong_model, kind, world_size=3)
    assert len(set(messages)) == 1
    assert "on rank 0: " in messages[0]
    assert "on rank 1: " in messages[0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bucket", "bucket_mb=nan"),
        ("codec", "codec 'int9' is unknown"),
        ("sparse", "buffer 'links' is torch.sparse_coo"),
        ("expanded", "buffer 'ones' has elements that share memory"),
        ("lazy", "parameter 'weight' has no shape yet"),
    ],
)
def test_all_ranks_report_what_one_rank_refuses(pool: RankPool, kind: str, reason: str) -> None:
    messages = pool.run(refused_by_one, kind, world_size=3)
    assert all(reason in message for message in messages)
    assert "rank 1 refused" in messages[0]
    assert "rank 1 refused" in messages[2]


def test_all_ranks_report_a_plan_that_one_rank_cannot_follow(pool: RankPool) -> None:
    first, _, last = pool.run(other_module_names, world_size=3)
    assert "rank 1 refused" in first
    assert first == last
