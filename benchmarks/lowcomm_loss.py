"""Where training with little communication ends: `lowcomm.py loss`.

Two tasks. Both see the same tokens with every method, and report the loss on unseen data, the mean of the last three
evaluations, when the learning rate is almost zero.

- `transformer`: the small causal transformer of `convergence.py`, which says why its task is what it is.
- `gpt`: the GPT of `examples/train_gpt.py` with 5 M parameters. It reads the source files of Python's standard library,
  byte by byte; every twentieth file is held out.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from convergence import BATCH, TASK_SEED, Transformer, final, plot, rate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

EVALUATIONS = 20
SITES = 2
LIMITS = {
    "ZeroOneAdam": ("DDP, AdamW", 0.005),
    "ZeroOneAdam, clipper 4": ("DDP, AdamW", 0.005),
    "DiLoCo, int8, every 20": ("DDP, AdamW", 0.01),
    "DiLoCo, int8, every 10": ("DDP, AdamW", 0.01),
    "DiLoCo, int8, every 20, momentum 0.5": ("DDP, AdamW", 0.01),
    "SparseLoCo, 1 %, every 15": ("DDP, AdamW", 0.01),
    "SparseLoCo, 3 %, every 10": ("DDP, AdamW", 0.01),
    "SparseLoCo, 10 %, every 5": ("DDP, AdamW", 0.01),
    "Streaming DiLoCo, int4, every 20": ("DDP, AdamW", 0.01),
    "Streaming DiLoCo, int4, every 20, momentum 0.5": ("DDP, AdamW", 0.01),
    "OneBitLamb": ("LAMB", 0.005),
}
"""By method: what it is held to, and how far it may end above it. `_settings` reads the names."""


class Task(Protocol):
    steps: int
    rate: float
    model: nn.Module

    def loss(self, generator: torch.Generator) -> Tensor:
        """Of this rank's share of a batch."""

    def evaluate(self) -> float:
        """The loss on unseen data."""


class SmallTransformer:
    steps, rate = 800, 3e-3

    def __init__(self, device: str) -> None:
        self.model = Transformer().to(device)
        self._held_out = self.model.draw(torch.Generator().manual_seed(TASK_SEED), self.model.evaluated).to(device)

    def loss(self, generator: torch.Generator) -> Tensor:
        drawn = self.model.draw(generator, BATCH["transformer"] // SITES)
        return self.model.loss(drawn.to(self._held_out.device))

    def evaluate(self) -> float:
        return self.model.loss(self._held_out).item()


class Gpt:
    steps, rate = 2000, 1e-3
    context, width, heads, blocks, batch = 128, 256, 8, 6, 64

    def __init__(self, device: str) -> None:
        from train_gpt import GPT

        self.model = GPT(256, self.context, self.width, self.heads, self.blocks).to(device)
        self._read, held_out = (part.to(device) for part in standard_library())
        starts = torch.arange(0, len(held_out) - self.context - 1, (len(held_out) - self.context - 1) // 512)
        self._held_out = _windows(held_out, starts[:512].to(device), self.context)

    def loss(self, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(self._read) - self.context - 1, (self.batch // SITES,), generator=generator)
        return self._loss_of(_windows(self._read, starts.to(self._read.device), self.context))

    def evaluate(self) -> float:
        return statistics.mean(self._loss_of(part).item() for part in self._held_out.split(64))

    def _loss_of(self, tokens: Tensor) -> Tensor:
        predicted = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten())


TASKS: dict[str, Any] = {"transformer": SmallTransformer, "gpt": Gpt}


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()


@cache
def standard_library() -> tuple[Tensor, Tensor]:
    """The bytes to train on, and those to evaluate on."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts and path.stat().st_size)
    parts = (b"".join(path.read_bytes() for i, path in enumerate(files) if (i % 20 == 0) == out) for out in (0, 1))
    read, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return read, held_out


def _settings(method: str) -> tuple[str, dict[str, str]]:
    """A method's name and settings: "every 20" sets `every`, "3 %" the share of entries, and "int8" the codec."""
    name, *words = method.split(", ")
    pairs = [word.split() if " " in word else ["codec", word] for word in words]
    return name, {("share" if pair[1] == "%" else pair[0]): pair[0 if pair[1] == "%" else 1] for pair in pairs}


def optimizer_of(method: str, task: Task, steps: int, pair: Any) -> torch.optim.Optimizer:
    from ringway.compress import OneBitLamb, ZeroOneAdam
    from ringway.lowcomm import DiLoCo, SparseLoCo

    options: dict[str, Any] = {"lr": task.rate, "betas": (0.9, 0.98)}
    parameters = task.model.parameters()
    name, settings = _settings(method)
    every = int(settings.get("every", 1))
    if name == "ZeroOneAdam":
        clipper = int(settings.get("clipper", 16))
        local: dict[str, Any] = {"local_step_scaler": steps // 8, "local_step_clipper": clipper, "group": pair}
        return ZeroOneAdam(parameters, var_freeze_step=steps // 4, **local, **options)
    if name in ("LAMB", "OneBitLamb"):
        options["lr"] = 3 * task.rate
        frozen = steps // 4 if name == "OneBitLamb" else steps
        return OneBitLamb(parameters, freeze_step=frozen, group=pair, **options)
    inner = torch.optim.AdamW(parameters, weight_decay=0.0, **options)
    if name.endswith("DiLoCo"):
        momentum = float(settings.get("momentum", 0.9))

        def outer(anchors: list[Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(anchors, lr=0.7, momentum=momentum, nesterov=True)

        streams = {"fragments": 4, "delay": 2} if name.startswith("Streaming") else {}
        return DiLoCo(task.model, inner, outer, every=every, codec=settings["codec"], group=pair, **streams)
    if name == "SparseLoCo":
        codec = f"topk:{float(settings['share']) / 100}:2"
        return SparseLoCo(task.model, inner, every=every, codec=codec, group=pair)
    return inner


def train(site: int, dist: Any, pair: Any, method: str, task: Task, seed: int, steps: int) -> list[float]:
    """The loss on unseen data, at equal intervals over the run; on site 0."""
    model = task.model
    optimizer = optimizer_of(method, task, steps, pair)
    inner = optimizer.inner_optimizers[0] if hasattr(optimizer, "inner_optimizers") else optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: rate(step, steps))
    generator = torch.Generator().manual_seed(1000 * seed + site)
    curve = []
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(generator).backward()
        if method == "DDP, AdamW":
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, dist.ReduceOp.AVG, group=pair)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view(gradient.shape))
        optimizer.step()
        schedule.step()
        if site == 0 and (step + 1) % (steps // EVALUATIONS) == 0:
            model.eval()
            with torch.no_grad():
                curve.append(task.evaluate())
            model.train()
    for one in (optimizer, getattr(optimizer, "feedback", None)):
        if hasattr(one, "close"):
            one.close()
    return curve


def train_seeds(
    context: Any, backend: str, task: str, device: str, method: str, seeds: list[int], steps: int
) -> list[list[float]]:
    """Each pair of ranks trains its share of the seeds, one after the other."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    if device == "cuda":
        torch.cuda.set_device(0)
    dist = context.start(backend)
    pairs = context.world_size // SITES
    pair = dist.new_subgroups(SITES)[0]
    curves = []
    for seed in seeds[context.rank // SITES :: pairs]:
        torch.manual_seed(seed)
        site = context.rank % SITES
        curves.append(train(site, dist, pair, method, TASKS[task](device), seed, steps))
    return curves


def show_loss(
    task: str,
    *,
    device: str,
    backend: str,
    pairs: int,
    seeds: int,
    steps: int | None,
    path: Path | None,
    only: Sequence[str],
) -> bool:
    from ringway.testing import RankPool

    steps = steps or TASKS[task].steps
    chosen = [method for method in LIMITS if any(word in method for word in only or [""])]
    methods = list(dict.fromkeys(one for method in chosen for one in (LIMITS[method][0], method)))
    trained: dict[str, list[list[float]]] = {}
    fine = True
    with RankPool(SITES * pairs) as pool:
        for method in methods:
            arguments = (backend, task, device, method, list(range(seeds)), steps)
            found = pool.run(train_seeds, *arguments, world_size=SITES * pairs, timeout=3600)[::SITES]
            trained[method] = curves = [curve for curves in found for curve in curves]
            ends = " ".join(f"{statistics.mean(curve[-3:]):.4f}" for curve in curves)
            line = f"{method:46} {final(curves):.4f}   seeds {ends}"
            if method in LIMITS:
                baseline, most = LIMITS[method]
                apart = final(curves) / final(trained[baseline]) - 1
                fine &= apart <= most
                line += f"   {apart:+.2%} of {baseline} (at most {most:.1%}){'' if apart <= most else '   NO'}"
            print(line, flush=True)
    if path is not None:
        groups = {
            "AdamW": [m for m in methods if "amb" not in m.lower()],
            "LAMB": [m for m in methods if "amb" in m.lower()],
        }
        plot(
            {f"{task}, {name}, 2 sites": {m: trained[m][0] for m in some} for name, some in groups.items() if some},
            path,
        )
    return fine
