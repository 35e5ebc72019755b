"""Eight bits per element: a signed integer from -127 to 127, times a scale.

The largest magnitude of a block becomes 127, so the error of an element is at most half the scale, which is
peak / 254, plus an fp32 rounding error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.compress.codecs.scaled import RoundingCodec

DEFAULT_BLOCK = 256


class Int8(RoundingCodec):
    """Rounded to a 255-step scale, ties to even."""

    name = "int8"
    code = 1
    largest = 127.0

    def __init__(self, block: int | None = DEFAULT_BLOCK) -> None:
        super().__init__(block)

    def payload_bytes(self, numel: int) -> int:
        return numel

    def pack(self, blocks: Tensor, scales: Tensor, numel: int) -> Tensor:
        codes = self.scaled(blocks, scales)[:numel].round_().clamp_(-self.largest, self.largest)
        return codes.to(torch.int8).view(torch.uint8)

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        return payload.view(torch.int8).to(torch.float32)
