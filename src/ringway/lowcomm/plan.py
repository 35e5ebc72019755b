"""How long a training step takes with each method on a link, forecast from the link's measured speed.

A step computes for `step_seconds`, and what it sends takes `calls * latency + bytes / bandwidth`. Gradients that DDP
averages travel while the backward pass runs, about two thirds of a step, so only the rest of their time counts. Local
methods send once in `every` steps; an exchange in the background counts only as far as it takes longer than the `delay`
steps that go on beside it. The time to encode and decode is left out: it is small next to a slow link.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from ringway.compress.auto import best_times
from ringway.compress.codecs.codec import get_codec
from ringway.compress.windows import compressed_bytes, ring_bytes
from ringway.errors import UsageError
from ringway.groups.world import world
from ringway.lowcomm.fragment import local_part

BACKWARD_SHARE = 2 / 3
ENOUGH = 0.95
"""The utilization that the recommendation asks for."""
SMALL_BYTES, LARGE_BYTES = 1 << 14, 1 << 20
POWERSGD_RANK = 4


@dataclass(frozen=True)
class Link:
    """A link between sites: what a rank sends in a second, and how long a collective takes before it sends."""

    sites: int
    bytes_per_second: float
    latency: float

    def seconds(self, nbytes: float, calls: float) -> float:
        return calls * self.latency + nbytes / self.bytes_per_second

    def __str__(self) -> str:
        speed = self.bytes_per_second * 8 / 1e6
        return f"{self.sites} sites, {speed:.0f} Mbit/s for each rank, {self.latency * 1e3:.1f} ms for a collective"


def measure_link(group: c10d.ProcessGroup | None = None, device: torch.device | str = "cpu") -> Link:
    """Time a small and a large all-reduce over the group. Collective: every rank gets the same result."""
    communicator = world.communicator(group)
    if communicator.size < 2:
        raise UsageError("measure_link: a group of one rank has no link")

    def average(trial: Tensor) -> None:
        communicator.all_reduce(trial, c10d.ReduceOp.AVG)

    where = torch.device(device)
    taken = [best_times(communicator, [average], nbytes, where)[0] for nbytes in (SMALL_BYTES, LARGE_BYTES)]
    agreed = torch.tensor(taken, dtype=torch.float64, device=where)
    communicator.all_reduce(agreed, c10d.ReduceOp.MAX)
    small, large = agreed.tolist()
    sent = [ring_bytes(nbytes // 4, communicator.size) for nbytes in (SMALL_BYTES, LARGE_BYTES)]
    speed = (sent[1] - sent[0]) / max(large - small, 1e-9)
    return Link(communicator.size, speed, max(0.0, small - sent[0] / speed))


@dataclass(frozen=True)
class Row:
    """The forecast for one method."""

    method: str
    how: str
    """How to use it, as code."""
    bytes_per_step: float
    seconds_per_step: float
    utilization: float
    times_fewer: float
    """How many times fewer bytes than DDP in fp32."""
    only_sgd: bool = False
    """Whether it sends compressed gradients, which Adam does not converge on as on fp32. Never recommended."""


@dataclass(frozen=True)
class Plan:
    """Forecasts for all methods, those that change training the least first. `str(plan)` is a table."""

    link: Link
    step_seconds: float
    numel: int
    rows: tuple[Row, ...]

    @property
    def recommended(self) -> Row:
        """The first method that keeps the processors busy enough; if none does, the one that does best."""
        fit = [row for row in self.rows if not row.only_sgd]
        enough = [row for row in fit if row.utilization >= ENOUGH]
        return enough[0] if enough else max(fit, key=lambda row: row.utilization)

    @property
    def recommendation(self) -> str:
        row = self.recommended
        if row is self.rows[0]:
            return f"Use plain DDP: the link is fast enough, and {row.utilization:.0%} of the time is computing."
        change = f"{row.utilization:.0%} of the time is computing, and with plain DDP {self.rows[0].utilization:.0%}"
        if row.utilization >= ENOUGH:
            return f"Use {row.method}: {row.how}. Then {change}."
        return (
            f"No method keeps the processors busy for {ENOUGH:.0%} of the time. {row.method} comes closest: {row.how}. "
            f"Then {change}. A larger `every`, or a larger batch, helps further."
        )

    def __str__(self) -> str:
        lines = [
            f"{self.numel / 1e6:.1f} M parameters, a step computes for {self.step_seconds:.3g} s; {self.link}",
            f"{'method':34} {'MB a step':>11} {'x fewer':>8} {'s a step':>9} {'utilization':>12}",
        ]
        for row in self.rows:
            lines.append(
                f"{row.method:34} {row.bytes_per_step / 1e6:11.4f} {row.times_fewer:8.0f} {row.seconds_per_step:9.3f} "
                f"{row.utilization:12.2f}"
            )
        return "\n".join([*lines, self.recommendation])


def plan(model: nn.Module, link: Link, step_seconds: float, *, every: int = 100) -> Plan:
    """How long a step of `step_seconds` takes with each method on this link (`measure_link`). Local methods exchange
    once in `every` steps; SparseLoCo in 30, as its paper does, or in `every` if that is less."""
    if not step_seconds > 0 or every < 1:
        raise UsageError(f"plan: step_seconds={step_seconds} must be above 0, and every={every} at least 1")
    if link.sites < 2 or not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"plan: {link.sites} site and a model without trainable parameters have nothing to exchange")
    shapes = [local_part(parameter).shape for parameter in model.parameters() if parameter.requires_grad]
    numel, sites = sum(shape.numel() for shape in shapes), link.sites
    whole = ring_bytes(numel, sites)
    sparse_every = min(30, every)

    def encoded(spec: str, servers: bool = True) -> int:
        return compressed_bytes(get_codec(spec), numel, sites, servers)

    def row(
        method: str, how: str, nbytes: float, calls: float, time: Callable[[float], float], only_sgd: bool = False
    ) -> Row:
        """`nbytes` and `calls` are for one step; `time` turns the seconds that they take into those of a step."""
        total = time(link.seconds(nbytes, calls))
        return Row(method, how, nbytes, total, step_seconds / total, whole / nbytes, only_sgd)

    def with_backward(seconds: float) -> float:
        return step_seconds + max(0.0, seconds - BACKWARD_SHARE * step_seconds)

    def after_step(seconds: float) -> float:
        return step_seconds + seconds

    def delayed(nbytes: float, calls: int, steps: int) -> int:
        """The steps that hide an exchange of `nbytes` each `steps` steps, as far as the next exchange lets them."""
        return min(max(1, math.ceil(link.seconds(nbytes, calls) / step_seconds)), max(1, steps - 1), every - 1)

    def in_background(exchanges: float, delay: int) -> Callable[[float], float]:
        """`exchanges` of a step, each beside `delay` steps."""
        return lambda seconds: step_seconds + max(0.0, seconds - exchanges * delay * step_seconds)

    fragments = min(4, every)
    delay = delayed(encoded("int4") / fragments, 2, every // fragments)
    sparse_delay = delayed(encoded("topk", servers=False), 1, sparse_every)
    return Plan(
        link,
        step_seconds,
        numel,
        (
            row("DDP, fp32", "DistributedDataParallel(model)", whole, 1, with_backward),
            row("DDP, int8, with SGD", 'ddp_hook("int8")', encoded("int8"), 2, with_backward, only_sgd=True),
            row(
                f"DDP, PowerSGD {POWERSGD_RANK} (torch), with SGD",
                "powerSGD_hook of torch.distributed.algorithms.ddp_comm_hooks",
                ring_bytes(_powersgd_numel(list(shapes)), sites),
                3,
                with_backward,
                only_sgd=True,
            ),
            row("OneBitAdam, OneBitLamb", "OneBitAdam(..., freeze_step=…)", encoded("onebit"), 2, after_step),
            row(
                "ZeroOneAdam, 16 local steps",
                "ZeroOneAdam(..., var_freeze_step=…, local_step_scaler=…), once 16 steps are local",
                encoded("onebit") / 16,
                2 / 16,
                after_step,
            ),
            row(
                f"DiLoCo, int8, every {every}",
                f'DiLoCo(model, optimizer, every={every}, codec="int8")',
                encoded("int8") / every,
                2 / every,
                after_step,
            ),
            row(
                f"Streaming DiLoCo, int4, every {every}",
                f'DiLoCo(model, optimizer, every={every}, codec="int4", fragments={fragments}, delay={delay})',
                encoded("int4") / every,
                2 * fragments / every,
                in_background(fragments / every, delay),
            ),
            row(
                f"SparseLoCo, 1 %, every {sparse_every}",
                f"SparseLoCo(model, optimizer, every={sparse_every})",
                encoded("topk", servers=False) / sparse_every,
                1 / sparse_every,
                after_step,
            ),
            row(
                f"SparseLoCo, delayed, every {sparse_every}",
                f"SparseLoCo(model, optimizer, every={sparse_every}, delay={sparse_delay})",
                encoded("topk", servers=False) / sparse_every,
                1 / sparse_every,
                in_background(1 / sparse_every, sparse_delay),
            ),
        ),
    )


def _powersgd_numel(shapes: list[torch.Size]) -> int:
    """The elements that PowerSGD averages: two factors of each matrix, if they are smaller, and vectors as they are."""
    total = 0
    for shape in shapes:
        rows, columns = (shape[0], shape.numel() // max(shape[0], 1)) if len(shape) > 1 else (shape.numel(), 1)
        factors = POWERSGD_RANK * (rows + columns)
        total += min(factors, shape.numel()) if len(shape) > 1 else shape.numel()
    return total
