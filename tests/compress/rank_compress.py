"""What the ranks of the compression tests run. Each function runs on every rank of the pool."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import simulation
from ringway.compress import (
    ErrorFeedback,
    OneBitAdam,
    all_to_all_quant_reduce,
    compressed_all_reduce,
    ddp_hook,
    get_codec,
    quantized_all_gather,
)
from ringway.compress.background import BackgroundThread
from ringway.compress.windows import frame_bytes
from ringway.errors import CollectiveMismatch, CommTimeout, NotFinite, UsageError
from ringway.groups.world import world
from ringway.parallel import register_data_parallel_hooks
from ringway.testing import RankContext


def values_of(rank: int, step: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(numel, generator=generator)


def against_simulation(
    context: RankContext, backend: str, cases: list[tuple[str, int, str]], servers: bool = True
) -> list[str]:
    """Three steps with residuals carried over, compared with the simulation in float64; returns the differences."""
    context.start(backend)
    apart = []
    for spec, numel, kernels in cases:
        codec, _, block = spec.partition(":")
        width = None if block == "tensor" else int(block)
        simulated: Any = simulation.SimulatedRanks(context.world_size, numel, codec, width)
        if not servers:
            simulated = simulation.GatheredRanks(context.world_size, numel, codec, width)
        feedback = ErrorFeedback()
        for step in range(3):
            everybodys = torch.stack([values_of(rank, step, numel) for rank in range(context.world_size)])
            expected = simulated.step(everybodys.double().numpy())
            mine = everybodys[context.rank].clone()
            compressed_all_reduce(mine, feedback["x"], spec, kernels=kernels, window=512, servers=servers)
            # A value on an edge may take the neighbouring code and, as the largest of its block, change the block's
            # scale: one block may differ slightly, and nothing else.
            distances = np.abs(mine.double().numpy() - expected)
            far = int((distances > 1e-3 * max(np.abs(expected).max(), 1e-9)).sum())
            if far > max(64, numel // 50) or np.linalg.norm(distances) > 0.1 * np.linalg.norm(expected):
                apart.append(f"{spec} {numel} {kernels} step {step}: {far} of {numel}")
    return apart


def shapes_and_dtypes(context: RankContext, backend: str) -> None:
    dist = context.start(backend)
    for dtype, bound in ((torch.float32, 0.02), (torch.float16, 0.03), (torch.bfloat16, 0.05)):
        for shape in ((0,), (), (1,), (3, 5), (2, 3, 129)):
            tensor = values_of(context.rank, 0, int(np.prod(shape))).view(shape).to(dtype)
            mean = tensor.float()
            dist.all_reduce(mean)
            mean /= context.world_size
            assert compressed_all_reduce(tensor, ErrorFeedback(), "int8") is None
            assert tensor.shape == torch.Size(shape)
            assert tensor.dtype is dtype
            if tensor.numel():
                assert (tensor.float() - mean).abs().max() <= bound * max(1.0, mean.abs().max().item())
    strided = values_of(context.rank, 0, 120).view(10, 12).t()
    mean = strided.clone()
    dist.all_reduce(mean)
    compressed_all_reduce(strided, None, "int8")
    assert (strided - mean / context.world_size).abs().max() < 0.05
    zeros = torch.zeros(1000)
    for spec in ("onebit", "onebit:tensor", "int8", "int4", "fp8"):
        compressed_all_reduce(zeros, ErrorFeedback(), spec)
        assert not zeros.any()
    for wrong in (torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(UsageError, match=str(wrong.dtype)):
            compressed_all_reduce(wrong, ErrorFeedback(), "int8")


def in_any_mode(context: RankContext, backend: str) -> None:
    """Frames and residuals created in one autograd mode work in the others, also asynchronously."""
    context.start(backend)
    feedback = ErrorFeedback()
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode)
    for step, mode in enumerate(modes):
        with mode():
            for asynchronous in (False, True):
                tensor = values_of(context.rank, step, 5000)
                work = compressed_all_reduce(tensor, feedback[asynchronous], "int8", async_op=asynchronous)
                if work is not None:
                    work.wait()
                mean = torch.stack([values_of(rank, step, 5000) for rank in range(context.world_size)]).mean(dim=0)
                assert (tensor - mean).abs().max() < 0.1
    saved = feedback.state_dict()
    restored = ErrorFeedback()
    restored.load_state_dict(saved)
    weights = torch.nn.Parameter(torch.full((5000,), float(context.rank)))
    compressed_all_reduce(weights, restored[False], "int8")
    assert weights.requires_grad
    (weights * 2).sum().backward()
    feedback.close()


def two_collectives(context: RankContext, backend: str) -> list[str]:
    """The collectives that one compressed all-reduce makes."""
    context.start(backend)
    from ringway.groups.listener import Listener
    from ringway.groups.world import world

    seen: list[str] = []

    class Watch(Listener):
        sees_calls = True

        def issued(self, call: Any) -> None:
            seen.append(call.op.name)

    watch = Watch()
    tensor = values_of(context.rank, 0, 5000)
    world.listen(watch)
    try:
        compressed_all_reduce(tensor, ErrorFeedback(), "onebit:tensor")
        compressed_all_reduce(tensor, ErrorFeedback(), "onebit")
    finally:
        world.unlisten(watch)
    return seen


def same_result_everywhere(context: RankContext, backend: str) -> torch.Tensor:
    context.start(backend)
    feedback = ErrorFeedback()
    tensor = torch.zeros(0)
    for step in range(3):
        tensor = values_of(context.rank, step, 3001)
        compressed_all_reduce(tensor, feedback, "onebit:tensor")
    return tensor


def in_subgroups(context: RankContext, backend: str) -> float:
    dist = context.start(backend)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[context.rank % 2]
    feedback = ErrorFeedback(group)
    tensor = values_of(context.rank, 0, 999)
    peers = [rank for rank in range(4) if rank % 2 == context.rank % 2]
    mean = torch.stack([values_of(rank, 0, 999) for rank in peers]).mean(dim=0)
    compressed_all_reduce(tensor, feedback["a"], "int8", group=group)
    work = compressed_all_reduce(again := values_of(context.rank, 0, 999), feedback["b"], "int8", async_op=True)
    assert work is not None
    work.wait()
    torch.testing.assert_close(again, tensor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert compressed_all_reduce(tensor, None, "int8", group=dist.GroupMember.NON_GROUP_MEMBER) is None
    assert "not in the given group" in str(caught[0].message)
    with pytest.raises(UsageError, match=r"ErrorFeedback\(group\)"):
        compressed_all_reduce(tensor, feedback["a"], "int8", group=dist.get_world_group())
    feedback.close()
    return float((tensor - mean).abs().max())


def asynchronously(context: RankContext, backend: str) -> None:
    """Several calls in flight, with plain collectives between them, give the results of synchronous calls."""
    dist = context.start(backend)
    waited, direct = ErrorFeedback(), ErrorFeedback()
    for step in range(3):
        tensors = [values_of(context.rank, step, size) for size in (5000, 70, 20001)]
        copies = [tensor.clone() for tensor in tensors]
        works = []
        for key, tensor in enumerate(tensors):
            works.append(compressed_all_reduce(tensor, waited[key], "onebit", async_op=True, window=2048))
            plain = torch.full((10,), float(context.rank))
            dist.all_reduce(plain)
            assert plain[0] == sum(range(context.world_size))
        assert works[1] is not None
        future = works[1].get_future().then(lambda done: done.value()[0].sum().item())
        for work in works:
            assert work is not None
            work.wait()
            assert work.is_completed()
        for key, (tensor, copy) in enumerate(zip(tensors, copies, strict=True)):
            compressed_all_reduce(copy, direct[key], "onebit")
            assert torch.equal(tensor, copy)
        assert future.wait() == tensors[1].sum().item()
    waited.close()
    waited.close()


def not_finite(context: RankContext, backend: str) -> None:
    """NaN on one rank: every rank learns which one had it. The next call and the residuals are fine."""
    context.start(backend)
    for spec in ("onebit", "onebit:tensor", "int8", "int4:tensor", "fp8"):
        feedback = ErrorFeedback()
        for poison in (float("nan"), float("inf")):
            tensor = values_of(context.rank, 0, 4000)
            if context.rank == 1:
                tensor[3333] = poison
            with pytest.raises(NotFinite, match="rank 1") as caught:
                compressed_all_reduce(tensor, feedback["grad"], spec)
            assert caught.value.rank == 1
            assert caught.value.key == "grad"
            tensor = values_of(context.rank, 0, 4000)
            if context.rank == 1:
                tensor[3333] = poison
            compressed_all_reduce(tensor, feedback["grad"], spec, not_finite="propagate")
            assert torch.isnan(tensor[3333])
            tensor = values_of(context.rank, 0, 4000)
            compressed_all_reduce(tensor, feedback["grad"], spec)
            assert torch.isfinite(tensor).all()
    for kernels in ("native", "reference"):  # one rank serves no element of so short a tensor
        short = torch.full((7,), float("nan") if context.rank == 1 else 1.0)
        with pytest.raises(NotFinite, match="rank 1"):
            compressed_all_reduce(short, feedback["short"], "onebit:tensor", kernels=kernels)
    work = compressed_all_reduce(torch.full((9,), float("nan")), feedback["b"], "int8", async_op=True)
    assert work is not None
    with pytest.raises(NotFinite):
        work.wait()
    feedback.close()
    huge = torch.full((64,), 3e38)
    compressed_all_reduce(huge, None, "int8")
    torch.testing.assert_close(huge, torch.full((64,), 3e38))


MISMATCHES: dict[str, list[tuple[Any, ...]]] = {
    # By name, what each rank calls: elements, dtype and codec.
    "codecs of the same length": [(1000, torch.float32, "int8"), (1000, torch.float32, "fp8")],
    "blocks of the same length": [(64, torch.float32, "int8:64"), (64, torch.float32, "int8:128")],
    "lengths with the same padding": [(1000, torch.float32, "int8"), (1001, torch.float32, "int8")],
    "the same bytes from other lengths": [(1920, torch.float32, "int4"), (1000, torch.float32, "int8")],
    "dtypes": [(1000, torch.float32, "onebit"), (1000, torch.bfloat16, "onebit")],
    "windows": [(70_000, torch.float32, "int8"), (69_999, torch.float32, "int8")],
    "scales of a tensor": [(1000, torch.float32, "int8:tensor"), (1000, torch.float32, "fp8:tensor")],
}


def mismatched(
    context: RankContext, backend: str, sides: list[tuple[Any, ...]], how: str, device: str = "cpu"
) -> list[str]:
    """Rank 0 calls the first side, all others the second. Returns what each rank was told."""
    dist = context.start(backend)
    numel, dtype, codec = sides[min(context.rank, 1)]
    tensor = torch.ones(numel, dtype=dtype, device=device)

    def call() -> None:
        if how == "quantized_all_gather":
            quantized_all_gather(tensor.new_empty(numel * context.world_size), tensor, codec)
        elif how == "all_to_all_quant_reduce":
            all_to_all_quant_reduce([tensor], codec=codec)
        elif how == "servers=False":
            compressed_all_reduce(tensor, ErrorFeedback(), codec, servers=False)
        elif how == "OneBitAdam":
            parameter = torch.nn.Parameter(torch.ones_like(tensor))
            optimizer = OneBitAdam([parameter], freeze_step=1, codec=codec)
            for _ in range(2):
                parameter.grad = tensor.clone()
                optimizer.step()
        else:
            work = compressed_all_reduce(tensor, ErrorFeedback(), codec, async_op=how == "asynchronous")
            if work is not None:
                work.wait()

    with pytest.raises(CollectiveMismatch) as caught:
        call()
    if device == "cpu":  # on a GPU, headers are read after the result was written: NaN
        assert torch.equal(tensor, torch.ones(numel, dtype=dtype))
    if how == "asynchronous":
        dist.barrier()  # the calls in the background have a group of their own, and only that one has ended
    else:
        with pytest.raises(CollectiveMismatch):
            dist.all_reduce(torch.ones(1, device=device))
    dist.destroy_process_group()
    assert sorted(caught.value.sides) == list(range(context.world_size))
    return [caught.value.sides[rank] for rank in range(context.world_size)]


def mismatched_hooks(context: RankContext, backend: str) -> None:
    """Data-parallel hooks with a codec on one rank and another codec on the other."""
    dist = context.start(backend)
    codec = ("int8", "fp8")[context.rank]
    with pytest.raises(CollectiveMismatch, match="rank 0: codec=int8:256; on rank 1: codec=fp8:256"):
        register_data_parallel_hooks(torch.nn.Linear(30, 40), codec=codec)
    hook = ddp_hook(codec, warmup_steps=0)
    model = DistributedDataParallel(torch.nn.Linear(30, 40))
    model.register_comm_hook(None, hook)
    # DDP wraps the error of a hook.
    with pytest.raises(
        RuntimeError, match=r"(?s)CollectiveMismatch.*rank 0: .*codec int8:256.*rank 1: .*codec fp8:256"
    ):
        model(torch.ones(2, 30)).sum().backward()
    hook.feedback.close()
    dist.destroy_process_group()


def a_call_that_failed_on_one_rank(context: RankContext, backend: str) -> None:
    """Rank 0's first call fails before it sends anything. Its second call must not meet the other rank's first."""
    dist = context.start(backend)
    feedback = ErrorFeedback()
    if context.rank == 0:
        feedback["broken"].worker = feedback["broken"].server = torch.zeros(7)  # of another tensor
    works = [
        compressed_all_reduce(torch.full((100,), float(n)), feedback[key], "int8", async_op=True)
        for n, key in enumerate(("broken", "sound"))
    ]
    errors = (UsageError if context.rank == 0 else CollectiveMismatch, CollectiveMismatch)
    for work, error in zip(works, errors, strict=True):
        assert work is not None
        with pytest.raises(error):
            work.wait()
    # Without the background, a refused call was not made: the rank may make it again.
    if context.rank == 0:
        with pytest.raises(UsageError):
            compressed_all_reduce(torch.ones(100), feedback["broken"], "int8")
    compressed_all_reduce(torch.ones(100), feedback["sound"], "int8")
    if context.rank == 0:  # an empty call meets nobody
        compressed_all_reduce(torch.ones(0), feedback["empty"], "int8")
    with pytest.raises(CollectiveMismatch, match="exchange 3"):
        compressed_all_reduce(torch.ones(100), feedback["sound"], "int8")
    with pytest.raises(CollectiveMismatch):
        dist.barrier()
    dist.destroy_process_group()


def beside_another_group(context: RankContext, backend: str, how: str, device: str = "cpu") -> None:
    """The last rank is in fewer groups than the others. The background's group is the same on all of them."""
    dist = context.start(backend)
    dist.new_group(list(range(context.world_size - 1)))
    feedback = ErrorFeedback()
    layer = torch.nn.Linear(10, 10, bias=False, device=device)
    model: torch.nn.Module = layer
    close = feedback.close
    if how == "register_data_parallel_hooks":
        close = register_data_parallel_hooks(layer, codec="int8").remove
    elif how == "ddp_hook":
        model = DistributedDataParallel(layer, device_ids=[0] if device == "cuda" else None)
        model.register_comm_hook(None, ddp_hook("int8", feedback=feedback, warmup_steps=1))
    for step in range(4):
        # Constant values are exact in int8.
        mine = torch.full((1, 10), float(context.rank + step), device=device)
        if how == "compressed_all_reduce":
            work = compressed_all_reduce(mine, feedback["x"], "int8", async_op=True)
            assert work is not None
            work.wait()
            found = mine
        else:
            layer.zero_grad()
            model(mine).sum().backward()
            assert layer.weight.grad is not None
            found = layer.weight.grad
        torch.testing.assert_close(found, torch.full_like(found, (context.world_size - 1) / 2 + step))
    close()
    dist.destroy_process_group()


def sparse_mean(context: RankContext, how: str) -> float:
    """How far the mean of 60 results with `topk` is from the true one. Error feedback sends everything in the end."""
    context.start("shm")
    feedback = ErrorFeedback()
    layer = torch.nn.Linear(100, 90, bias=False)
    model: torch.nn.Module = layer
    if how == "register_data_parallel_hooks":
        register_data_parallel_hooks(layer, codec="topk:0.1:4")
    elif how == "ddp_hook":
        model = DistributedDataParallel(layer)
        model.register_comm_hook(None, ddp_hook("topk:0.1:4", feedback=feedback, warmup_steps=0))
    own, mean = _constant_values(context, 100)
    found = torch.zeros(90, 100)
    for _ in range(60):
        values = own.expand(90, 100).clone()
        if how in ("two phases", "one phase", "asynchronous"):
            options = {"servers": how != "one phase", "async_op": how == "asynchronous"}
            work = compressed_all_reduce(values, feedback["x"], "topk:0.1:4", **options)
            if work is not None:
                work.wait()
        else:
            layer.zero_grad()
            model(own.unsqueeze(0)).sum().backward()
            assert layer.weight.grad is not None
            values = layer.weight.grad
        found += values / 60
    return float((found - mean).norm() / mean.expand(90, 100).norm())


def _constant_values(context: RankContext, count: int) -> list[torch.Tensor]:
    """This rank's values, and the mean of all ranks'."""
    each = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(context.world_size)]
    return [each[context.rank], torch.stack(each).mean(dim=0)]


def late_peer(context: RankContext, backend: str) -> float:
    """The background's calls have the timeout of the caller's group, also after it has changed."""
    dist = context.start(backend, timeout=timedelta(seconds=300))
    feedback = ErrorFeedback()
    work = compressed_all_reduce(torch.ones(100), feedback["x"], "int8", async_op=True)
    assert work is not None
    work.wait()
    assert _timeout_of(feedback) == 300
    world.communicator(None).set_timeout(1.0)
    waited = 0.0
    if context.rank == 0:
        began = time.monotonic()
        work = compressed_all_reduce(torch.ones(100), feedback["x"], "int8", async_op=True)
        assert work is not None
        with pytest.raises(CommTimeout):
            work.wait()
        waited = time.monotonic() - began
        assert _timeout_of(feedback) == 1
    context.store.set(f"waited{context.rank}", "")
    context.store.wait(["waited0"], timedelta(seconds=60))
    dist.destroy_process_group()
    return waited


def _timeout_of(feedback: ErrorFeedback) -> float:
    background = feedback.background(torch.device("cpu"))
    assert isinstance(background, BackgroundThread)
    return background._communicator.info.timeout


def without_servers(context: RankContext) -> None:
    """Asynchronous calls, bytes, NaN, and residuals that do not fit."""
    context.start("gloo")
    feedback, again = ErrorFeedback(), ErrorFeedback()
    for step in range(3):
        mine = values_of(context.rank, step, 70_000)
        other = mine.clone()
        compressed_all_reduce(mine, feedback["x"], "int8", servers=False)
        work = compressed_all_reduce(other, again["x"], "int8", servers=False, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(mine, other)
    codec = get_codec("int8")
    assert feedback.report.sent_bytes == 3 * (context.world_size - 1) * frame_bytes(codec, 70_000)
    assert feedback["x"].server is not None
    assert feedback["x"].server.numel() == 0
    for spec in ("int8", "int8:tensor"):
        tensor = torch.ones(100)
        tensor[7] = float("nan") if context.rank == 1 else 1.0
        with pytest.raises(NotFinite, match="rank 1"):
            compressed_all_reduce(tensor, feedback[spec], spec, servers=False)
    with pytest.raises(UsageError, match="residual 'x'"):
        compressed_all_reduce(mine, feedback["x"], "int8")
    again.close()
