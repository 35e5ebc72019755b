"""What the ranks of the tests of state run: residuals, and the optimizer's moments and steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringway.compress import ErrorFeedback, OneBitAdam, compressed_all_reduce, ddp_hook
from ringway.compress.auto import Forecast, Line
from ringway.errors import NotFinite, UsageError
from ringway.parallel import GradScaler, register_data_parallel_hooks
from ringway.testing import RankContext

NUMEL = 500


def values_of(rank: int, step: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def mean_of(ranks: int, step: int) -> Tensor:
    return torch.stack([values_of(rank, step) for rank in range(ranks)]).mean(dim=0)


# OneBitAdam


def scaler_skips_together(
    context: RankContext, agreeing: bool, backend: str = "shm", device: str = "cpu"
) -> tuple[Tensor, int, float]:
    """Rank 1 alone has infinities now and then. All ranks skip those steps, whatever stage they are in."""
    dist = context.start(backend)
    weights = nn.Parameter(torch.ones(NUMEL, device=device))
    optimizer = OneBitAdam([weights], lr=1e-2, freeze_step=4)
    options: dict[str, Any] = {"device": device, "init_scale": 8.0, "growth_interval": 1000}
    scaler = GradScaler(**options, group=dist.group.WORLD) if agreeing else torch.amp.GradScaler(**options)
    reference = nn.Parameter(torch.ones(NUMEL, device=device))
    plain = torch.optim.AdamW([reference], lr=1e-2, weight_decay=0.0)
    for step in range(16):
        weights.grad = scaler.scale(values_of(context.rank, step).to(device))
        bad = step in (1, 6, 7, 11)
        if bad and context.rank == 1:
            weights.grad[3] = float("inf")
        if step % 3 == 0:
            scaler.unscale_(optimizer)
        before = weights.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, weights) == bad, step
        if not bad and optimizer.state[weights]["step"] <= 4:
            reference.grad = mean_of(context.world_size, step).to(device)
            plain.step()
            torch.testing.assert_close(weights, reference)
    return weights.detach().cpu(), optimizer.state[weights]["step"], scaler.get_scale()


def parameters_come_and_go(context: RankContext) -> None:
    """Frozen parameters stay, unfrozen ones train, and parameters without a gradient are left alone, as in AdamW."""
    context.start("shm")
    for codec, freeze in (("onebit", 100), ("int8:tensor", 3), ("onebit", 3)):
        first, second, third = (nn.Parameter(torch.full((NUMEL,), 2.0)) for _ in range(3))
        optimizer = OneBitAdam([first, second], lr=1e-2, weight_decay=0.1, freeze_step=freeze, codec=codec)
        twins = [nn.Parameter(p.detach().clone()) for p in (first, second, third)]
        plain = torch.optim.AdamW(twins[:2], lr=1e-2, weight_decay=0.1)
        second.requires_grad_(False)
        for step in range(12):
            if step == 2:
                second.requires_grad_(True)
            if step == 6:
                first.requires_grad_(False)  # its last gradient is still there
                optimizer.add_param_group({"params": [third], "lr": 1e-3})
                plain.add_param_group({"params": [twins[2]], "lr": 1e-3})
            before = [p.detach().clone() for p in (first, second, third)]
            expected = [first.requires_grad, second.requires_grad and step % 4 != 3, step >= 6]
            for number, (parameter, twin) in enumerate(zip((first, second, third), twins, strict=True)):
                if expected[number]:
                    parameter.grad = values_of(context.rank, 10 * step + number)
                    twin.grad = mean_of(context.world_size, 10 * step + number)
                    if number == 1 and step % 4 == 1:  # only the others have one
                        if context.rank == 0:
                            parameter.grad = None
                        others = [values_of(r, 10 * step + number) for r in range(1, context.world_size)]
                        twin.grad = torch.stack(others).sum(dim=0) / context.world_size
                elif not (number == 0 and step >= 6):
                    parameter.grad = twin.grad = None
                else:
                    twin.grad = None
            optimizer.step()
            plain.step()
            for parameter, old, moves in zip((first, second, third), before, expected, strict=True):
                assert (not torch.equal(parameter, old)) == moves, (codec, step)
            if freeze == 100:
                for parameter, twin in zip((first, second, third), twins, strict=True):
                    torch.testing.assert_close(parameter, twin)
        state = optimizer.state_dict()
        again = OneBitAdam([first, second], lr=1e-2, freeze_step=freeze, codec=codec)
        again.add_param_group({"params": [third]})
        again.load_state_dict(state)
        assert [again.state[p]["step"] for p in (first, second, third)] == [6, 7, 6]


def failed_step_changes_nothing(context: RankContext, backend: str = "shm", device: str = "cpu") -> None:
    context.start(backend)
    for codec in ("onebit", "int8:tensor"):
        parameters = [nn.Parameter(torch.ones(NUMEL, device=device)) for _ in range(2)]
        optimizer = OneBitAdam(parameters, lr=1e-2, freeze_step=2, codec=codec)

        def gradients(step: int, parameters: list[nn.Parameter] = parameters) -> None:
            for number, parameter in enumerate(parameters):
                parameter.grad = values_of(context.rank, 10 * step + number).to(device)

        for step in range(8):
            if step in (1, 5):
                before = _snapshot(parameters, optimizer)
                gradients(step)
                if context.rank == 1:
                    assert parameters[1].grad is not None
                    parameters[1].grad[7] = float("nan")
                with pytest.raises(NotFinite, match="rank 1") as caught:
                    optimizer.step()
                assert caught.value.rank == 1
                for now, then in zip(_snapshot(parameters, optimizer), before, strict=True):
                    assert torch.equal(now, then)
            gradients(step)
            optimizer.step()
        assert all(torch.isfinite(parameter).all() for parameter in parameters)
        assert [optimizer.state[parameter]["step"] for parameter in parameters] == [8, 8]
        if context.rank == 0:
            parameters[0].grad = torch.sparse_coo_tensor([[1, 2]], [1.0, 2.0], (NUMEL,)).to(device)
        with pytest.raises(UsageError, match="sparse gradients, and rank 0"):
            optimizer.step()


def failed_exchange_is_taken_back(context: RankContext) -> None:
    """The second group's exchange fails, after the first one's has moved residuals. What all ranks' residuals hold
    together is then as before, and a scale that GradScaler left behind is not used again."""
    context.start("shm")
    for fresh in (False, True):
        first, second = (nn.Parameter(torch.ones(NUMEL)) for _ in range(2))
        optimizer = OneBitAdam([{"params": [first]}], lr=1e-2, freeze_step=2, codec="onebit:64")
        if not fresh:
            optimizer.add_param_group({"params": [second]})
        for step in range(4):
            first.grad, second.grad = values_of(context.rank, 2 * step), values_of(context.rank, 2 * step + 1)
            optimizer.step()
        if fresh:  # it is in stage 1
            optimizer.add_param_group({"params": [second]})
        before, moments = _held(context, optimizer), optimizer.state[first]["exp_avg"].clone()
        assert float(before.abs().max()) > 0.01
        first.grad, second.grad = values_of(context.rank, 8), torch.full((NUMEL,), 3e38)
        optimizer.grad_scale = torch.tensor(0.1)  # the unscaled gradient overflows
        with pytest.raises(NotFinite):
            optimizer.step()
        assert not hasattr(optimizer, "grad_scale")
        torch.testing.assert_close(_held(context, optimizer), before, rtol=0, atol=1e-5)
        assert torch.equal(optimizer.state[first]["exp_avg"], moments)
        assert optimizer.state[first]["step"] == 4


def _held(context: RankContext, optimizer: OneBitAdam) -> Tensor:
    """What the residuals of the first group hold on all ranks together."""
    states: list[Any] = [None] * context.world_size
    torch.distributed.all_gather_object(states, optimizer.feedback.state_dict()["slots"]["group0.0"])
    workers = torch.stack([state["worker"] for state in states]).mean(dim=0)
    return workers + torch.cat([state["server"] for state in states])


def _snapshot(parameters: list[nn.Parameter], optimizer: OneBitAdam) -> list[Tensor]:
    found = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        found += [torch.tensor(state["step"]), state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
    for slot in optimizer.feedback.state_dict()["slots"].values():
        found += [slot["worker"], slot["server"]]
    return found


def old_checkpoints_load(context: RankContext) -> None:
    """Up to 0.1, steps were counted by group, and a group's parameters formed one bucket."""
    context.start("shm")
    weights = nn.Parameter(torch.ones(NUMEL))
    optimizer = OneBitAdam([weights], lr=1e-2, freeze_step=2)
    for step in range(5):
        weights.grad = values_of(context.rank, step)
        optimizer.step()
    old = copy.deepcopy(optimizer.state_dict())
    old["param_groups"][0]["step"] = old["state"][0].pop("step")
    del old["state"][0]["bucket"]
    again = nn.Parameter(weights.detach().clone())
    resumed = OneBitAdam([again], lr=1e-2, freeze_step=2)
    resumed.load_state_dict(old)
    for parameter, through in ((weights, optimizer), (again, resumed)):
        parameter.grad = values_of(context.rank, 5)
        through.step()
    assert torch.equal(weights, again)
    assert resumed.compressing


# Residuals


class Branches(nn.Module):
    """A layer that is used in every step, and one that may not be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(20, 10, bias=False)
        self.sometimes = nn.Linear(20, 10, bias=False)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        # Gradients do not depend on the weights: the sum over the steps is known.
        out: Tensor = self.always(inputs)
        return out + self.sometimes(inputs) if both else out


def unused_parameters_keep_their_residuals(context: RankContext, how: str, codec: str) -> float:
    """The relative error of the summed gradient of a layer that is used in every fourth step."""
    context.start("gloo")
    model = Branches()
    close: Callable[[], None]
    if how == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model, find_unused_parameters=True)
        hook = ddp_hook(codec, warmup_steps=2)
        wrapped.register_comm_hook(None, hook)  # type: ignore[operator]
        close = hook.feedback.close
    else:
        wrapped = model
        close = register_data_parallel_hooks(model, codec=codec).remove
    summed, true = torch.zeros(10, 20), torch.zeros(10, 20)
    for step in range(81):
        both = step % 4 == 0
        for rank in range(context.world_size):
            generator = torch.Generator().manual_seed(rank)  # the same in every step: only the codec varies
            inputs = torch.randn(16, 20, generator=generator)
            if both:
                true += inputs.sum(dim=0).expand(10, 20) / context.world_size
            if rank == context.rank:
                mine = inputs
        model.zero_grad()
        wrapped(mine, both).sum().backward()
        assert (model.sometimes.weight.grad is not None) == both
        if both:
            summed += model.sometimes.weight.grad
    close()
    return float((summed - true).norm() / true.norm())


def loading_keeps_the_slots_that_the_program_holds(context: RankContext) -> None:
    context.start("shm")
    feedback = ErrorFeedback()
    held, other = feedback["held"], feedback["later"]
    compressed_all_reduce(values_of(context.rank, 0), held, "onebit")
    saved = feedback.state_dict()
    compressed_all_reduce(straight := values_of(context.rank, 1), held, "onebit")
    compressed_all_reduce(values_of(context.rank, 2), other, "onebit")
    feedback.load_state_dict(saved)
    assert feedback["held"] is held
    assert other.worker is None, "the state has no residual for it"
    compressed_all_reduce(resumed := values_of(context.rank, 1), held, "onebit")
    assert torch.equal(straight, resumed)
    assert torch.equal(feedback.state_dict()["slots"]["held"]["worker"], held.worker)


def pending_calls_count(context: RankContext) -> None:
    """Saving, loading and resetting come after the asynchronous calls that were made before."""
    context.start("shm")
    feedback = ErrorFeedback()
    slot, numel = feedback["x"], 300_000

    def calls(first: int) -> list[Any]:
        inputs = [values_of(context.rank, first + i, numel) for i in range(3)]
        return [compressed_all_reduce(tensor, slot, "onebit", async_op=True) for tensor in inputs]

    works = calls(0)
    saved = feedback.state_dict()
    worker = saved["slots"]["x"]["worker"]
    for work in works:
        work.wait()
    assert slot.worker is not None
    assert torch.equal(worker, slot.worker)
    for change, loads in (
        (lambda: feedback.load_state_dict(saved), True),
        (feedback.reset, False),
        (slot.reset, False),
    ):
        works = calls(3)
        change()
        for work in works:
            work.wait()
        assert (slot.worker is not None) == loads
        assert slot.worker is None or torch.equal(slot.worker, worker)
    feedback.close()


def one_feedback_per_model(context: RankContext, how: str) -> None:
    context.start("gloo")
    models = [DistributedDataParallel(nn.Linear(4, 3)) for _ in range(2)]
    feedback = ErrorFeedback()
    hook = ddp_hook("int8", feedback=feedback)
    models[0].register_comm_hook(None, hook)
    models[1].register_comm_hook(None, hook if how == "hook" else ddp_hook("int8", feedback=feedback))
    inputs = torch.ones(2, 4)
    if how == "together":
        with pytest.raises(UsageError, match="its own ddp_hook"):
            (models[0](inputs) + models[1](inputs)).sum().backward()
    else:
        for _ in range(3):
            models[0](inputs).sum().backward()
        with pytest.raises(UsageError, match="its own ddp_hook"):
            models[1](inputs).sum().backward()
    feedback.close()


def plain_calls_report_nan(context: RankContext) -> None:
    """Values that "auto" leaves uncompressed, and the steps of DDP's warm-up."""
    context.start("gloo")
    feedback = ErrorFeedback()
    never = Forecast(Line(0.0, 0.0), Line(1.0, 0.0))
    feedback.forecasts["cpu", "int8:256"] = never
    for asynchronous in (False, True):
        tensor = values_of(context.rank, 0)
        if context.rank == 1:
            tensor[5] = float("nan")
        with pytest.raises(NotFinite, match="rank 1") as caught:
            _waited(compressed_all_reduce(tensor, feedback["a"], "auto:int8", async_op=asynchronous))
        assert (caught.value.rank, caught.value.key) == (1, "a")
        tensor = values_of(context.rank, 0)
        _waited(compressed_all_reduce(tensor, feedback["a"], "auto:int8", async_op=asynchronous))
        torch.testing.assert_close(tensor, mean_of(context.world_size, 0))
    with pytest.raises(NotFinite, match="average"):
        compressed_all_reduce(torch.full((9,), 60000.0, dtype=torch.float16) * 1.05, feedback["b"], "auto:int8")
    compressed_all_reduce(tensor := torch.full((9,), float("inf")), feedback["a"], "auto:int8", not_finite="propagate")
    assert not torch.isfinite(tensor).any()
    assert feedback.report.plain_calls == 6
    feedback.close()
    model = DistributedDataParallel(nn.Linear(4, 3))
    hook = ddp_hook("int8", warmup_steps=2)
    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=r"NotFinite: .*rank 0"):  # DDP wraps the error of a hook
        model(torch.full((2, 4), float("inf") if context.rank == 0 else 1.0)).sum().backward()
    hook.feedback.close()


def _waited(work: Any) -> None:
    if work is not None:
        work.wait()


def half_precision_stays_finite(context: RankContext) -> None:
    """Residuals push results over the largest number of the dtype: they stop there."""
    context.start("shm")
    for dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        for spec in ("int4", "fp8", "int8", "onebit:64"):
            for kernels in ("native", "reference"):
                if dtype is torch.bfloat16 and spec == "onebit:64":
                    continue  # the sum of a block is beyond fp32
                feedback = ErrorFeedback()
                for step in range(6):
                    values = 1 - 0.1 * torch.rand(NUMEL, generator=torch.Generator().manual_seed(step + context.rank))
                    tensor = (values * (0.96 * largest)).to(dtype)
                    if step == 0:
                        tensor.mul_(0.5)
                    compressed_all_reduce(tensor, feedback["x"], spec, kernels=kernels, not_finite="propagate")
                    assert not torch.isinf(tensor).any(), (dtype, spec, kernels, step)
                    if dtype is torch.float16:
                        assert torch.isfinite(tensor).all(), (dtype, spec, kernels, step)


def nan_is_named_whatever_was_in_memory(context: RankContext) -> None:
    """The buffers of one call are reused by the next."""
    context.start("gloo")
    for step in range(8):
        feedback = ErrorFeedback()
        for not_finite in ("propagate", "raise"):
            tensor = torch.randn(2050, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            if not_finite == "raise":
                tensor.zero_()
            if context.rank == 1:
                tensor[36] = float("-inf")
            named = None
            try:
                compressed_all_reduce(
                    tensor, feedback["x"], "fp8:tensor", kernels="reference", window=64, not_finite=not_finite
                )
            except NotFinite as error:
                named = error.rank
            assert named == (1 if not_finite == "raise" else None), step


def scales_that_overflow(context: RankContext) -> None:
    """Finite values whose scale is infinite: reported, and the residual stays finite."""
    context.start("shm")
    for kernels in ("reference", "native"):
        feedback = ErrorFeedback()
        with pytest.raises(NotFinite):
            compressed_all_reduce(torch.full((4096,), 3e38), feedback["x"], "onebit", kernels=kernels)
        compressed_all_reduce(tensor := torch.ones(4096), feedback["x"], "onebit", kernels=kernels)
        assert torch.isfinite(tensor).all()
        assert feedback["x"].worker is not None
        assert torch.isfinite(feedback["x"].worker).all()


def calls_on_one_slot_follow_each_other(context: RankContext) -> None:
    """A synchronous call waits for asynchronous ones with the same residuals, so all ranks run them in one order."""
    context.start("gloo")
    ordered, mixed = ErrorFeedback(), ErrorFeedback()
    mixed.background(torch.device("cpu"))
    for step in range(10):
        expected = [values_of(context.rank, 10 * step + i, 20_000) for i in range(3)]
        found = [tensor.clone() for tensor in expected]
        for tensor in expected:
            compressed_all_reduce(tensor, ordered["x"], "onebit")
        works: list[Any] = [compressed_all_reduce(tensor, mixed["x"], "onebit", async_op=True) for tensor in found[:2]]
        compressed_all_reduce(found[2], mixed["x"], "onebit")
        assert all(work.is_completed() for work in works)
        for mine, right in zip(found, expected, strict=True):
            assert torch.equal(mine, right), step
    mixed.close()
