"""A training step with ringway's data-parallel hooks compared with DistributedDataParallel, in turns.

    python benchmarks/ddp_step.py [--parts hooks transformer] [--backends gloo shm] [--ranks 2] [--json FILE]

Part `hooks`: the step is zero_grad, forward, backward and SGD of a multi-layer perceptron. On gloo,
DistributedDataParallel has one of torch's own groups, the fastest it can have; on shm, both use ringway's. Then, from
the recorder's times of one more step: how much of the gradients' transfer came before the last gradient was computed.

Part `transformer` (ddp_transformer.py): a small transformer trained with DistributedDataParallel over shm and over
gloo. Asserts that the losses of both are the same, and compares a step over shm with one over gloo.

Exits with 1 if the hooks' step takes more than 1.03 times as long as DistributedDataParallel's, or if a step of the
transformer takes longer over shm than over gloo.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringway
import ringway._core as _core
from ringway.bench.runner import Candidate, Estimate, Ranks, measure, paired_ratio
from ringway.bench.table import in_ratio, in_time, machine
from ringway.parallel import register_data_parallel_hooks
from ringway.testing import RankContext, RankPool

LIMIT = 1.03
HOOKS, PLAIN, VIEWS = "ringway hooks", "DistributedDataParallel", "DistributedDataParallel, gradient_as_bucket_view"


@dataclass(frozen=True)
class Travel:
    """One bucket of one step: milliseconds from the start of backward."""

    issued: float
    completed: float
    nbytes: int


@dataclass(frozen=True)
class Result:
    backend: str
    ranks: int
    parameters: int
    seconds: dict[str, Estimate]
    ratio: Estimate
    ratio_to_views: Estimate
    last_gradient: float
    """Milliseconds from the start of backward until the last gradient was computed."""
    travels: list[Travel]

    @property
    def hidden(self) -> float:
        """The share of the gradients' transfer time that came before the last gradient."""
        total = sum(t.completed - t.issued for t in self.travels)
        before = sum(max(0.0, min(t.completed, self.last_gradient) - t.issued) for t in self.travels)
        return before / total if total else 0.0


class Training:
    """One model with its optimizer. `model` is what is called, wrapped or not."""

    def __init__(self, model: nn.Module, batch: Tensor) -> None:
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def perceptron(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts)


def compare(context: RankContext, backend: str, width: int, layers: int, batch: int, rounds: int) -> Result:
    context.start(backend)
    control = c10d.new_group(backend="gloo")
    rivals = c10d.new_group(backend="gloo") if backend == "gloo" else None
    ours = perceptron(width, layers)
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(context.rank))
    trainings = {
        PLAIN: Training(DistributedDataParallel(copy.deepcopy(ours), process_group=rivals), x),
        VIEWS: Training(
            DistributedDataParallel(copy.deepcopy(ours), process_group=rivals, gradient_as_bucket_view=True), x
        ),
        HOOKS: Training(ours, x),
    }
    handle = register_data_parallel_hooks(ours)
    measured = measure(
        [Candidate(name, training.step) for name, training in trainings.items()], Ranks(control), rounds=rounds
    )
    plain, views, hooks = measured
    values = [list(t.model.parameters()) for t in trainings.values()]
    for a, _, c in zip(*values, strict=True):
        torch.testing.assert_close(a, c, msg="the two have not learned the same")
    last_gradient, travels = _travels(trainings[HOOKS])
    handle.remove()
    return Result(
        backend,
        context.world_size,
        sum(p.numel() for p in ours.parameters()),
        {m.name: m.seconds for m in measured},
        paired_ratio(hooks, plain),
        paired_ratio(hooks, views),
        last_gradient,
        travels,
    )


def _travels(training: Training) -> tuple[float, list[Travel]]:
    """When the last gradient was computed, and when each bucket was sent and returned, according to the recorder."""
    moments: list[int] = []
    first_weight = next(training.model.parameters())
    marks = [
        first_weight.register_hook(lambda gradient: moments.append(_core.monotonic_ns())),
        training.model.register_forward_hook(lambda module, inputs, output: moments.append(_core.monotonic_ns())),
    ]
    training.step()
    for mark in marks:
        mark.remove()
    begun, last = moments
    calls = [
        call for call in ringway.recent_calls(200) if call.label.startswith("gradients ") and call.issued_ns >= begun
    ]
    return (last - begun) / 1e6, [
        Travel((c.issued_ns - begun) / 1e6, (c.completed_ns - begun) / 1e6, c.nbytes) for c in calls
    ]


def report(result: Result) -> None:
    print(f"{result.backend}, {result.ranks} ranks, {result.parameters / 1e6:.1f} M parameters")
    for name, seconds in result.seconds.items():
        interval = f"{in_time(seconds.low)} to {in_time(seconds.high)}"
        print(f"  {name:50} {in_time(seconds.median):>9} a step ({interval})")
    print(f"  hooks / {PLAIN}: {in_ratio(result.ratio)}; / with gradient_as_bucket_view: ", end="")
    print(in_ratio(result.ratio_to_views))
    print(
        f"  last gradient {result.last_gradient:.1f} ms after backward began; {result.hidden:.0%} of the travel before:"
    )
    for travel in result.travels:
        print(f"    {travel.nbytes / 1e6:6.1f} MB left at {travel.issued:6.1f} ms, done at {travel.completed:6.1f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["hooks", "transformer"], default=["hooks", "transformer"])
    parser.add_argument("--backends", nargs="+", default=["gloo", "shm"], help="for the hooks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    trained = None
    with RankPool(options.ranks) as pool:
        for backend in options.backends if "hooks" in options.parts else []:
            settings = (backend, options.width, options.layers, options.batch, options.rounds)
            results.append(pool.run(compare, *settings, timeout=1200)[0])
            report(results[-1])
        if "transformer" in options.parts:
            import ddp_transformer  # next to this file, where the ranks do not look

            trained = pool.run(ddp_transformer.compare, options.rounds, timeout=1200)[0]
            ddp_transformer.report(trained)
    if options.json is not None:
        rows = [{**asdict(result), "hidden": result.hidden} for result in results]
        found = {"machine": machine(), "results": rows, "transformer": None if trained is None else asdict(trained)}
        options.json.write_text(json.dumps(found, indent=2))
    slower = trained is not None and trained.ratio.median > 1
    return int(slower or any(result.ratio.median > LIMIT for result in results))


if __name__ == "__main__":
    sys.exit(main())
