"""Train a small GPT on generated text, on any number of ranks.

    python examples/train_gpt.py                                            # one rank
    ringway run -n 2 examples/train_gpt.py                                  # gradients averaged over two ranks
    ringway run -n 2 examples/train_gpt.py --model-parallel 2               # layers split over two ranks
    ringway run -n 4 examples/train_gpt.py --model-parallel 2 --sequence    # both, and norms split along the sequence
    ringway run -n 2 examples/train_gpt.py --model-parallel 2 --compile     # the split model in one graph
    ringway run -n 2 examples/train_gpt.py --codec int8                     # gradients in a quarter of the bytes

All of them print the same losses, except for rounding (and for the codec), because they divide the same batches.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

import ringway
from ringway.parallel import Column, Row, ScatterOutput, vocabulary_parallel_cross_entropy

LETTERS = "\nabcdefghijklmnopqrstuvwxyz .,"


def made_up_text(sentences: int, seed: int) -> str:
    """Sentences of a small grammar, so that there is something to learn and nothing to download."""
    chance = random.Random(seed)
    things = ["fox", "river", "lantern", "sailor", "garden", "letter", "mountain", "bridge"]
    kinds = ["quiet", "red", "patient", "distant", "hollow", "bright"]
    deeds = ["follows", "remembers", "crosses", "answers", "carries", "forgets"]

    def phrase() -> str:
        return f"the {chance.choice(kinds)} {chance.choice(things)}"

    made = []
    for _ in range(sentences):
        sentence = f"{phrase()} {chance.choice(deeds)} {phrase()}"
        if chance.random() < 0.3:
            sentence += f", and {phrase()} {chance.choice(deeds)} it"
        made.append(sentence + ".\n")
    return "".join(made)


class Attention(nn.Module):
    """Causal attention. The number of heads follows from the projection's width, which is smaller if it is split."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, letters: int, context: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(letters, width)
        self.positions = nn.Embedding(context, width)
        self.embedded = nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.embedded(self.tokens(numbers) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plan(sequence: bool) -> dict[str, Any]:
    """Which layers are split, and how. With `sequence`, activations between them are split along the sequence."""
    along = 1 if sequence else None
    layers: dict[str, Any] = {
        "tokens": "vocabulary",
        "blocks.*.attention.qkv": Column(parts=3, sequence_dim=along),
        "blocks.*.attention.out": Row(sequence_dim=along),
        "blocks.*.up": Column(sequence_dim=along),
        "blocks.*.down": Row(sequence_dim=along),
        "head": Column(sequence_dim=along),
    }
    if sequence:
        layers |= {"embedded": ScatterOutput(dim=1), "blocks.*.norm*": "sequence_norm", "norm": "sequence_norm"}
    return layers


def batches(text: Tensor, count: int, batch: int, context: int, seed: int) -> Any:
    """The same batches on every rank; each rank takes its share."""
    chance = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - context - 1, (batch,), generator=chance).tolist()
        yield torch.stack([text[start : start + context + 1] for start in starts])


def train(options: argparse.Namespace) -> list[float]:
    torch.manual_seed(options.seed)
    model = GPT(len(LETTERS), options.context, options.width, options.heads, options.blocks)
    with ringway.initialize(
        {"comms_logger": {"enabled": True}},
        model,
        plan=plan(options.sequence) if options.model_parallel > 1 else None,
        model_parallel_size=options.model_parallel,
        codec=options.codec,
        backend=options.backend,
    ) as runtime:
        losses = _train(model, runtime, options)
        ringway.log_summary()
        weights = runtime.full_state_dict()
        if options.save and ringway.get_rank() == 0:
            torch.save(weights, options.save)
    return losses


def _train(model: nn.Module, runtime: Any, options: argparse.Namespace) -> list[float]:
    data_ranks, place = ringway.get_world_size(runtime.data_group), ringway.get_rank(runtime.data_group)
    if options.batch % data_ranks:
        raise SystemExit(f"--batch {options.batch} cannot be divided evenly over {data_ranks} ranks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    called = torch.compile(model, fullgraph=True) if options.compile else model
    text = torch.tensor([LETTERS.index(letter) for letter in made_up_text(2000, options.seed)])
    losses = []
    begun = time.perf_counter()
    for step, batch in enumerate(batches(text, options.steps, options.batch, options.context, options.seed)):
        own = batch.chunk(data_ranks)[place]
        logits = called(own[:, :-1])
        loss = vocabulary_parallel_cross_entropy(logits, own[:, 1:], group=runtime.model_group, vocabulary=len(LETTERS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        ringway.all_reduce(mean, ringway.ReduceOp.AVG, group=runtime.data_group, log_name="loss")
        losses.append(mean.item())
        if ringway.get_rank() == 0 and (step % options.every == 0 or step == options.steps - 1):
            letters = (step + 1) * options.batch * options.context / (time.perf_counter() - begun)
            print(f"step {step:4}  loss {losses[-1]:.4f}  {letters:,.0f} letters/s", flush=True)
    return losses


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-parallel", type=int, default=1, help="ranks over which layers are split")
    parser.add_argument("--sequence", action="store_true", help="with --model-parallel: split norms along the sequence")
    parser.add_argument("--compile", action="store_true", help="compile the model, in one graph")
    parser.add_argument("--codec", help="compress gradients: int8, fp8, int4, onebit, auto")
    parser.add_argument("--backend", help="shm, gloo, mpi, nccl; by default ringway chooses")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks together")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=10, help="steps between printed lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="file to which rank 0 writes the whole weights")
    options = parser.parse_args(arguments)
    parts = options.model_parallel
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not divisible by --heads {options.heads}")
    if parts < 1 or options.heads % parts:
        parser.error(f"--heads {options.heads} cannot be split over --model-parallel {parts}")
    if options.sequence and (parts == 1 or options.context % parts):
        parser.error(f"--sequence needs a --model-parallel that divides --context {options.context}, not {parts}")
    return options


if __name__ == "__main__":
    train(parsed())
