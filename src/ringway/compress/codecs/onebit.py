"""One bit per element: its sign, times a scale.

The bit order is fixed: the first element is the most significant bit of the first byte (as in numpy.packbits and
DeepSpeed). 1 stands for zero and above, 0 for below zero. Bits past the end are 0.

There are two kinds of scale:

- One per tensor, the root mean square: 1-bit Adam as published, and as in DeepSpeed. It needs a pass over the tensor
  before the bits can be written.
- One per block, the mean magnitude: the scale with the least squared error, found in the same pass. The error never
  exceeds the values: |c - decode(encode(c))|_2 <= |c|_2 in every block. The root mean square does not guarantee that
  (a single large value makes it double the error).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ringway.compress.codecs.scaled import ScaledCodec

DEFAULT_BLOCK = 1024


class OneBit(ScaledCodec):
    """Sign and scale."""

    name = "onebit"
    code = 0

    def __init__(self, block: int | None = DEFAULT_BLOCK) -> None:
        super().__init__(block)

    def payload_bytes(self, numel: int) -> int:
        return -(-numel // 8)

    def block_scales(self, blocks: Tensor, counts: Tensor) -> Tensor:
        return blocks.abs().sum(dim=1) / counts

    def measure(self, values: Tensor) -> Tensor:
        # In double precision: summed in fp32, the norm of a long tensor is wrong in the fifth digit.
        return torch.linalg.vector_norm(values, dtype=torch.float64).to(torch.float32)

    def merge(self, statistics: Sequence[Tensor]) -> Tensor:
        if len(statistics) == 1:
            return statistics[0]
        return torch.linalg.vector_norm(torch.stack(list(statistics)), dtype=torch.float64).to(torch.float32)

    def scale(self, statistic: Tensor, numel: int) -> Tensor:
        return statistic / math.sqrt(numel)

    def pack(self, blocks: Tensor, scales: Tensor, numel: int) -> Tensor:
        return pack_bits(blocks.flatten()[:numel] >= 0)

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        return unpack_bits(payload, numel).to(torch.float32).mul_(2.0).sub_(1.0)


def pack_bits(bits: Tensor) -> Tensor:
    """Eight booleans per byte, the first one highest."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    packed = torch.zeros(padded.shape[0], dtype=torch.uint8, device=bits.device)
    for place in range(8):
        packed |= padded[:, place] << (7 - place)
    return packed


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The first `numel` bits of `packed`, as uint8 zeros and ones."""
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> places) & 1).flatten()[:numel]
