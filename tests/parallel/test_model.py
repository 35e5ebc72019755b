"""Model-parallel hooks: one model on several ranks computes what it computes on one."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from models import TinyGPT
from torch import Tensor, nn

import ringway
from ringway.errors import UsageError
from ringway.parallel import (
    Column,
    GatherOutput,
    Row,
    ScatterOutput,
    register_data_parallel_hooks,
    register_model_parallel_hooks,
    vocabulary_parallel_cross_entropy,
)
from ringway.testing import RankContext, RankPool

VOCABULARY = 33  # not divisible by any number of ranks here
PLAN: dict[str, Any] = {
    "tokens": "vocabulary",
    "head": "column",
    "blocks.*.attention.qkv": Column(parts=3),
    "blocks.*.attention.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": Row(),
}
SEQUENCE_PLAN: dict[str, Any] = {
    "tokens": "vocabulary",
    "drop": ScatterOutput(dim=1),
    "blocks.*.norm*": "sequence_norm",
    "norm": "sequence_norm",
    "head": Column(sequence_dim=1),
    "blocks.*.attention.qkv": Column(parts=3, sequence_dim=1),
    "blocks.*.attention.out": Row(sequence_dim=1),
    "blocks.*.up": Column(sequence_dim=1),
    "blocks.*.down": Row(sequence_dim=1),
}
STEPS = 50 if os.environ.get("RINGWAY_SOAK") else 12
BATCH = 4


class Tolerance(NamedTuple):
    losses: float
    """Relative, for each of the losses."""
    gradients: float
    """For the first step, relative to the parameter's largest gradient."""


# Sums in a different order differ by rounding, and Adam amplifies that. In double precision, only a mistake exceeds the
# limit; in single precision, the observed differences are 500 times smaller than it.
TOLERANCE = {torch.float64: Tolerance(1e-11, 1e-12), torch.float32: Tolerance(1e-4, 1e-5)}


def _batches() -> list[Tensor]:
    chance = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (BATCH, 9), generator=chance) for _ in range(STEPS)]


def _model(seed: int = 0, **options: Any) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(VOCABULARY, **options)


def train(
    context: RankContext,
    data: int,
    model_ranks: int,
    plan: dict[str, Any],
    dtype: torch.dtype,
    backend: str = "gloo",
) -> tuple[list[float], Any]:
    """Losses of the whole batch, and the whole gradients of the first step."""
    context.start(backend)
    mesh = ringway.init_device_mesh("cpu", (data, model_ranks), mesh_dim_names=("data", "model"))
    model = _model(seed=context.rank).to(dtype)  # all ranks get rank 0's values
    split = register_model_parallel_hooks(model, plan, group=mesh.get_group("model")) if model_ranks > 1 else None
    hooks = register_data_parallel_hooks(model, group=mesh.get_group("data"), bucket_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    place = mesh.get_local_rank("data")
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for batch in _batches():
        own = batch.chunk(data)[place]
        logits = model(own[:, :-1])
        loss = vocabulary_parallel_cross_entropy(
            logits, own[:, 1:], group=mesh.get_group("model"), vocabulary=VOCABULARY
        )
        optimizer.zero_grad()
        loss.backward()
        if not first:
            first = _whole_gradients(model, split)
        optimizer.step()
        total = loss.detach().clone()
        ringway.all_reduce(total, group=mesh.get_group("data"))
        losses.append(total.item() / data)
    hooks.remove()
    if split is not None:
        split.remove()
    assert [list(p.shape) for p in model.parameters()] == [list(p.shape) for p in _model().parameters()]
    return losses, first if context.rank == 0 else None


def _whole_gradients(model: nn.Module, split: Any) -> dict[str, Tensor]:
    """Temporarily puts gradients in place of the parameters, so that they can be gathered."""
    if split is None:
        return {name: p.grad.clone() for name, p in model.named_parameters()}
    values = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.grad.clone()
    whole = split.full_state_dict()
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = value
    return {name: whole[name].clone() for name, _ in model.named_parameters()}


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> dict[torch.dtype, tuple[list[float], dict[str, Tensor]]]:
    return {dtype: pool.run(train, 1, 1, {}, dtype, world_size=1)[0] for dtype in TOLERANCE}


@pytest.mark.parametrize(
    ("data", "model_ranks", "plan", "backend"),
    [
        (2, 1, {}, "gloo"),
        (4, 1, {}, "shm"),
        (1, 2, PLAN, "gloo"),
        (1, 4, PLAN, "shm"),
        (2, 2, PLAN, "gloo"),
        (1, 2, SEQUENCE_PLAN, "gloo"),
        (2, 2, SEQUENCE_PLAN, "shm"),
    ],
    ids=["data 2", "data 4", "model 2", "model 4", "data 2 x model 2", "sequence 2", "data 2 x sequence 2"],
)
def test_training_is_that_of_one_rank(
    pool: RankPool,
    alone: dict[torch.dtype, tuple[list[float], dict[str, Tensor]]],
    data: int,
    model_ranks: int,
    plan: dict[str, Any],
    backend: str,
) -> None:
    for dtype, tolerance in TOLERANCE.items():
        results = pool.run(train, data, model_ranks, plan, dtype, backend, world_size=data * model_ranks)
        expected, gradients = alone[dtype]
        assert expected[-1] < expected[0] / 2
        for losses, _ in results:
            assert losses == pytest.approx(expected, rel=tolerance.losses)
        for name, gradient in results[0][1].items():
            assert gradient.dtype is dtype
            limit = tolerance.gradients * gradients[name].abs().max().item()
            assert (gradient - gradients[name]).abs().max() <= limit, f"{dtype} {name}"


def checkpoints(context: RankContext) -> None:
    """A full state dict is that of the unsplit model, and loads into a plain model and back into a split one."""
    context.start("gloo")
    plain = _model()
    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    handle = register_model_parallel_hooks(model, PLAN)
    assert list(model.state_dict()) == keys
    assert model.tokens.weight is model.head.weight
    whole = handle.full_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(whole[name], value), name
    other = _model(seed=9)
    with pytest.raises(UsageError, match=r"'tokens.weight' is \[34, 16\].* \[33, 16\] in the unsplit model"):
        handle.load_full_state_dict(TinyGPT(VOCABULARY + 1).state_dict())
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(model)
    handle.load_full_state_dict(other.state_dict())
    numbers = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    handle_output = ringway.parallel.gather_from_group(
        model(numbers), sizes=ringway.allgather_object(model.head.weight.shape[0])
    )
    torch.testing.assert_close(handle_output, other(numbers))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(numbers), model(numbers))
    handle.remove()
    handle.remove()
    torch.testing.assert_close(model(numbers), other(numbers))
    assert model.head.weight is model.tokens.weight


def ways_to_run(context: RankContext, kind: str) -> None:
    context.start("gloo")
    plain = _model()
    model = _model(checkpoints={"checkpoint": False, "reentrant": True}.get(kind))
    handle = register_model_parallel_hooks(model, SEQUENCE_PLAN if kind == "checkpoint" else PLAN)
    numbers = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        loss = vocabulary_parallel_cross_entropy(model(numbers), numbers, vocabulary=VOCABULARY)
        expected = F.cross_entropy(plain(numbers).flatten(0, 1).float(), numbers.flatten())
    loss.backward()
    expected.backward()
    tolerance = 2e-2 if kind == "autocast" else 1e-5
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    gradients = _whole_gradients(model, handle)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=tolerance, atol=tolerance)
    handle.remove()


def layer_options(context: RankContext) -> None:
    """Layers one by one: outputs joined, inputs split, padding, uneven lengths."""
    context.start("gloo")
    torch.manual_seed(0)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 5, padding_idx=5)
            self.joined = nn.Linear(5, 7)
            self.taken = nn.Linear(7, 3)

        def forward(self, numbers: Tensor) -> Tensor:
            return self.taken(self.joined(self.table(numbers)))

    model = Layers()
    plain = copy.deepcopy(model)
    handle = register_model_parallel_hooks(
        model, {"table": "vocabulary", "joined": Column(gather_output=True), "taken": Row(split_input=True)}
    )
    numbers = torch.arange(7)
    ours, theirs = model(numbers), plain(numbers)
    torch.testing.assert_close(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    gradients = _whole_gradients(model, handle)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    assert not gradients["table.weight"][5].any()
    for outside in (-1, 7):
        with pytest.raises(UsageError, match="outside the vocabulary of 7"):
            model(torch.tensor([0, outside]))
    handle.remove()


def shared_and_thawed_norms(context: RankContext) -> None:
    """A gradient is summed once, however many layers share the parameter, and also if it was unfrozen later."""
    context.start("gloo")

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begin, self.end = nn.Identity(), nn.Identity()
            self.one, self.two, self.frozen = nn.LayerNorm(4), nn.LayerNorm(4), nn.LayerNorm(4)
            self.two.weight = self.one.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.frozen(self.two(self.one(self.begin(x)).tanh())))

    torch.manual_seed(0)
    model = Norms()
    plain = copy.deepcopy(model)
    plan: dict[str, Any] = dict.fromkeys(("one", "two", "frozen"), "sequence_norm")
    handle = register_model_parallel_hooks(model, {**plan, "begin": ScatterOutput(), "end": GatherOutput()})
    x = torch.randn(2, 2 * context.world_size, 4)
    for trained in (False, True):
        for net in (model, plain):
            net.frozen.requires_grad_(trained)
            net.zero_grad()
            net(x).pow(3).sum().backward()
        for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None) == (not trained and name.startswith("frozen"))
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    handle.remove()


@pytest.mark.parametrize("size", [2, 4])
def test_checkpoints(pool: RankPool, size: int) -> None:
    pool.run(checkpoints, world_size=size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_layer_options(pool: RankPool, size: int) -> None:
    pool.run(layer_options, world_size=size)


@pytest.mark.parametrize("size", [1, 2])
def test_shared_and_thawed_norms(pool: RankPool, size: int) -> None:
    pool.run(shared_and_thawed_norms, world_size=size)


@pytest.mark.parametrize("kind", ["checkpoint", "reentrant", "autocast"])
def test_ways_to_run_a_model(pool: RankPool, kind: str) -> None:
    pool.run(ways_to_run, kind, world_size=2)
