"""Models for the tests of parallel training."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal attention that derives the number of heads from its input, so that it can be split."""

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


class TinyGPT(nn.Module):
    """A GPT with a tied head. `checkpoints` is None, or whether activation checkpoints are reentrant."""

    def __init__(
        self, vocabulary: int = 33, width: int = 16, heads: int = 4, blocks: int = 2, checkpoints: bool | None = None
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(32, width)
        self.drop = nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpoints = checkpoints

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.drop(self.tokens(numbers) + self.positions(places))
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        return self.head(self.norm(x))


class RandomNet(nn.Module):
    """Layers used in a random order: some shared, some frozen, some unused, of several sizes."""

    def __init__(self, seed: int, *, unused: bool) -> None:
        super().__init__()
        chance = random.Random(seed)
        width = chance.choice([4, 7, 16])
        count = chance.randint(4, 8)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=chance.random() < 0.7) for _ in range(count))
        self.scales = nn.ParameterList(torch.randn(width) for _ in range(chance.randint(0, 2)))
        self.order = list(range(count))
        chance.shuffle(self.order)
        if unused:
            self.order = self.order[: count // 2 + 1]
        self.order += chance.sample(self.order, chance.randint(0, 2))  # used twice
        if chance.random() < 0.5:
            self.layers[self.order[0]].weight = self.layers[self.order[1]].weight
        if chance.random() < 0.5:
            self.layers[self.order[2]].requires_grad_(False)
        self.width = width

    def forward(self, x: Tensor, extra: int | None = None) -> Tensor:
        for place in self.order if extra is None else [*self.order, extra]:
            x = torch.tanh(self.layers[place](x)) + x
        for scale in self.scales:
            x = x * scale
        return x
