"""Data-parallel hooks: the gradients of DistributedDataParallel, and what programs do around them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import RandomNet, TinyGPT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringway
from ringway.errors import UsageError
from ringway.parallel import register_data_parallel_hooks
from ringway.testing import RankContext, RankPool

SMALL_MB = 0.0005  # so that small models have several buckets


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _require_equal(ours: nn.Module, theirs: nn.Module, what: str, exact: bool = True) -> None:
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{what}: '{name}' {a.grad is None} {b.grad is None}"
        if a.grad is not None and b.grad is not None:
            if exact:
                assert torch.equal(a.grad, b.grad), f"{what}: '{name}' differs by {(a.grad - b.grad).abs().max()}"
            else:
                torch.testing.assert_close(a.grad, b.grad, msg=f"{what}: '{name}'")


def random_models_like_ddp(context: RankContext, seeds: range, unused: bool) -> None:
    """While parameters may be unused, both keep DDP's first buckets; otherwise both follow backward's order."""
    context.start("gloo")
    for seed in seeds:
        torch.manual_seed(seed)
        ours = RandomNet(seed, unused=unused)
        wrapped = DistributedDataParallel(copy.deepcopy(ours), bucket_cap_mb=SMALL_MB, find_unused_parameters=unused)
        handle = register_data_parallel_hooks(ours, bucket_mb=SMALL_MB)
        torch.manual_seed(100 * seed + context.rank)
        for step in range(4):
            accumulated = torch.randn(2, 3, ours.width)
            x = torch.randn(3, ours.width)
            if step % 2:
                with handle.no_sync():
                    ours(accumulated).square().sum().backward()
                with wrapped.no_sync():
                    wrapped(accumulated).square().sum().backward()
            ours(x).square().sum().backward()
            wrapped(x).square().sum().backward()
            # The sum over two ranks does not depend on the position in a bucket. Over more ranks it does, in gloo: DDP
            # starts with a single bucket if it does not search for unused parameters, and keeps its first buckets if it
            # does.
            exact = context.world_size == 2 or (step == 0 if unused else step > 0)
            _require_equal(ours, wrapped.module, f"seed {seed}, step {step}", exact)
            keep_values = step == 2
            ours.zero_grad(set_to_none=not keep_values)
            wrapped.zero_grad(set_to_none=not keep_values)
        handle.remove()


def unused_differs_by_rank(context: RankContext) -> None:
    """A layer that only one rank uses has a gradient everywhere; one that no rank uses has none."""
    context.start("gloo")
    torch.manual_seed(0)
    model = RandomNet(3, unused=True)
    (one, nobody, *_) = [i for i in range(len(model.layers)) if i not in model.order]
    wrapped = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    handle = register_data_parallel_hooks(model, bucket_mb=SMALL_MB)
    for step in range(4):
        x = torch.randn(2, model.width)
        extra = one if context.rank == (step % 2) else None
        model(x, extra).sum().backward()
        wrapped(x, extra).sum().backward()
        _require_equal(model, wrapped.module, f"step {step}", exact=False)
        assert model.layers[one].weight.grad is not None
        assert model.layers[nobody].weight.grad is None
        model.zero_grad()
        wrapped.zero_grad()
    handle.remove()


def accumulated_then_unused(context: RankContext) -> None:
    """What no_sync accumulated is averaged with the next backward, even if that does not use the parameter."""
    context.start("gloo")
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    handle = register_data_parallel_hooks(model)
    with handle.no_sync():
        (model[1](torch.full((1, 2), 1.0 + context.rank))).sum().backward()
    model[0](torch.ones(1, 2)).sum().backward()
    mean = (1.0 + context.world_size) / 2
    assert torch.equal(model[1].weight.grad, torch.full((2, 2), mean))
    handle.remove()


def several_backwards(context: RankContext) -> None:
    """Two synchronized backwards without zero_grad between them add up, however gradients are stored."""
    context.start("gloo")
    for as_views in (True, False):
        model = nn.Linear(3, 1, bias=False)
        handle = register_data_parallel_hooks(model, gradient_as_bucket_view=as_views)
        for step in range(1, 4):
            model(torch.full((1, 3), float(context.rank))).sum().backward()
            expected = step * (context.world_size - 1) / 2
            torch.testing.assert_close(model.weight.grad, torch.full((1, 3), expected))
        kept = model.weight.grad
        model.zero_grad()
        model(torch.full((1, 3), 7.0)).sum().backward()
        if not as_views:
            torch.testing.assert_close(kept, torch.full((1, 3), 3 * (context.world_size - 1) / 2))
        handle.remove()


def sparse_and_mixed(context: RankContext) -> None:
    """Sparse gradients stay sparse; each dtype has its own buckets; strides are the parameters'."""
    context.start("gloo")

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.single = nn.Linear(4, 4)
            self.exact = nn.Linear(4, 4).double()
            self.short = nn.Linear(4, 4).bfloat16()
            self.turned = nn.Parameter(torch.randn(4, 6).t())

        def forward(self, numbers: Tensor) -> Tensor:
            x = self.single(self.table(numbers))
            return (self.short(self.exact(x.double()).bfloat16()).float() @ self.turned.t()).sum()

    torch.manual_seed(0)
    model = Mixed()
    reference = copy.deepcopy(model)
    handle = register_data_parallel_hooks(model)
    assert sorted(len(bucket) for bucket in handle.bucket_names) == [2, 2, 3]
    batches = [torch.tensor([r, r + 1, 5]) for r in range(context.world_size)]
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        model(batches[context.rank]).backward()
        for batch in batches:
            (reference(batch) / context.world_size).backward()
        assert model.table.weight.grad.is_sparse
        assert model.turned.grad.stride() == model.turned.stride()
        for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            tolerance = 0.05 if "short" in name or a.dtype != torch.double else 1e-2
            torch.testing.assert_close(
                a.grad.to_dense().double(), b.grad.to_dense().double(), rtol=tolerance, atol=tolerance, msg=name
            )
    handle.remove()


def values_of_rank_0(context: RankContext) -> tuple[list[Tensor], list[str]]:
    context.start("gloo")
    torch.manual_seed(context.rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model(torch.randn(4, 2))
    keys = list(model.state_dict())
    handle = register_data_parallel_hooks(model)
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)  # as for a moving average: its backward is not synchronized
    twin(torch.randn(4, 2)).sum().backward()
    handle.remove()
    return [t.clone() for t in model.state_dict().values()], keys


def checkpoints_and_compile(context: RankContext, kind: str) -> None:
    """The same gradients, however backward is run."""
    context.start("gloo")
    torch.manual_seed(0)
    reentrant = {"checkpoint": False, "reentrant": True}.get(kind)
    model = TinyGPT(checkpoints=reentrant, blocks=1 if kind == "compile" else 2)
    plain = copy.deepcopy(model)
    plain.checkpoints = None
    handle = register_data_parallel_hooks(model, bucket_mb=0.01)
    called: Any = torch.compile(model, backend="eager") if kind == "compile" else model
    batches = [torch.randint(33, (2, 8)) for _ in range(context.world_size)]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")
    for _ in range(3):
        before = ringway.status()["calls"]
        with autocast:
            loss = called(batches[context.rank]).float().square().mean()
        loss.backward()
        for batch in batches:
            with autocast:
                reference = plain(batch).float().square().mean() / context.world_size
            reference.backward()
        _require_equal(model, plain, kind, exact=False)
        calls = ringway.recent_calls(ringway.status()["calls"] - before)
        sent = len([call for call in calls if call.label.startswith("gradients ")])
        model.zero_grad()
        plain.zero_grad()
    if kind != "compile":
        assert sent == len(handle.bucket_names)  # once each: a reentrant checkpoint is not a separate backward
    handle.remove()


def error_before_the_first_gradient(context: RankContext) -> None:
    """Of two graphs, the backward of one raises: the other's is an ordinary step, without a forward in between."""
    context.start("gloo")

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("no")

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, broken: str) -> Tensor:
            x = self.first(x)
            x = self.last(Broken.apply(x) if broken == "between" else x)
            return Broken.apply(x) * 1 if broken == "behind" else x * 1

    x = torch.full((1, 3), 1.0 + context.rank)
    for called_as_module in (True, False):
        for broken in ("behind", "between"):
            model = Branches()
            handle = register_data_parallel_hooks(model, bucket_mb=SMALL_MB / 10)
            call: Any = model if called_as_module else model.forward
            call(x, "").sum().backward()
            expected = _gradients(model)
            model.zero_grad()
            failing, sound = call(x, broken), call(x, "")
            with pytest.raises(ArithmeticError):
                failing.sum().backward()
            model.zero_grad()
            sound.sum().backward()
            for name, gradient in _gradients(model).items():
                assert torch.equal(gradient, expected[name]), (called_as_module, broken, name)
            handle.remove()


def error_in_backward(context: RankContext) -> None:
    """A backward that raised half-way leaves nothing behind that affects the next one."""
    context.start("gloo")
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    handle = register_data_parallel_hooks(model, bucket_mb=SMALL_MB / 10)
    x = torch.full((1, 3), 1.0 + context.rank)
    model(x).sum().backward()
    expected = _gradients(model)
    model.zero_grad()

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("no")

    middle = model[1].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()
    middle.remove()
    model.zero_grad(set_to_none=False)  # buckets in flight may arrive after the zeros
    with pytest.raises(UsageError, match="ended in an error while gradients were in flight"):
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    for name, gradient in _gradients(model).items():
        assert torch.equal(gradient, expected[name]), name
    handle.remove()


def gradient_penalty(context: RankContext) -> None:
    """`torch.autograd.grad` on the way to the loss is not a step, and sends nothing."""
    context.start("gloo")
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    plain = copy.deepcopy(model)
    handle = register_data_parallel_hooks(model)
    plain.load_state_dict(model.state_dict())

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = net(x).sum()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + slope.square().sum()

    batches = [torch.full((2, 3), 0.1 + rank) for rank in range(context.world_size)]
    for _ in range(2):
        calls = ringway.status()["calls"]
        loss = loss_of(model, batches[context.rank])
        assert ringway.status()["calls"] == calls
        loss.backward()
        for batch in batches:
            (loss_of(plain, batch) / context.world_size).backward()
        _require_equal(model, plain, "penalty", exact=False)
        model.zero_grad()
        plain.zero_grad()
    handle.remove()


def not_called_as_a_module(context: RankContext) -> None:
    """A program may call one of the model's methods; gradients are right, also with reentrant checkpoints."""
    context.start("gloo")
    torch.manual_seed(0)
    model = TinyGPT(checkpoints=True)
    plain = copy.deepcopy(model)
    plain.checkpoints = None
    handle = register_data_parallel_hooks(model, bucket_mb=0.01)
    batches = [torch.randint(33, (2, 8)) for _ in range(context.world_size)]
    for _ in range(2):
        model.forward(batches[context.rank]).square().mean().backward()
        for batch in batches:
            (plain(batch).square().mean() / context.world_size).backward()
        _require_equal(model, plain, "method", exact=False)
        model.zero_grad()
        plain.zero_grad()
    handle.remove()


def parameter_as_output(context: RankContext) -> None:
    """A model may return one of its parameters (a learned temperature); forwards leave no hooks on it."""
    context.start("gloo")

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.scale

    model = Scaled()
    handle = register_data_parallel_hooks(model)
    for _ in range(3):
        model.zero_grad()
        output, scale = model(torch.full((1, 2), 1.0 + context.rank))
        (output.sum() * scale).backward()
    assert not model.scale._backward_hooks
    everybody = ringway.allgather_object(model.scale.grad)
    assert all(torch.equal(one, everybody[0]) for one in everybody)
    handle.remove()


def alone_in_its_group(context: RankContext) -> None:
    """If nothing is averaged, as in pure model parallelism, buckets take no memory."""
    context.start("gloo")
    groups = [ringway.new_group([rank]) for rank in range(context.world_size)]
    model = nn.Linear(4, 4)
    handle = register_data_parallel_hooks(model, groups[context.rank])
    assert handle.bucket_names == [["weight", "bias"]]
    assert all(bucket.flat.is_meta for bucket in handle._buckets)
    model(torch.full((1, 4), 1.0 + context.rank)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 1.0 + context.rank))
    handle.load_state_dict(handle.state_dict())
    handle.remove()


def adopted_group(context: RankContext) -> None:
    """A program that initialized torch.distributed itself can use the hooks too."""
    context.start("gloo", module="torch.distributed")
    model = nn.Linear(2, 1, bias=False)
    handle = register_data_parallel_hooks(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), float(context.rank))).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((1, 2), (context.world_size - 1) / 2))
    handle.remove()


def with_codec(context: RankContext, codec: str) -> tuple[float, float]:
    """Momentum SGD with compressed gradients learns as well as without."""
    context.start("gloo")
    results = []
    for used in (None, codec):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        handle = register_data_parallel_hooks(model, codec=used)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
        torch.manual_seed(context.rank)
        for _ in range(200):
            x = torch.randn(16, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        others = ringway.allgather_object(parameters)
        assert all(torch.equal(parameters, other) for other in others)
        if used is not None:
            state = handle.state_dict()
            assert state["feedback"]["slots"]
            handle.load_state_dict(state)
            loss_before = [p.clone() for p in model.parameters()]
            model(torch.randn(4, 8)).sum().backward()
            assert loss_before[0].shape == model[0].weight.grad.shape
            with pytest.raises(UsageError, match="another model"):
                handle.load_state_dict({**state, "buckets": [["nothing"]]})
            mixed = register_data_parallel_hooks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
            with pytest.raises(UsageError, match="its dtypes"):
                mixed.load_state_dict({**state, "buckets": [["0.weight", "0.bias", "1.weight", "1.bias"]]})
            mixed.remove()
        handle.remove()
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(9))
        results.append((model(x) - x.sum(1, keepdim=True)).square().mean().item())
    return results[0], results[1]


def overlap(context: RankContext) -> tuple[int, int]:
    """How many buckets were sent before the last gradient was computed."""
    context.start("gloo")
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    handle = register_data_parallel_hooks(model, bucket_mb=32 * 33 * 4 / (1 << 20))
    model(torch.randn(4, 32)).sum().backward()
    assert [names[-1] for names in handle.bucket_names] == [f"{i}.weight" for i in reversed(range(6))]
    counted = ringway.status()["calls"]
    before: list[int] = []
    model[0].weight.register_hook(lambda g: before.append(ringway.status()["calls"] - counted))
    model(torch.randn(4, 32)).sum().backward()
    handle.remove()
    return before[0], len(handle.bucket_names)


@pytest.mark.parametrize(("size", "unused"), [(2, True), (2, False), (3, True), (3, False)])
def test_random_models_have_the_gradients_of_ddp(pool: RankPool, size: int, unused: bool) -> None:
    pool.run(random_models_like_ddp, range(12 if size == 2 else 6), unused, world_size=size)


@pytest.mark.parametrize(
    "case",
    [
        unused_differs_by_rank,
        accumulated_then_unused,
        several_backwards,
        sparse_and_mixed,
        error_in_backward,
        error_before_the_first_gradient,
        parameter_as_output,
        alone_in_its_group,
        gradient_penalty,
        not_called_as_a_module,
        adopted_group,
    ],
)
def test_case(pool: RankPool, case: Any) -> None:
    pool.run(case, world_size=2)


def test_values_come_from_rank_0_and_keys_stay(pool: RankPool) -> None:
    (first, keys), (second, _) = pool.run(values_of_rank_0, world_size=2)
    assert len(keys) == len(first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["plain", "checkpoint", "reentrant", "autocast", "compile"])
def test_ways_to_run_a_model(pool: RankPool, kind: str) -> None:
    pool.run(checkpoints_and_compile, kind, world_size=2)


@pytest.mark.parametrize("codec", ["onebit", "int8"])
def test_codec_with_error_feedback_learns(pool: RankPool, codec: str) -> None:
    for plain, compressed in pool.run(with_codec, codec, world_size=2):
        assert compressed < 4 * plain, (plain, compressed)


def test_buckets_leave_while_backward_runs(pool: RankPool) -> None:
    for before, buckets in pool.run(overlap, world_size=2):
        assert before == buckets - 1
