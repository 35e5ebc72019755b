"""Compiled programs: a call on shm and one on torch's gloo; the tensor-parallel GPT of the examples with the compiler
and without. The two of each pair take turns.

    python benchmarks/compiled.py [--parts call step] [--ranks 2] [--rounds 41] [--check] [--output FILE]

Part `call`: a compiled function with one all_reduce, on a group of shm and on one of torch's own. Part `step`: forward,
loss, backward and AdamW of the GPT, split over the ranks, compiled with fullgraph=True and run eagerly. The compiled
model must be one graph, and the losses must be the same. The compiler is inductor, which needs a C++ compiler.

--check exits with 1 if a compiled call on shm takes longer than on gloo, or a compiled step longer than an eager one.
--output writes a page of docs/proofs.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ringway.bench.runner import Candidate, Estimate, Ranks, measure, paired_ratio
from ringway.bench.table import in_ratio, in_time
from ringway.parallel import register_model_parallel_hooks, vocabulary_parallel_cross_entropy
from ringway.testing import RankContext, RankPool

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"
PROVES = (
    "src/ringway/parallel",
    "src/ringway/api/collectives.py",
    "src/ringway/groups/bridge.py",
    "benchmarks/compiled.py",
)
SIZES = (8, 64 << 10, 1 << 20)
LETTERS, CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 31, 64, 128, 4, 4, 8


@dataclass(frozen=True)
class Compared:
    what: str
    ours: Estimate
    theirs: Estimate
    ratio: Estimate

    def row(self) -> str:
        return f"| {self.what} | {in_time(self.ours.median)} | {in_time(self.theirs.median)} | {in_ratio(self.ratio)} |"


def compiled_call(group: c10d.ProcessGroup, numel: int) -> Callable[[], object]:
    """A compiled function whose graph has one all_reduce of this group, and its argument."""

    def summed(x: Tensor) -> Tensor:
        c10d.all_reduce(x, group=group)
        return x

    called, x = torch.compile(summed, fullgraph=True), torch.zeros(numel)
    with torch.inference_mode():
        called(x)

    def call() -> None:
        with torch.inference_mode():
            called(x)

    return call


def calls(context: RankContext, rounds: int) -> list[Compared]:
    context.start("shm")
    gloo, control = c10d.new_group(backend="gloo"), c10d.new_group(backend="gloo")
    world = c10d.group.WORLD
    assert world is not None
    found = []
    for nbytes in SIZES:
        torch.compiler.reset()
        candidates = [
            Candidate("shm", compiled_call(world, nbytes // 4)),
            Candidate("gloo", compiled_call(gloo, nbytes // 4)),
        ]
        ours, theirs = measure(candidates, Ranks(control), rounds=rounds)
        found.append(
            Compared(
                f"all_reduce of {nbytes} bytes, shm / gloo", ours.seconds, theirs.seconds, paired_ratio(ours, theirs)
            )
        )
    return found


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # the compiler imports what it traces
    spec.loader.exec_module(found)
    return found


class Training:
    def __init__(self, model: nn.Module, batches: list[Tensor], *, compiled: bool) -> None:
        def loss_of(letters: Tensor) -> Tensor:
            return vocabulary_parallel_cross_entropy(model(letters[:, :-1]), letters[:, 1:], vocabulary=LETTERS)

        self._loss_of = torch.compile(loss_of, fullgraph=True) if compiled else loss_of
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._batches = batches
        self.losses: list[Tensor] = []

    def step(self) -> None:
        loss = self._loss_of(self._batches[len(self.losses) % len(self._batches)])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.detach())


def steps(context: RankContext, rounds: int) -> Compared:
    context.start("shm")
    torch.compiler.reset()
    counters.clear()
    control = c10d.new_group(backend="gloo")
    gpt = example()
    torch.manual_seed(0)
    eager = gpt.GPT(LETTERS, CONTEXT, WIDTH, HEADS, BLOCKS)
    compiled = copy.deepcopy(eager)
    handles = [register_model_parallel_hooks(model, gpt.plan(False)) for model in (eager, compiled)]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(LETTERS, (BATCH, CONTEXT + 1), generator=generator) for _ in range(16)]
    trainings = [Training(compiled, batches, compiled=True), Training(eager, batches, compiled=False)]
    for training in trainings:
        training.step()  # compiles
    candidates = [Candidate(name, one.step) for name, one in zip(("compiled", "eager"), trainings, strict=True)]
    ours, theirs = measure(candidates, Ranks(control), rounds=rounds)
    count = min(len(training.losses) for training in trainings)
    one, other = (torch.stack(training.losses[: min(count, 20)]) for training in trainings)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if counters["stats"]["unique_graphs"] != 1 or counters["graph_break"]:
        raise SystemExit(f"not one graph: {dict(counters['stats'])}, {dict(counters['graph_break'])}")
    for handle in handles:
        handle.remove()
    return Compared(
        "a step of the split GPT, compiled / eager", ours.seconds, theirs.seconds, paired_ratio(ours, theirs)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["call", "step"], default=["call", "step"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the compiled side takes longer")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: list[Compared] = []
    with RankPool(given.ranks) as pool:
        if "call" in given.parts:
            found += pool.run(calls, given.rounds, timeout=1200)[0]
        if "step" in given.parts:
            found.append(pool.run(steps, given.rounds, timeout=1200)[0])
    lines = ["| what | first | second | ratio |", "|---|---|---|---|", *(one.row() for one in found)]
    print("\n".join(lines))
    if given.output is not None:
        sys.path.insert(0, str(ROOT / "scripts"))
        import proofs

        facts = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {given.ranks} ranks."
        body = [
            "    python benchmarks/compiled.py",
            "",
            facts,
            "",
            *lines,
            "",
            "The losses are the same; each model is one graph.",
        ]
        proofs.write(given.output, "Compiled programs", PROVES, "\n".join(body))
    slower = [one.what for one in found if one.ratio.low > 1]
    for what in slower:
        print(f"slower: {what}")
    return int(given.check and bool(slower))


if __name__ == "__main__":
    sys.exit(main())
