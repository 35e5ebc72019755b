"""What the ranks of the tests of low-communication training run."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as c10d
from outer_simulation import SimulatedSites
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringway.compress.outcome import Outcome
from ringway.errors import NotFinite, UsageError
from ringway.lowcomm import DiLoCo, SparseLoCo
from ringway.observe.recorder import recent_calls
from ringway.testing import RankContext
from simulation import GatheredRanks


class Vectors(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, *lengths: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.parts = nn.ParameterList([torch.randn(length, generator=generator) for length in lengths])


def values_of(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank)) + 0.2


def _same_everywhere(parameters: list[Tensor]) -> bool:
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    everyones = [torch.empty_like(flat) for _ in range(c10d.get_world_size())]
    c10d.all_gather(everyones, flat)
    return all(torch.equal(one, everyones[0]) for one in everyones)


def diloco_follows_the_papers(context: RankContext) -> None:
    """Every parameter after every step, against all sites in float64."""
    context.start("shm")
    for codec, block, options in (
        ("int8:64", 64, {"every": 4}),
        (None, None, {"every": 6, "fragments": 3, "delay": 2}),
        ("int4:64", 64, {"every": 6, "fragments": 2, "delay": 5, "mix": 0.25}),
        ("onebit:tensor", None, {"every": 2}),
    ):
        model = Vectors(*[48] * 6, seed=context.rank)
        optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.05), codec=codec, **options)
        assert _same_everywhere(list(model.parameters())), "all sites start from rank 0's parameters"
        start = torch.cat([p.detach() for p in model.parameters()]).double().numpy()
        parts = np.split(np.arange(start.size), options.get("fragments", 1))
        simulated = SimulatedSites(context.world_size, start, parts, codec, block, lr=0.05, **options)
        for step in range(30):
            given = [values_of(rank, step, start.size) for rank in range(context.world_size)]
            for parameter, gradient in zip(model.parameters(), given[context.rank].split(48), strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            simulated.step(np.stack([one.double().numpy() for one in given]))
            flat = torch.cat([p.detach() for p in model.parameters()]).double().numpy()
            wrong = np.abs(flat - simulated.x[context.rank]) > 1e-5
            # A codec rounds an element that is at an edge differently in float64.
            allowed = 0 if codec is None else 0.01 * wrong.size
            assert wrong.sum() <= allowed, f"{codec} {options} step {step}: {wrong.sum()} elements differ"
        assert optimizer.report.exchanges == simulated.exchanges
        optimizer.close()


def sparseloco_follows_the_paper(context: RankContext) -> None:
    """Every parameter after every step, against all sites in float64. Several chunks, the last one shorter."""
    context.start("gloo")
    for rate, bits, delay in ((0.01, 2, 0), (0.1, 4, 2)):
        model = Vectors(3000, 4000, seed=context.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = SparseLoCo(model, inner, every=3, codec=f"topk:{rate}:{bits}", lr=0.8, decay=0.9, delay=delay)
        x = np.repeat(torch.cat([p.detach() for p in model.parameters()]).double().numpy()[None], 3, axis=0)
        anchor, exchange = x[0].copy(), GatheredRanks(3, 7000, "topk", (math.ceil(rate * 4096), bits), decay=0.9)
        pending = None
        for step in range(1, 16):
            given = [values_of(rank, step, 7000) for rank in range(3)]
            for parameter, gradient in zip(model.parameters(), given[context.rank].split([3000, 4000]), strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            x = x - 0.05 * np.stack([one.double().numpy() for one in given])
            if step % 3 == 0:
                pending = step + delay, exchange.step(anchor - x)
            if pending is not None and pending[0] == step:
                anchor = anchor - 0.8 * pending[1]
                share = 0.5 if delay else 0.0
                x, pending = share * x + (1 - share) * anchor, None
            flat = torch.cat([p.detach() for p in model.parameters()]).double().numpy()
            wrong = np.abs(flat - x[context.rank]) > 1e-5
            # One that is at an edge of the selection or of a level; an exchange sends 1 % of all.
            assert wrong.sum() <= 2, f"{optimizer.codec} step {step}: {wrong.sum()} elements differ"
        assert delay or _same_everywhere(list(model.parameters()))
        optimizer.close()
    for wrong_options in ({"lr": 0.0}, {"decay": 1.5}, {"codec": "auto"}):
        with pytest.raises(UsageError):
            SparseLoCo(model, inner, every=3, **wrong_options)


def _rounds(context: RankContext, optimizer: DiLoCo, seeds: list[int | None]) -> None:
    """A round of inner steps for each seed. None stands for one in which rank 1 has a NaN: the sites raise, and go back
    to the anchors. Its residuals must be what they were."""
    parameters = optimizer.param_groups[0]["params"]
    for seed in seeds:
        slot, steps = optimizer.feedback[0], optimizer.every + (optimizer.delay if seed is None else 0)
        before, anchor = slot.copies(), optimizer.common_state()["anchors"]
        raised = False
        for step in range(steps):
            for parameter in parameters:
                parameter.grad = values_of(context.rank, 10 * (seed or 0) + step, parameter.numel())
            if seed is None and step == 0 and context.rank == 1:
                parameters[0].grad[7] = float("nan")
            try:
                optimizer.step()
            except NotFinite:
                raised = True
                break
        assert raised == (seed is None)
        if seed is None:
            torch.testing.assert_close(slot.copies(), before, rtol=0, atol=0)
            torch.testing.assert_close(optimizer.common_state()["anchors"], anchor, rtol=0, atol=0)
            optimizer.return_to_anchors()


def not_finite_leaves_no_trace(context: RankContext) -> None:
    """What a failed exchange took from the residuals is there again, so later ones do not send it twice."""
    context.start("gloo")
    for kind, codec, delay in (
        (SparseLoCo, "topk:0.01:2", 0),
        (DiLoCo, "topk:0.01:2", 0),
        (DiLoCo, "int8", 0),
        (DiLoCo, None, 0),
        (SparseLoCo, "topk:0.01:2", 1),
        (DiLoCo, "int4", 1),
    ):
        found = []
        for seeds in ([None, 1, None, 2, None, 3], [1, 2, 3]):
            model = Vectors(5000)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = kind(model, inner, every=2, codec=codec, delay=delay)
            _rounds(context, optimizer, seeds)
            optimizer.close()
            found.append(model.parts[0].detach())
            if delay:
                break  # there an outer step is taken in the round after its own
        assert torch.equal(found[0], found[-1]), (kind, codec)


def late_outcomes_are_read_before_they_are_applied(context: RankContext) -> None:
    """On a GPU, an asynchronous call does not wait for its outcome. Here all calls leave theirs unread."""
    context.start("gloo")

    def leave_unread(outcome: Outcome) -> None:
        assert outcome._slot is not None
        outcome._slot.unread = outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outcome, "report", leave_unread)
        for kind, codec in ((DiLoCo, "int8"), (DiLoCo, None), (SparseLoCo, "topk:0.01:2")):
            model = Vectors(5000)
            optimizer = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, codec=codec, delay=1)
            _rounds(context, optimizer, [None, 1, None, 2])
            optimizer.close()


def small_updates_add_up(context: RankContext) -> None:
    """Half an ulp of bfloat16 on average in each round: the anchor moves as with parameters in fp32."""
    context.start("gloo")
    for codec, delay in ((None, 0), ("int8", 0), (None, 1), ("int8", 1)):
        ends = []
        for dtype in (torch.float32, torch.bfloat16):
            model = nn.ParameterList([torch.ones(12, dtype=dtype), torch.ones(30), torch.ones(7, dtype=dtype)])
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = DiLoCo(
                model, inner, lambda a: torch.optim.SGD(a, lr=0.7), every=1 + delay, codec=codec, delay=delay
            )
            for step in range(40 * (1 + delay)):
                size = 2.0**-8 if context.rank == 0 and not (delay and step % 2) else 0.0
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, size)
                optimizer.step()
            (anchor,) = optimizer.common_state()["anchors"]
            for parameter, values in zip(model.parameters(), anchor.split([12, 30, 7]), strict=True):
                assert delay or torch.equal(parameter, values.to(parameter.dtype))
            ends.append(anchor)
            optimizer.close()
        if not delay:
            torch.testing.assert_close(ends[0], torch.full((49,), 1 - 40 * 0.7 * 2.0**-9), rtol=1e-5, atol=0)
        torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=0)


def _trained(
    context: RankContext,
    resume: bool,
    kind: type[DiLoCo] = DiLoCo,
    dtype: torch.dtype = torch.float32,
    muon: bool = False,
    **options: Any,
) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 4, dtype=dtype))
    model[1].register_forward_hook(lambda _module, _inputs, output: output.to(dtype))

    def wrapped(model: nn.Module) -> DiLoCo:
        first, *rest = model.parameters()
        if muon:
            vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
            matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
            return kind(model, [torch.optim.AdamW(vectors, lr=1e-2), torch.optim.Muon(matrices, lr=1e-2)], **options)
        inner = [torch.optim.AdamW(rest, lr=1e-2), torch.optim.SGD([first], lr=1e-2, momentum=0.9)]
        return kind(model, inner, **options)

    optimizer = wrapped(model)
    for step in range(25):
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        inputs = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).float(), inputs[:, :4]).backward()
        optimizer.step()
        if resume:
            saved = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
            optimizer.close()
            saved.seek(0)
            state = torch.load(saved, weights_only=True)
            model = copy.deepcopy(model)
            optimizer = wrapped(model)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    optimizer.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def resumes_to_the_bit(context: RankContext) -> None:
    """Saved and loaded after every step: within inner phases, and with exchanges in flight."""
    context.start("gloo")
    for options in (
        {"every": 5, "codec": "onebit:64"},
        {"every": 7, "codec": "int4", "fragments": 3, "delay": 3},
        {"every": 3, "codec": "int8", "delay": 1, "dtype": torch.bfloat16},
        {"every": 7, "codec": "topk:0.05:3", "fragments": 2, "delay": 2, "kind": SparseLoCo},
    ):
        straight, resumed = _trained(context, False, **options), _trained(context, True, **options)
        assert torch.equal(straight, resumed), options


def muon_inside(context: RankContext) -> None:
    """Muon for matrices and AdamW for the rest. The 25th step is an outer one."""
    context.start("gloo")
    straight, resumed = (_trained(context, resume, muon=True, every=5, codec="int4") for resume in (False, True))
    assert torch.equal(straight, resumed)
    assert _same_everywhere([straight])
    streamed = [_trained(context, resume, muon=True, every=5, fragments=2, delay=2) for resume in (False, True)]
    assert torch.equal(streamed[0], streamed[1])
    assert not torch.equal(straight, _trained(context, False, every=5, codec="int4")), "Muon has taken part"


def several_ranks_in_a_site(context: RankContext) -> None:
    """Two sites of two ranks. DDP: each rank exchanges half. FSDP2: each exchanges its shards. Same numbers."""
    context.start("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "inside"))
    site, sites = context.rank // 2, mesh.get_group("sites")
    results = []
    for how in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 4))
        if how == "ddp":
            wrapped: nn.Module = DistributedDataParallel(model, process_group=mesh.get_group("inside"))
        else:
            wrapped = fully_shard(model, mesh=mesh["inside"])
        options: dict[str, Any] = {"site": mesh.get_group("inside")} if how == "ddp" else {}
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DiLoCo(model, inner, every=3, codec=None, group=sites, fragments=2, **options)
        for step in range(12):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + site))
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(inputs), inputs[:, :4]).backward()
            optimizer.step()
        whole = [p.full_tensor() if how == "fsdp" else p for p in model.parameters()]  # type: ignore[operator]
        results.append(torch.cat([p.detach().flatten() for p in whole]))
        numel = results[0].numel()
        assert abs(optimizer.report.sent_bytes - numel * 4 * 4 // 2) <= 64, "half of the model, 4 times"
    torch.testing.assert_close(results[0], results[1])
    shares = fully_shard(nn.Linear(8, 8), mesh=mesh["sites"])
    with pytest.raises(UsageError, match="spread over the ranks"):
        DiLoCo(shares, torch.optim.SGD(shares.parameters(), lr=0.1), every=3, group=sites)
    model = Vectors(64)
    optimizer = DiLoCo(
        model, torch.optim.SGD(model.parameters(), lr=1.0), every=2, group=sites, site=mesh.get_group("inside")
    )
    for step in range(2):
        model.parts[0].grad = torch.ones(64)
        model.parts[0].grad[40] = float("nan") if site else 1.0  # in the half of the second rank of each site
        if step:
            with pytest.raises(NotFinite, match="another rank" if context.rank % 2 == 0 else "rank 1"):
                optimizer.step()
        else:
            optimizer.step()


def scalers_count_the_same_steps(context: RankContext) -> None:
    """A rank that found an infinity skips its inner step only."""
    context.start("shm")
    model = Vectors(64)
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step in range(9):
        before = model.parts[0].detach().clone()
        model.parts[0].grad = torch.ones(64) * scaler.scale(torch.ones(()))
        bad = context.rank == 1 and step == 4
        if bad:
            model.parts[0].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step in (0, 3):
            torch.testing.assert_close(before - model.parts[0], torch.full((64,), 0.1))
        assert torch.equal(before, model.parts[0]) == bad, step
    assert optimizer.report.exchanges == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)
    assert _same_everywhere(list(model.parameters()))


def counts_its_bytes(context: RankContext) -> list[tuple[str, int, int]]:
    """The report's bytes are those of the calls that the recorder saw."""
    context.start("shm")
    found = []
    phases = {DiLoCo: {"all_to_all_single", "all_gather_into_tensor"}, SparseLoCo: {"all_gather_into_tensor"}}
    for kind, codec in ((DiLoCo, "int8"), (DiLoCo, "onebit"), (DiLoCo, "int4"), (SparseLoCo, "topk:0.01:2")):
        model = Vectors(5000, 3000)
        optimizer = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), every=10, codec=codec)
        began = max(call.issued_ns for call in recent_calls(4))
        for _ in range(10):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        calls = [call for call in recent_calls(100) if call.issued_ns > began]
        assert {call.op for call in calls} == phases[kind], calls
        whole = sum(call.nbytes for call in calls)  # one frame of them is this rank's own
        sent = whole * (context.world_size - 1) // context.world_size
        found.append((codec, optimizer.report.sent_bytes, sent))
    return found


def usage(context: RankContext) -> None:
    context.start("shm")
    model = Vectors(8)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrongs: list[dict[str, Any]] = [{"every": 0}, {"every": 2, "fragments": 3}, {"every": 2, "delay": 2}]
    wrongs += [{"every": 2, "mix": 0.5}, {"every": 2, "outer_optimizer": inner}, {"every": 2, "codec": "int9"}]
    for wrong in wrongs:
        with pytest.raises(UsageError):
            DiLoCo(model, inner, **wrong)
    optimizer = DiLoCo(model, inner, every=2)
    with pytest.raises(UsageError):
        optimizer.add_param_group({"params": []})
    with pytest.raises(UsageError, match="fragments of"):
        DiLoCo(Vectors(9), inner, every=2).load_state_dict(optimizer.state_dict())
    with pytest.raises(UsageError, match="format"):
        optimizer.load_state_dict({})
    with pytest.raises(UsageError, match="no parameter"):
        DiLoCo(nn.Tanh(), inner, every=2)
    state = optimizer.state_dict()
    state["feedback"]["world_size"] = 7
    with pytest.warns(UserWarning, match="start from zero"):
        optimizer.load_state_dict(state)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert "1 steps, 0 exchanges" in str(optimizer.report)
