"""Does training with compressed gradients end where plain training ends?

    python benchmarks/convergence.py --plot docs/proofs/convergence.svg

A small transformer and an MLP on generated data, several seeds, 2 and 4 ranks over shm. Under momentum SGD: plain,
each codec with feedback, and onebit without. Under Adam: plain, and `OneBitAdam`. The learning rate falls to
zero, so that what is compared is where training goes and not its noise.

Exits with 1 unless every codec with feedback ends within 1 % of the plain loss (mean over the seeds), and onebit
without feedback at least 5 % above it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CODECS = ("onebit", "onebit:tensor", "int8", "int4", "fp8")
STEPS = {"mlp": 1000, "transformer": 500}
WITHIN = 0.01
WORSE = 0.05
BATCH = 64
"""For the whole group: each rank takes its share."""


class Mlp(nn.Module):
    """A student of a fixed random teacher, with noise that nobody can learn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    def loss(self, generator: torch.Generator, count: int) -> Tensor:
        inputs = torch.randn(count, 32, generator=generator)
        teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(99)) / math.sqrt(32)
        noise = torch.randn(count, 8, generator=generator)
        return nn.functional.mse_loss(self.layers(inputs), torch.sin(inputs @ teacher) + 0.4 * noise)


class Transformer(nn.Module):
    """Predicts the next symbol of sequences from a fixed random chain, whose entropy is the floor."""

    symbols, length, width = 16, 16, 32

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.symbols, self.width)
        self.place = nn.Parameter(torch.zeros(self.length, self.width))
        layer = nn.TransformerEncoderLayer(self.width, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(self.width, self.symbols)

    def loss(self, generator: torch.Generator, count: int) -> Tensor:
        chain = torch.randn(self.symbols, self.symbols, generator=torch.Generator().manual_seed(7)).mul(5).softmax(1)
        sequence = [torch.randint(self.symbols, (count,), generator=generator)]
        for _ in range(self.length):
            sequence.append(torch.multinomial(chain[sequence[-1]], 1, generator=generator).squeeze(1))
        tokens = torch.stack(sequence, dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(self.length)
        hidden = self.body(self.embed(tokens[:, :-1]) + self.place, mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), tokens[:, 1:].flatten())


MODELS: dict[str, Callable[[], Any]] = {"mlp": Mlp, "transformer": Transformer}


@dataclass(frozen=True)
class Run:
    """One way to train."""

    model: str
    optimizer: str
    codec: str | None
    feedback: bool = True

    def __str__(self) -> str:
        name = "plain" if self.codec is None else self.codec
        return f"{self.model}, {self.optimizer}, {name}{'' if self.feedback else ' without feedback'}"


def train(context: Any, run: Run, seed: int) -> list[float]:
    """The loss every tenth step, and last the loss on data never trained on."""
    dist = context.start("shm")
    from ringway.compress import ErrorFeedback, OneBitAdam, compressed_all_reduce

    torch.manual_seed(seed)
    model = MODELS[run.model]()
    steps = STEPS[run.model]
    ours = run.optimizer == "adam" and run.codec is not None
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if ours:
        optimizer = OneBitAdam(parameters, lr=3e-3, freeze_step=steps // 4, codec=run.codec or "onebit")
    elif run.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, lr=3e-3)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    generator = torch.Generator().manual_seed(1000 * seed + context.rank)
    feedback = ErrorFeedback() if run.feedback else None
    curve = []
    for step in range(steps):
        loss = model.loss(generator, BATCH // context.world_size)
        optimizer.zero_grad()
        loss.backward()
        if not ours:
            flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
            if run.codec is None:
                dist.all_reduce(flat)
                flat /= context.world_size
            else:
                compressed_all_reduce(flat, feedback, run.codec)
            parts = flat.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view(parameter.shape)
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach().clone())
            curve.append(mean.item() / context.world_size)
    model.eval()
    with torch.no_grad():
        curve.append(model.loss(torch.Generator().manual_seed(5), 4096).item())
    return curve


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """The curves as an SVG, written by hand: no plotting library is needed."""
    width, height, colours = 720, 420, ("#222", "#c33", "#37a", "#393", "#b80", "#849", "#0aa", "#777")
    top = max(max(curve) for curve in curves.values())
    low = min(min(curve) for curve in curves.values())
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 20 * len(curves)}">']
    for index, (name, curve) in enumerate(curves.items()):
        colour = colours[index % len(colours)]
        points = " ".join(
            f"{20 + (width - 40) * i / (len(curve) - 1):.1f},{20 + (height - 40) * (top - value) / (top - low):.1f}"
            for i, value in enumerate(curve)
        )
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
        lines.append(
            f'<text x="20" y="{height + 20 * index}" fill="{colour}" font-family="sans-serif" font-size="13">'
            f"{name}: ends at {curve[-1]:.4f}</text>"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "</svg>", ""]))


def runs_of(model: str) -> list[tuple[Run, list[Run]]]:
    """Each plain run, with the compressed ones that are measured against it."""
    sgd = [Run(model, "sgd", codec) for codec in CODECS] + [Run(model, "sgd", "onebit", feedback=False)]
    adam = [Run(model, "adam", codec) for codec in CODECS]
    return [(Run(model, "sgd", None), sgd), (Run(model, "adam", None), adam)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    from ringway.testing import RankPool

    fine = True
    curves: dict[str, list[float]] = {}
    with RankPool(max(options.ranks)) as pool:

        def final(run: Run, ranks: int) -> float:
            trained = [pool.run(train, run, seed, world_size=ranks, timeout=600)[0] for seed in range(options.seeds)]
            if ranks == options.ranks[0] and run.model == options.models[-1]:
                curves[str(run)] = trained[0]
            return statistics.mean(curve[-1] for curve in trained)

        for ranks in options.ranks:
            for model in options.models:
                for plain, compressed in runs_of(model):
                    target = final(plain, ranks)
                    print(f"{ranks} ranks, {plain}: {target:.4f}", flush=True)
                    for run in compressed:
                        reached = final(run, ranks)
                        apart = reached / target - 1
                        held = apart <= WITHIN if run.feedback else apart >= WORSE
                        fine &= held
                        print(f"{ranks} ranks, {run}: {reached:.4f}, {apart:+.2%}{'' if held else '   NO'}", flush=True)
    if options.plot:
        plot(curves, options.plot)
    print("all within their limits" if fine else "a limit was passed")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
