"""Eight bits per element: a floating-point number with 4 exponent and 3 mantissa bits (e4m3), times a scale.

The largest magnitude of a block becomes 448, the largest e4m3 number. The error of an element is at most 1/16 of its
magnitude or 2**-10 times the scale, whichever is larger. Small values keep their relative precision, unlike with int8;
large ones are coarser.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.compress.codecs.scaled import RoundingCodec

DEFAULT_BLOCK = 256


class Fp8(RoundingCodec):
    """Rounded to e4m3, ties to even."""

    name = "fp8"
    code = 3
    largest = 448.0

    def __init__(self, block: int | None = DEFAULT_BLOCK) -> None:
        super().__init__(block)

    def payload_bytes(self, numel: int) -> int:
        return numel

    def pack(self, blocks: Tensor, scales: Tensor, numel: int) -> Tensor:
        codes = self.scaled(blocks, scales)[:numel].clamp_(-self.largest, self.largest)
        return codes.to(torch.float8_e4m3fn).view(torch.uint8)

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        return payload.view(torch.float8_e4m3fn).to(torch.float32)
