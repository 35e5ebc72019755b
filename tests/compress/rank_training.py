"""What the ranks of the training tests run: DDP with the hook, 1-bit Adam, ZeRO++'s collectives, auto."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ringway.compress import (
    ErrorFeedback,
    OneBitAdam,
    all_to_all_quant_reduce,
    compressed_all_reduce,
    ddp_hook,
    quantized_all_gather,
)
from ringway.errors import NotFinite, UsageError
from ringway.testing import RankContext


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


def model_of_two_buckets() -> torch.nn.Module:
    """More than the megabyte that DDP always puts into its first bucket."""
    torch.manual_seed(0)
    wide = torch.nn.Linear(512, 600)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 512), torch.nn.Tanh(), wide, torch.nn.Tanh(), torch.nn.Linear(600, 4)
    )


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs, torch.stack([inputs[:, :4].sum(1), inputs[:, 4], inputs[:, 5] * 2, -inputs[:, 6]], dim=1)


def train_ddp(context: RankContext, codec: str | None, warmup: int, steps: int) -> list[float]:
    context.start("gloo")
    model = DistributedDataParallel(model_of_two_buckets(), bucket_cap_mb=0.02)
    hook = None
    if codec is not None:
        hook = ddp_hook(codec, warmup_steps=warmup)
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(context.rank, step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if hook is not None:
        assert len(hook.feedback) > 1, "several buckets, each with its residuals"
        if warmup:  # the number of buckets was different before DDP rebuilt them
            assert hook.feedback.report.calls == (steps - warmup) * len(hook.feedback)
        hook.feedback.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return [*losses, float(weights.sum())]


def adam_is_warned_of(context: RankContext) -> None:
    context.start("gloo")
    for optimizer_type, expected in ((torch.optim.AdamW, 1), (torch.optim.SGD, 0)):
        model = DistributedDataParallel(small_model())
        hook = ddp_hook("onebit")
        model.register_comm_hook(None, hook)
        optimizer = optimizer_type(model.parameters(), lr=1e-3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                inputs, targets = batch_of(context.rank, step)
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        reported = [warning for warning in caught if "OneBitAdam" in str(warning.message)]
        assert len(reported) == expected, [str(warning.message) for warning in caught]
        hook.feedback.close()


def buckets_change(context: RankContext) -> None:
    """Without a warm-up, the buckets of the first step are not those of the second: residuals restart."""
    context.start("gloo")
    feedback = ErrorFeedback()
    slot = feedback["bucket"]
    slot.bind("first")
    compressed_all_reduce(torch.randn(100), slot, "onebit")
    assert slot.worker is not None
    slot.bind("first")
    assert slot.worker is not None
    slot.bind("second")
    assert slot.worker is None
    losses = train_ddp(context, "onebit", 0, 5)
    assert all(loss == loss for loss in losses)


def onebit_adam(context: RankContext, codec: str, freeze: int, steps: int, resume_at: int | None) -> dict[str, Any]:
    """Train; optionally save, start over and load after `resume_at` steps."""
    dist = context.start("gloo")
    model = small_model()

    def optimizer_of(model: torch.nn.Module) -> OneBitAdam:
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": 5e-3}, {"params": rest, "weight_decay": 0.01}]
        return OneBitAdam(groups, lr=1e-2, freeze_step=freeze, codec=codec)

    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        if step == resume_at:
            saved = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
            saved.seek(0)
            state = torch.load(saved, weights_only=False)
            model = small_model()
            model.load_state_dict(state["model"])
            optimizer = optimizer_of(model)
            optimizer.load_state_dict(state["optimizer"])
        inputs, targets = batch_of(context.rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / context.world_size)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"losses": losses, "weights": weights, "calls": optimizer.feedback.report.calls}


def adamw(context: RankContext, steps: int) -> dict[str, Any]:
    """torch's AdamW on plainly averaged gradients."""
    dist = context.start("gloo")
    model = small_model()
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 5e-3, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.01}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(context.rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= context.world_size
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / context.world_size)
    return {"losses": losses, "weights": torch.cat([p.detach().flatten() for p in model.parameters()])}


def adam_leaves_untouched_elements_alone(context: RankContext) -> None:
    context.start("gloo")
    parameter = torch.nn.Parameter(torch.ones(100))
    optimizer = OneBitAdam([parameter], lr=0.1, freeze_step=2, codec="onebit")
    for step in range(6):
        parameter.grad = torch.randn(100, generator=torch.Generator().manual_seed(step + context.rank))
        parameter.grad[50:] = 0.0
        optimizer.step()
    assert torch.equal(parameter[50:], torch.ones(50))
    assert parameter[:50].isfinite().all()
    state = optimizer.state_dict()
    state["feedback"]["rank"] = 1 - context.rank
    with pytest.warns(UserWarning, match="start from zero"):
        optimizer.load_state_dict(state)
    for wrong in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"freeze_step": 0}):
        with pytest.raises(UsageError):
            OneBitAdam([parameter], **{"freeze_step": 1, **wrong})  # type: ignore[arg-type]


def quantized(context: RankContext) -> None:
    dist = context.start("gloo")
    ranks, rank = context.world_size, context.rank
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for shape in ((8, 9), (50,), (1,))]
    everybodys = [
        [torch.randn(shape, generator=torch.Generator().manual_seed(other)) for other in range(ranks)]
        for shape in ((8, 9), (50,), (1,))
    ]
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    member = dist.GroupMember.NON_GROUP_MEMBER
    named = {f"local_{i}": group if i == rank // 2 else member for i, group in enumerate(inside)}
    named |= {f"global_{j}": group if j == rank % 2 else member for j, group in enumerate(across)}
    for groups in (None, dist.get_world_group(), (inside[rank // 2], across[rank % 2]), named):
        for codec, bound in (("int8", 0.05), ("int4", 0.5), ("int8:tensor", 0.05)):
            shares = all_to_all_quant_reduce(tensors, groups, codec=codec)
            for share, parts in zip(shares, everybodys, strict=True):
                mean = torch.stack(parts).mean(dim=0).flatten()
                length = -(-mean.numel() // ranks)
                expected = mean[rank * length : (rank + 1) * length]
                assert share.shape == expected.shape
                if share.numel():
                    assert (share - expected).abs().max() < bound
        bad = [torch.full((12,), float("nan") if rank == 1 else 1.0)]
        with pytest.raises(NotFinite):
            all_to_all_quant_reduce(bad, groups)
    for dtype in (torch.float32, torch.bfloat16):
        mine = tensors[0].to(dtype)
        output = torch.empty(ranks * 8, 9, dtype=dtype)
        work = quantized_all_gather(output, mine, "int8", async_op=True)
        assert work is not None
        work.wait()
        again = torch.empty_like(output)
        assert quantized_all_gather(again, mine, "int8") is None
        assert torch.equal(output, again)
        assert (output.float() - torch.cat(everybodys[0]).float()).abs().max() < 0.05
    with pytest.raises(UsageError, match="inputs of 72"):
        quantized_all_gather(torch.empty(7), tensors[0])
    with pytest.raises(NotFinite, match="rank 2"):
        quantized_all_gather(torch.empty(4 * ranks), torch.full((4,), float("inf") if rank == 2 else 0.0))


def auto(context: RankContext, backend: str, attempt: int) -> tuple[list[str], dict[str, Any]]:
    """Calls of several sizes; returns what was logged, and the report."""
    context.start(backend, group_name=f"auto {attempt}")
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger("ringway.compress").addHandler(handler)
    feedback = ErrorFeedback()
    for numel in (100, 10_000, 500_000):
        tensor = torch.full((numel,), float(context.rank))
        compressed_all_reduce(tensor, feedback[numel], "auto")
        torch.testing.assert_close(tensor, torch.full((numel,), (context.world_size - 1) / 2))
    logging.getLogger("ringway.compress").removeHandler(handler)
    with pytest.raises(UsageError, match="auto"):
        compressed_all_reduce(torch.ones(4), None, "auto")
    return lines, feedback.report.as_dict()


def adam_of_halves_resumes(context: RankContext) -> None:
    """Moments are fp32 whatever the parameters' dtype, and a checkpoint keeps them in fp32."""
    context.start("shm")

    def trained(resume: bool) -> torch.Tensor:
        torch.manual_seed(0)
        weights = torch.nn.Parameter(torch.randn(300).to(torch.bfloat16))
        optimizer = OneBitAdam([weights], lr=1e-2, freeze_step=3)
        for step in range(8):
            if resume and step == 5:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = OneBitAdam([weights], lr=1e-2, freeze_step=3)
                optimizer.load_state_dict(saved)
            generator = torch.Generator().manual_seed(10 * step + context.rank)
            weights.grad = torch.randn(300, generator=generator).to(torch.bfloat16)
            optimizer.step()
        assert optimizer.state[weights]["exp_avg"].dtype is torch.float32
        return weights.detach().clone()

    assert torch.equal(trained(resume=False), trained(resume=True))


def groups_are_added(context: RankContext) -> None:
    """A group that is added later begins with stage 1; the others keep their moments and residuals."""
    context.start("shm")
    first, second = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
    optimizer = OneBitAdam([first], lr=1e-2, freeze_step=2)
    for step in range(8):
        if step == 4:
            momentum = optimizer.state[first]["exp_avg"].clone()
            optimizer.add_param_group({"params": [second], "lr": 1e-3})
        first.grad, second.grad = torch.full((50,), 1.0 + context.rank), torch.full((50,), 2.0)
        optimizer.step()
        if step == 4:
            assert torch.all(optimizer.state[first]["exp_avg"] > momentum)
    assert [optimizer.state[parameter]["step"] for parameter in (first, second)] == [8, 4]
    assert torch.all(first < second)
    assert torch.all(second < 0)


def the_hook_uses_the_feedback_it_was_given(context: RankContext) -> None:
    """An ErrorFeedback that is still empty is used too."""
    context.start("gloo")
    feedback = ErrorFeedback()
    model = DistributedDataParallel(small_model())
    model.register_comm_hook(None, ddp_hook("onebit", feedback=feedback, warmup_steps=1))
    for step in range(3):
        inputs, targets = batch_of(context.rank, step)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
    assert feedback.report.calls > 0
    assert feedback.state_dict()["slots"]
    feedback.close()
