"""Random programs over compressed calls, data-parallel hooks and `OneBitAdam`, checked in float64 for all ranks.

A program is drawn once (`programs`) and sent to all ranks, which run it together (`run`). After each step every rank
gathers what all ranks have, and checks it:

- A compressed call: values that a rank sent are its input plus its residual before, less its residual after. They must
  be what the codec makes of the sum, and so must the server's. The result must follow from them. Together: nothing is
  lost, nothing is invented, and no value is coded wrongly.
- A step of hooks or of the optimizer: the mean over the ranks, in float64. With a codec, what is missing from the mean
  must be in the residuals.
- What must not change (parameters that no rank used, skipped and failed steps, residuals across a checkpoint) is
  compared bit by bit.

Runs on CPU and CUDA tensors.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import simulation
from ringway.compress import ErrorFeedback, OneBitAdam, compressed_all_reduce, ddp_hook
from ringway.compress.windows import Sharding
from ringway.errors import NotFinite
from ringway.parallel import register_data_parallel_hooks
from ringway.testing import RankContext, RankPool

SPECS = (
    "onebit:64", "onebit", "onebit:tensor", "int8:64", "int8:tensor", "int4", "int4:tensor", "fp8:64", "fp8:tensor",
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("normal", "wide", "sparse", "zeros", "small", "large", "equal")
NUMELS = (0, 1, 7, 8, 100, 513, 2050)
TINY = float(np.finfo(np.float32).tiny)
SETTINGS = hypothesis.settings(
    max_examples=200, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
"""For the programs of one seed. What is left of them when the time is up is drawn, but not run."""
EXACT = 2.0**-17
"""fp32 rounding, relative to the largest value of a block: a few roundings, and a scale that is a sum."""


# Programs


@dataclass(frozen=True)
class Key:
    """One tensor of a program of calls."""

    numel: int
    dtype: torch.dtype
    spec: str
    window: int | None
    kernels: str | None


@dataclass(frozen=True)
class Call:
    key: int
    kind: str
    seed: int
    asynchronous: bool
    strided: bool
    propagate: bool
    poison: tuple[int, float] | None
    """The rank (modulo the group's size) that has such a value."""


@dataclass(frozen=True)
class Event:
    """save, load into the same feedback, load into a new one, or reset."""

    what: str


@dataclass(frozen=True)
class Calls:
    residual: torch.dtype
    keys: tuple[Key, ...]
    steps: tuple[Call | Event, ...]


@dataclass(frozen=True)
class Step:
    """One step of training. `used` has a mask of parameters for each micro-batch and rank (modulo their numbers)."""

    kind: str
    seed: int
    used: tuple[tuple[int, ...], ...]
    poison: tuple[int, float] | None
    checkpoint: bool
    toggle: int | None = None
    """The parameter that is frozen or unfrozen before this step (only for the optimizer)."""
    add: bool = False


@dataclass(frozen=True)
class Training:
    """Data-parallel hooks of ringway, or DDP with the compression hook."""

    ddp: bool
    spec: str | None
    views: bool
    parameters: tuple[tuple[int, int, torch.dtype, bool], ...]
    """Rows, columns, dtype, and whether the memory is transposed."""
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Adam:
    spec: str
    freeze: int
    decay: float
    scaler: bool
    unscale: bool
    parameters: tuple[tuple[int, int, torch.dtype, bool], ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Program:
    backend: str
    ranks: int
    group: tuple[int, ...] | None
    """The ranks of the group that the program uses; None for the world."""
    others: tuple[tuple[int, ...], ...]
    """Groups that exist besides."""
    body: Calls | Training | Adam


def _steps(toggles: bool) -> st.SearchStrategy[tuple[Step, ...]]:
    masks = st.lists(st.integers(0, 15), min_size=1, max_size=4).map(tuple)
    poison = st.none() | st.none() | st.tuples(st.integers(0, 3), st.sampled_from((math.nan, math.inf)))
    step = st.builds(
        Step,
        kind=st.sampled_from(("normal", "wide", "sparse", "small", "equal")),
        seed=st.integers(0, 1000),
        used=st.lists(masks, min_size=1, max_size=3).map(tuple),
        poison=poison,
        checkpoint=st.sampled_from((False, False, False, True)),
        toggle=st.none() | st.none() | st.integers(1, 3) if toggles else st.none(),
        add=st.booleans() if toggles else st.just(False),
    )
    return st.lists(step, min_size=2, max_size=9).map(tuple)


def _parameters(dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[tuple[Any, ...]]:
    one = st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from(dtypes), st.booleans())
    return st.lists(one, min_size=2, max_size=4).map(tuple)


def bodies(kernels: tuple[str | None, ...]) -> st.SearchStrategy[Any]:
    key = st.builds(
        Key,
        numel=st.sampled_from(NUMELS),
        dtype=st.sampled_from(DTYPES),
        spec=st.sampled_from(SPECS),
        window=st.sampled_from((None, 64, 700)),
        kernels=st.sampled_from(kernels),
    )
    call = st.builds(
        Call,
        key=st.integers(0, 2),
        kind=st.sampled_from(KINDS),
        seed=st.integers(0, 1000),
        asynchronous=st.booleans(),
        strided=st.booleans(),
        propagate=st.booleans(),
        poison=st.none() | st.none() | st.tuples(st.integers(0, 3), st.sampled_from((math.nan, math.inf, -math.inf))),
    )
    event = st.builds(Event, st.sampled_from(("save", "load", "load elsewhere", "reset")))
    calls = st.builds(
        Calls,
        residual=st.sampled_from((torch.float32, torch.float32, torch.bfloat16)),
        keys=st.tuples(key, key, key),
        steps=st.lists(call | call | call | event, min_size=1, max_size=12).map(tuple),
    ).filter(lambda body: any(isinstance(step, Call) and body.keys[step.key].numel for step in body.steps))
    # DDP's compression hook refuses float64.
    hooked = st.tuples(st.just(True), st.sampled_from(SPECS), _parameters(DTYPES))
    any_dtype = _parameters((*DTYPES, torch.float64))
    plain = st.tuples(st.just(True), st.none(), any_dtype)
    ringways = st.tuples(st.just(False), st.none() | st.sampled_from(SPECS), any_dtype)
    training = st.builds(
        lambda kind, views, steps: Training(kind[0], kind[1], views, kind[2], steps),
        kind=hooked | plain | ringways | ringways,
        views=st.booleans(),
        steps=_steps(toggles=False),
    )
    adam = st.builds(
        Adam,
        spec=st.sampled_from(SPECS),
        freeze=st.integers(1, 4),
        decay=st.sampled_from((0.0, 0.1)),
        scaler=st.booleans(),
        unscale=st.booleans(),
        parameters=_parameters((torch.float32, torch.float32, torch.bfloat16)),
        steps=_steps(toggles=True),
    )
    return calls | training | adam


@st.composite
def programs(draw: Any, backends: tuple[str, ...], sizes: tuple[int, ...], kernels: tuple[str | None, ...]) -> Program:
    ranks = draw(st.sampled_from(sizes))
    subsets = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    group = draw(st.none() | subsets)
    others = tuple(draw(st.lists(subsets, max_size=2)))
    return Program(draw(st.sampled_from(backends)), ranks, group, others, draw(bodies(kernels)))


def run_for(seconds: float, first_seed: int, strategy: st.SearchStrategy[Program], pool: RankPool, device: str) -> int:
    """Run random programs until the time is up, and return how many ran.

    Hypothesis reduces a program that fails, without a limit of time, and reports the smallest one. Programs depend on
    the seed only: the same seed draws the same ones again.
    """
    end, ran, failed = time.monotonic() + seconds, 0, False

    def check(program: Program) -> None:
        nonlocal ran, failed
        if ran and not failed and time.monotonic() > end:
            return
        ran += 1
        try:
            pool.run(run, device, program, world_size=program.ranks, timeout=120, grace=5)
        except BaseException as error:
            if not failed:
                print(f"fails, now reduced: {program}\n{error}", flush=True)
            failed = True
            raise

    rounds = 0
    while not rounds or time.monotonic() < end:
        drawn = hypothesis.given(program=strategy)(check)
        hypothesis.seed(first_seed + rounds)(hypothesis.settings(SETTINGS)(drawn))()
        rounds += 1
    return ran


# Ranks


@dataclass
class Place:
    """Where a program runs on this rank."""

    dist: Any
    group: Any
    rank: int
    size: int
    device: torch.device

    def gathered(self, mine: Any) -> list[Any]:
        """What every rank of the group has."""
        found: list[Any] = [None] * self.size
        self.dist.all_gather_object(found, mine, group=self.group)
        return found

    def agree(self, mine: Any, what: str) -> None:
        found = self.gathered(mine)
        assert all(_same(one, found[0]) for one in found), f"{what} differs between ranks: {found}"


def run(context: RankContext, device: str, program: Program) -> None:
    """Run a program and check every step. An error names what is wrong; the program is the caller's to print."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist = context.start(program.backend)
    try:
        for ranks in program.others:
            dist.new_group(list(ranks))
        members = tuple(range(program.ranks)) if program.group is None else program.group
        group = None if program.group is None else dist.new_group(list(members))
        if context.rank in members:
            place = Place(dist, group, members.index(context.rank), len(members), torch.device(device))
            RUNNERS[type(program.body)](place, program.body)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def values(kind: str, seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A rank's input, the same wherever it is computed."""
    generator = torch.Generator().manual_seed(100_003 * seed + 31 * rank + math.prod(shape))
    plain = torch.randn(shape, generator=generator)
    if kind == "wide":
        plain = plain * 10.0 ** (6 * torch.rand(shape, generator=generator) - 3)
    elif kind == "sparse":
        plain = plain * (torch.rand(shape, generator=generator) < 0.1)
    elif kind == "zeros":
        plain = torch.zeros(shape)
    elif kind == "small":
        plain = plain * 1e-7
    elif kind == "large":
        plain = plain.clamp(-3, 3) * (21_000.0 if dtype is torch.float16 else 1e14)
    elif kind == "equal":
        plain = torch.full(shape, float(plain.sum()) or 1.0) * (-1.0 if rank % 2 else 0.5)
    return plain.to(dtype)


def array(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().to("cpu", torch.float64).numpy().copy()
    return found


def _same(a: Any, b: Any) -> bool:
    """Bit by bit, except that every NaN is the same."""
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def peak(x: np.ndarray) -> float:
    return float(np.abs(x).max()) if x.size else 0.0


def epsilon(dtype: torch.dtype) -> float:
    """The relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


# What a codec may do


def check_encoding(total: np.ndarray, sent: np.ndarray, slack: np.ndarray, spec: str, whole: np.ndarray | None) -> None:
    """`sent` is what the codec makes of `total`, up to `slack`. Codes on an edge may go either way.

    `whole` is the tensor over which a scale spans if there is one per tensor.
    """
    codec, _, block = spec.partition(":")
    width = total.size if block == "tensor" else int(block) if block else {"onebit": 1024, "int4": 128}.get(codec, 256)
    for start in range(0, total.size, max(width, 1)):
        part = slice(start, start + width)
        # The scale is that of values which are known up to the slack too.
        t, s, tolerance = total[part], sent[part], slack[part] + slack[part].max(initial=0.0)
        scale_of = t if block != "tensor" or whole is None else whole
        if codec == "onebit":
            scale = simulation.tensor_scale(scale_of, codec) if block == "tensor" else float(np.abs(t).mean())
            tolerance = tolerance + 2.0**-15 * scale
            if scale < 2 * TINY:  # rounded to zero, or not
                assert (np.abs(s) <= 2 * TINY + tolerance).all(), f"{spec}: sent {s} for {t}"
                continue
            wrong = np.abs(np.abs(s) - scale) > tolerance
            assert not wrong.any(), f"{spec}: scale {scale}, but sent {s[wrong][:4]} for {t[wrong][:4]}"
            turned = (np.sign(s) != np.where(t >= 0, 1, -1)) & (np.abs(t) > tolerance)
            assert not turned.any(), f"{spec}: sent {s[turned][:4]} for {t[turned][:4]}"
            continue
        scale = peak(scale_of) / simulation.CODE_LIMITS[codec]
        if scale < 2 * TINY:
            assert (np.abs(s) <= 1000 * TINY + tolerance).all(), f"{spec}: sent {s} for {t}"
            continue
        allowed = np.maximum(np.abs(t) / 16, scale * 2.0**-10) if codec == "fp8" else np.full_like(t, scale / 2)
        wrong = np.abs(t - s) > allowed * (1 + 1e-4) + tolerance
        assert not wrong.any(), f"{spec}: scale {scale}, but sent {s[wrong][:4]} for {t[wrong][:4]}"
        codes = np.abs(s) / scale
        if codec == "fp8":
            numbers = simulation.e4m3_numbers()
            nearest = numbers[np.abs(codes[:, None] - numbers[None, :]).argmin(axis=1)]
        else:
            nearest = np.rint(codes)
        off = np.abs(codes - nearest) * scale > tolerance + 1e-5 * np.abs(s)
        assert not off.any(), f"{spec}: {s[off][:4]} is no multiple of {scale}"


def shards(numel: int, ranks: int) -> Iterator[slice]:
    for rank in range(ranks):
        yield Sharding(numel, ranks).served(rank)


Residuals = list[tuple[np.ndarray, np.ndarray]] | None
"""Worker and server of every rank; None before the first call."""


def mass(residuals: Residuals, numel: int) -> np.ndarray:
    """What all residuals together hold back from the mean."""
    if residuals is None:
        return np.zeros(numel)
    held: np.ndarray = np.mean([worker for worker, _ in residuals], axis=0)
    return held + np.concatenate([server for _, server in residuals])


def check_exchange(
    spec: str, residual: torch.dtype, inputs: list[np.ndarray], before: Residuals, after: Residuals, result: np.ndarray,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """One compressed all-reduce of finite values, among all ranks."""
    ranks, numel = len(inputs), result.size
    assert after is not None
    start = before or [(np.zeros(numel), np.zeros(after[rank][1].size)) for rank in range(ranks)]
    coarse = epsilon(residual) if residual is torch.bfloat16 else 0.0
    totals = [given + worker for given, (worker, _) in zip(inputs, start, strict=True)]
    sent = [total - worker for total, (worker, _) in zip(totals, after, strict=True)]
    server_before = np.concatenate([server for _, server in start])
    server_after = np.concatenate([server for _, server in after])
    level = max([peak(total) for total in totals], default=0.0) + peak(server_before)
    for rank in range(ranks):
        for where in shards(numel, ranks):
            slack = EXACT * level + coarse * np.abs(after[rank][0][where])
            check_encoding(totals[rank][where], sent[rank][where], slack, spec, totals[rank])
    served = np.mean(sent, axis=0) + server_before
    out = served - server_after
    rounding = coarse * np.mean([np.abs(worker) for worker, _ in after], axis=0)
    for where in shards(numel, ranks):
        slack = EXACT * level + rounding[where] + coarse * np.abs(server_after[where])
        check_encoding(served[where], out[where], slack, spec, None)
    limit = torch.finfo(dtype).max
    tolerance = EXACT * level + rounding + coarse * np.abs(server_after) + epsilon(dtype) * np.abs(out)
    tolerance = tolerance + float(torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps
    wrong = np.abs(np.clip(out, -limit, limit) - result) > tolerance
    assert not wrong.any(), f"{spec} {dtype}: result {result[wrong][:4]} instead of {out[wrong][:4]}"


# Compressed calls


def residuals_of(place: Place, feedback: ErrorFeedback, key: Any) -> Residuals:
    slot = feedback.state_dict()["slots"].get(key)
    mine = None if slot is None else (array(slot["worker"]), array(slot["server"]))
    found = place.gathered(mine)
    assert len({one is None for one in found}) == 1, "some ranks have residuals, others do not"
    return None if mine is None else found


def run_calls(place: Place, body: Calls) -> None:
    feedback = ErrorFeedback(place.group, residual_dtype=body.residual)
    held = [feedback[key] for key in range(len(body.keys))]
    expected: dict[int, Residuals] = dict.fromkeys(range(len(body.keys)))
    saved: tuple[Any, dict[int, Residuals]] | None = None
    for step in body.steps:
        if isinstance(step, Event):
            if step.what == "save":
                saved = copy.deepcopy(feedback.state_dict()), dict(expected)
            elif step.what == "reset":
                feedback.reset()
                expected = dict.fromkeys(expected)
            elif saved is not None:
                if step.what == "load elsewhere":
                    feedback.close()
                    feedback = ErrorFeedback(place.group, residual_dtype=body.residual)
                    held = [feedback[key] for key in range(len(body.keys))]
                feedback.load_state_dict(saved[0])
                expected = dict(saved[1])
            for key in expected:
                assert _same(residuals_of(place, feedback, key), expected[key]), f"residuals of {key} after {step.what}"
            continue
        assert _same(residuals_of(place, feedback, step.key), expected[step.key]), "residuals changed between calls"
        expected[step.key] = run_call(place, feedback, held[step.key], body, step, expected[step.key])
    feedback.close()


def run_call(place: Place, feedback: ErrorFeedback, slot: Any, body: Calls, step: Call, before: Residuals) -> Residuals:
    key = body.keys[step.key]
    inputs = [values(step.kind, step.seed, rank, (key.numel,), key.dtype) for rank in range(place.size)]
    poisoned = None
    if step.poison is not None and key.numel:
        poisoned = step.poison[0] % place.size
        inputs[poisoned][step.seed % key.numel] = step.poison[1]
    tensor = inputs[place.rank].to(place.device, copy=True)
    if step.strided:
        wide = torch.zeros(2 * key.numel, dtype=key.dtype, device=place.device)
        wide[::2] = tensor
        tensor = wide[::2]
    error = None
    try:
        work = compressed_all_reduce(
            tensor, slot, key.spec, async_op=step.asynchronous, kernels=key.kernels, window=key.window,
            not_finite="propagate" if step.propagate else "raise",
        )  # fmt: skip
        if work is not None:
            work.wait()
        if place.device.type == "cuda" and step.asynchronous and not step.propagate and poisoned is not None:
            # Reported at the next call with the same residuals.
            compressed_all_reduce(torch.zeros_like(tensor), slot, key.spec, kernels=key.kernels, window=key.window)
    except NotFinite as found:
        error = found
    after = residuals_of(place, feedback, step.key)
    result = array(tensor)
    if poisoned is not None:
        assert all(np.isfinite(part).all() for pair in after or () for part in pair), "a residual is not finite"
        if step.propagate:
            assert error is None
            assert np.isnan(result[step.seed % key.numel])
        else:
            assert error is not None, f"no NotFinite for {step.poison}"
            assert error.rank == poisoned
        return after
    assert error is None, f"finite values, but {error}"
    place.agree(result, "the result")
    if key.numel == 0:
        return after
    check_exchange(key.spec, body.residual, [array(one) for one in inputs], before, after, result, key.dtype)
    return after


# Data-parallel hooks


class Weights(nn.Module):
    """Parameters whose gradients are the inputs, whatever their values."""

    def __init__(self, parameters: tuple[tuple[int, int, torch.dtype, bool], ...], device: torch.device) -> None:
        super().__init__()
        for number, (rows, columns, dtype, transposed) in enumerate(parameters):
            memory = values("normal", number, 0, (columns, rows) if transposed else (rows, columns), dtype).to(device)
            self.register_parameter(f"p{number}", nn.Parameter(memory.t() if transposed else memory))

    def forward(self, inputs: list[Tensor | None]) -> Tensor:
        pairs = zip(self.parameters(), inputs, strict=True)
        return torch.stack([(p * x).sum().to(torch.float64) for p, x in pairs if x is not None]).sum()


def inputs_of(step: Step, micro: int, rank: int, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """The gradients of one micro-batch; None for parameters that it does not use. The first is always used."""
    masks = step.used[micro]
    mask = masks[rank % len(masks)] | 1
    found: list[Tensor | None] = []
    for number, parameter in enumerate(parameters):
        given = values(step.kind, step.seed + 7 * micro + number, rank, tuple(parameter.shape), parameter.dtype)
        found.append(given if mask >> number & 1 else None)
    first = found[0]
    if step.poison is not None and micro == 0 and first is not None and rank == step.poison[0]:
        first.view(-1)[0] = step.poison[1]
    return found


@dataclass
class Trainer:
    """A model with hooks, and where its residuals are."""

    model: Weights
    call: Callable[..., Tensor]
    no_sync: Callable[[], Any]
    feedback: ErrorFeedback | None
    layout: Callable[[], dict[Any, list[str]]]
    """The parameters of each residual."""
    save: Callable[[], Any]
    close: Callable[[], None]


def trainer(place: Place, body: Training, state: Any) -> Trainer:
    if body.ddp:
        # DDP's own broadcast refuses a transposed row or column that has a bucket to itself, on torch's groups too.
        model = Weights(tuple((r, c, dtype, t and min(r, c) > 1) for r, c, dtype, t in body.parameters), place.device)
    else:
        model = Weights(body.parameters, place.device)
        handle = register_data_parallel_hooks(
            model, place.group, bucket_mb=0.001, codec=body.spec, gradient_as_bucket_view=body.views
        )
        if state is not None:
            handle.load_state_dict(state)
        compression = handle._compression

        def buckets() -> dict[Any, list[str]]:
            return {f"gradients {number}": names for number, names in enumerate(handle.bucket_names)}

        feedback = None if compression is None else compression._feedback
        return Trainer(model, model, handle.no_sync, feedback, buckets, handle.state_dict, handle.remove)
    ddp = DistributedDataParallel(
        model, process_group=place.group, find_unused_parameters=True, bucket_cap_mb=0.001,
        gradient_as_bucket_view=body.views, device_ids=[0] if place.device.type == "cuda" else None,
    )  # fmt: skip
    layout: dict[Any, list[str]] = {}
    if body.spec is None:
        return Trainer(model, ddp, ddp.no_sync, None, lambda: layout, lambda: None, lambda: None)
    feedback = ErrorFeedback(place.group)
    if state is not None:
        feedback.load_state_dict(state)
    hook = ddp_hook(body.spec, group=place.group, feedback=feedback, not_finite="propagate")
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def spied(state: Any, bucket: Any) -> Any:
        layout[bucket.index()] = [names[id(parameter)] for parameter in bucket.parameters()]
        return hook(state, bucket)

    spied.__annotations__ = {}  # DDP compares them with its own types, and here they are strings
    ddp.register_comm_hook(None, spied)
    return Trainer(model, ddp, ddp.no_sync, feedback, lambda: layout, feedback.state_dict, feedback.close)


def run_training(place: Place, body: Training) -> None:
    trained = trainer(place, body, None)
    plain_steps = 1  # neither has residuals in its first step
    for step in body.steps:
        run_step(place, body, trained, step, compressed=plain_steps == 0)
        plain_steps = max(0, plain_steps - 1)
        if step.checkpoint:
            state = copy.deepcopy(trained.save())
            trained.close()
            trained = trainer(place, body, state)
            plain_steps = 1 if body.ddp else plain_steps
    trained.close()


def run_step(place: Place, body: Training, trained: Trainer, step: Step, compressed: bool) -> None:
    parameters = dict(trained.model.named_parameters())
    layout = {} if trained.feedback is None or not compressed else trained.layout()
    before = _masses(place, trained, layout, parameters)
    trained.model.zero_grad(set_to_none=True)
    for micro in range(len(step.used)):
        last = micro == len(step.used) - 1
        inputs = inputs_of(step, micro, place.rank, list(parameters.values()))
        with nullcontext() if last else trained.no_sync():
            trained.call([None if one is None else one.to(place.device) for one in inputs]).backward()
    layout = layout if not compressed or trained.feedback is None else trained.layout()
    after = _masses(place, trained, layout, parameters)
    found = {name: None if p.grad is None else array(p.grad) for name, p in parameters.items()}
    place.agree(found, "a gradient")
    for number, (name, parameter) in enumerate(parameters.items()):
        summed = np.zeros(parameter.shape)
        level, used = np.zeros(parameter.shape), False
        for rank in range(place.size):
            for micro in range(len(step.used)):
                one = inputs_of(step, micro, rank, list(parameters.values()))[number]
                if one is not None:
                    used = True
                    summed, level = summed + array(one), level + np.abs(array(one))
        mean, grad = summed / place.size, found[name]
        assert (grad is not None) == used, f"{name}: the gradient is {grad}, used {used}"
        if not np.isfinite(mean).all():
            assert grad is not None
            assert not np.isfinite(grad[~np.isfinite(mean)]).any(), f"{name}: lost {step.poison}"
            continue
        if step.poison is not None and step.poison[0] < place.size:
            continue  # the same bucket, or the same block
        rounding = 4 * place.size * len(step.used) * epsilon(parameter.dtype) * level
        rounding = rounding + float(torch.finfo(parameter.dtype).smallest_normal)
        if name not in after:
            if grad is not None:
                wrong = np.abs(grad - mean) > rounding
                assert not wrong.any(), f"{name}: gradient {grad[wrong][:4]} instead of {mean[wrong][:4]}"
            continue
        held_before = before[name][0] if name in before else np.zeros(mean.size)
        held_after, scale = after[name]
        given = np.zeros(mean.size) if grad is None else _in_memory(grad, parameter)
        # The ranks' residuals count in fp32, the gradient was rounded to its own dtype.
        tolerance = 8 * EXACT * scale + 4 * epsilon(parameter.dtype) * (np.abs(given) + scale * (grad is None))
        tolerance = tolerance + _in_memory(rounding, parameter)
        lost = held_before + _in_memory(mean, parameter) - held_after - given
        wrong = np.abs(lost) > tolerance
        assert not wrong.any(), f"{name}: the step lost {lost[wrong][:4]} of {_in_memory(mean, parameter)[wrong][:4]}"


def _in_memory(grad: np.ndarray, parameter: Tensor) -> np.ndarray:
    """Elements in the order of the bucket: that of the parameter's memory."""
    return (grad if parameter.is_contiguous() else grad.T).reshape(-1)


def _masses(place: Place, trained: Trainer, layout: dict[Any, list[str]], parameters: dict[str, Any]) -> dict[str, Any]:
    """What the residuals hold of each parameter, and the largest value of its bucket."""
    found: dict[str, Any] = {}
    if trained.feedback is None:
        return found
    for key, names in layout.items():
        residuals = residuals_of(place, trained.feedback, key)
        lengths = [parameters[name].numel() for name in names]
        if residuals is None or residuals[0][0].size != sum(lengths):
            continue
        held = np.split(mass(residuals, sum(lengths)), np.cumsum(lengths)[:-1])
        scale = max(peak(part) for pair in residuals for part in pair)
        found.update({name: (part, scale) for name, part in zip(names, held, strict=True)})
    return found


# OneBitAdam


def run_adam(place: Place, body: Adam) -> None:
    """Checked step by step from the state before: moments and parameters in float64."""
    parameters = list(Weights(body.parameters, place.device).parameters())
    later = parameters.pop() if len(parameters) > 2 else None

    def optimizer_of(added: bool) -> OneBitAdam:
        made = OneBitAdam(
            parameters[: len(parameters) - added], lr=0.01, weight_decay=body.decay, freeze_step=body.freeze,
            codec=body.spec, group=place.group,
        )  # fmt: skip
        if added:
            made.add_param_group({"params": [parameters[-1]], "lr": 0.001})
        return made

    optimizer, added = optimizer_of(False), False
    # On CUDA, torch's GradScaler takes no bfloat16. The parameter that is added later counts as well.
    with_scaler = body.scaler and all(dtype is torch.float32 for _, _, dtype, _ in body.parameters)
    scaler = torch.amp.GradScaler(place.device.type, init_scale=64.0) if with_scaler else None
    for step in body.steps:
        if step.add and later is not None and not added:
            parameters.append(later)
            optimizer.add_param_group({"params": [later], "lr": 0.001})
            added = True
        if step.toggle is not None and step.toggle < len(parameters):
            parameters[step.toggle].requires_grad_(not parameters[step.toggle].requires_grad)
        run_adam_step(place, body, optimizer, scaler, parameters, step)
        if step.checkpoint:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.feedback.close()
            optimizer = optimizer_of(added)
            optimizer.load_state_dict(state)
    optimizer.feedback.close()


def run_adam_step(
    place: Place, body: Adam, optimizer: OneBitAdam, scaler: Any, parameters: list[nn.Parameter], step: Step
) -> None:
    everyones = [inputs_of(step, 0, rank, parameters) for rank in range(place.size)]
    for parameter, given in zip(parameters, everyones[place.rank], strict=True):
        parameter.grad = None if given is None or not parameter.requires_grad else given.to(place.device, copy=True)
        if parameter.grad is not None and scaler is not None:
            parameter.grad *= scaler.scale(torch.ones((), device=place.device))
    bad = step.poison is not None and step.poison[0] < place.size
    before = _adam_state(place, optimizer, parameters)
    error = None
    try:
        if scaler is None:
            optimizer.step()
        else:
            if body.unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    except NotFinite as found:
        error = found
    after = _adam_state(place, optimizer, parameters)
    place.agree({name: part for name, part in after.items() if name != "residuals"}, "the optimizer's state")
    assert (error is not None) == (bad and scaler is None), f"{step.poison}: {error}"
    if bad:
        assert error is None or step.poison is None or error.rank == step.poison[0]
        assert _same(before, after), "a step that was skipped, or failed, changed something"
        return
    for number, parameter in enumerate(parameters):
        given = [gradients[number] for gradients in everyones]
        used = parameter.requires_grad and any(one is not None for one in given)
        gradients = [np.zeros(parameter.shape) if one is None else array(one) for one in given]
        old, new = before[f"p{number}"], after[f"p{number}"]
        if not used:
            unchanged = {key: value for key, value in old.items() if key not in ("held", "scale", "bucket")}
            assert _same(unchanged, {key: value for key, value in new.items() if key in unchanged}), f"p{number} moved"
            if old["held"] is not None and new["held"] is not None:
                lost = old["held"] - new["held"]
                assert (np.abs(lost) <= 8 * EXACT * (new["scale"] + old["scale"])).all(), f"p{number} lost {peak(lost)}"
            continue
        lr = 0.001 if parameter is optimizer.param_groups[-1]["params"][0] and number else 0.01
        _check_adam(body, lr, old, new, gradients, parameter, f"p{number}")


def _check_adam(
    body: Adam, lr: float, old: dict[str, Any], new: dict[str, Any], gradients: list[np.ndarray], parameter: Tensor,
    name: str,
) -> None:  # fmt: skip
    count = old["step"] + 1
    assert new["step"] == count, f"{name}: step {new['step']} instead of {count}"
    mean, level = np.mean(gradients, axis=0), np.max(np.abs(gradients), axis=0)
    momentum = old["momentum"] + 0.1 * (mean - old["momentum"])
    if old["step"] < body.freeze:
        variance = 0.999 * old["variance"] + 0.001 * mean**2
        _near(new["momentum"], momentum, 1e-6 * (level + np.abs(old["momentum"])), f"{name}: momentum")
        _near(new["variance"], variance, 1e-5 * (level**2 + old["variance"]), f"{name}: variance")
    else:
        assert _same(new["variance"], old["variance"]), f"{name}: the variance is frozen"
        held = np.zeros(mean.size) if old["held"] is None else old["held"]
        assert new["held"] is not None
        scale = peak(momentum) + level.max() + new["scale"] + (old["scale"] or 0.0)
        lost = held.reshape(mean.shape) + momentum - new["held"].reshape(mean.shape) - new["momentum"]
        live = new["variance"] != 0
        _near(lost[live], np.zeros(int(live.sum())), 8 * EXACT * scale, f"{name}: mass of the momentum")
        assert not new["momentum"][~live].any()
    first, second = 1 - 0.9**count, 1 - 0.999 ** min(count, body.freeze)
    change = new["momentum"] / (np.sqrt(new["variance"]) / math.sqrt(second) + 1e-8) * (-lr / first)
    moved = old["value"] * (1 - lr * body.decay) + change
    tolerance = 3 * epsilon(parameter.dtype) * (np.abs(old["value"]) + np.abs(moved)) + 1e-5 * np.abs(change)
    _near(new["value"], moved, tolerance, f"{name}: value")


def _near(found: np.ndarray, right: np.ndarray, tolerance: Any, what: str) -> None:
    wrong = np.abs(found - right) > tolerance + 1e-37
    assert not wrong.any(), f"{what} is {found[wrong][:4]} instead of {right[wrong][:4]}"


def _adam_state(place: Place, optimizer: OneBitAdam, parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Everything that a step may change, and what the residuals of all ranks hold of each parameter."""
    slots = optimizer.feedback.state_dict()["slots"]
    mine = {key: (array(slot["worker"]), array(slot["server"])) for key, slot in slots.items()}
    everyones = place.gathered(mine)
    found: dict[str, Any] = {"residuals": mine}
    for number, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        zeros = np.zeros(parameter.shape)
        found[f"p{number}"] = {
            "value": array(parameter),
            "step": state.get("step", 0),
            "bucket": state.get("bucket"),
            "momentum": array(state["exp_avg"]) if "exp_avg" in state else zeros,
            "variance": array(state["exp_avg_sq"]) if "exp_avg_sq" in state else zeros,
            "held": None,
            "scale": 0.0,
        }
    names = {id(parameter): f"p{number}" for number, parameter in enumerate(parameters)}
    for index, group in enumerate(optimizer.param_groups):
        buckets: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if "bucket" in optimizer.state.get(parameter, {}):
                buckets.setdefault(optimizer.state[parameter]["bucket"], []).append(parameter)
        for number, members in buckets.items():
            key = f"group{index}.{number}"
            if key not in mine:
                continue
            residuals = [theirs[key] for theirs in everyones]
            lengths = [parameter.numel() for parameter in members]
            held = np.split(mass(residuals, sum(lengths)), np.cumsum(lengths)[:-1])
            for parameter, part in zip(members, held, strict=True):
                scale = max(peak(one) for pair in residuals for one in pair)
                found[names[id(parameter)]].update(held=part, scale=scale)
    return found


RUNNERS: dict[type, Callable[[Place, Any], None]] = {Calls: run_calls, Training: run_training, Adam: run_adam}
