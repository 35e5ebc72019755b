"""Four bits per element: an integer from -7 to 7, times a scale.

Two elements per byte, the first in the upper half. A half stores the integer plus 8, so 0 occurs only as padding. The
error of an element is at most half the scale, which is peak / 14, plus an fp32 rounding error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.compress.codecs.scaled import RoundingCodec

DEFAULT_BLOCK = 128
OFFSET = 8


class Int4(RoundingCodec):
    """Rounded to a 15-step scale, ties to even."""

    name = "int4"
    code = 2
    largest = 7.0

    def __init__(self, block: int | None = DEFAULT_BLOCK) -> None:
        super().__init__(block)

    def payload_bytes(self, numel: int) -> int:
        return -(-numel // 2)

    def pack(self, blocks: Tensor, scales: Tensor, numel: int) -> Tensor:
        codes = self.scaled(blocks, scales)[:numel].round_().clamp_(-self.largest, self.largest)
        halves = torch.nn.functional.pad((codes + OFFSET).to(torch.uint8), (0, numel % 2))
        return (halves[0::2] << 4) | halves[1::2]

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        halves = torch.stack((payload >> 4, payload & 15), dim=1).flatten()[:numel]
        return halves.to(torch.float32) - OFFSET
