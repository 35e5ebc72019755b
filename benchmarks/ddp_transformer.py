"""The other half of ddp_step.py: a small transformer trained with DistributedDataParallel over shm and over gloo.

Both trainings start from the same parameters and see the same batches, in alternating steps. Their losses are compared
step by step. With two ranks they are equal to the last bit, because a sum of two does not depend on its order. With
more, shm adds in rank order and gloo in its ring's order, and they must agree to 1e-3.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringway.bench.runner import Candidate, Estimate, Ranks, measure, paired_ratio
from ringway.bench.table import in_ratio, in_time
from ringway.testing import RankContext

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 512, 256, 4, 4, 32, 2
BATCHES = 16
TOLERANCE = 1e-3
TOLERANT_STEPS = 20  # with different rounding, two trainings drift apart, as expected


@dataclass(frozen=True)
class Trained:
    ranks: int
    parameters: int
    seconds: dict[str, Estimate]
    ratio: Estimate
    """A step over shm relative to a step over gloo."""
    steps_compared: int
    bitwise: bool
    losses: tuple[float, float]
    """The first and the last losses that were compared."""


class Transformer(nn.Module):
    """Predicts each next token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text[:, :-1]) + self.places.weight
        x = self.layers(x, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


class Training:
    def __init__(self, model: nn.Module, group: c10d.ProcessGroup | None, batches: list[Tensor]) -> None:
        self._model = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._batches = batches
        self.losses: list[Tensor] = []

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = self._model(self._batches[len(self.losses) % len(self._batches)])
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.detach())


def compare(context: RankContext, rounds: int) -> Trained:
    context.start("shm")
    gloo, control = c10d.new_group(backend="gloo"), c10d.new_group(backend="gloo")
    torch.manual_seed(0)
    model = Transformer()
    generator = torch.Generator().manual_seed(1 + context.rank)
    batches = [torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator) for _ in range(BATCHES)]
    trainings = {"shm": Training(model, None, batches), "gloo": Training(model, gloo, batches)}
    measured = measure(
        [Candidate(name, training.step) for name, training in trainings.items()], Ranks(control), rounds=rounds
    )
    ours, theirs = (torch.stack(training.losses) for training in trainings.values())
    bitwise = context.world_size == 2
    steps = min(len(ours), len(theirs)) if bitwise else TOLERANT_STEPS
    tolerance = 0.0 if bitwise else TOLERANCE
    torch.testing.assert_close(ours[:steps], theirs[:steps], rtol=tolerance, atol=0.0)
    return Trained(
        context.world_size,
        sum(parameter.numel() for parameter in model.parameters()),
        {one.name: one.seconds for one in measured},
        paired_ratio(*measured),
        steps,
        bitwise,
        (float(ours[0]), float(ours[steps - 1])),
    )


def report(result: Trained) -> None:
    print(f"transformer, {result.ranks} ranks, {result.parameters / 1e6:.1f} M parameters, DistributedDataParallel")
    for name, seconds in result.seconds.items():
        print(f"  {name:5} {in_time(seconds.median):>9} a step ({in_time(seconds.low)} to {in_time(seconds.high)})")
    equal = "the same to the last bit" if result.bitwise else f"the same within {TOLERANCE:g}"
    print(f"  shm / gloo: {in_ratio(result.ratio)}; {result.steps_compared} losses {equal}, ", end="")
    print(f"{result.losses[0]:.3f} falling to {result.losses[1]:.3f}")
