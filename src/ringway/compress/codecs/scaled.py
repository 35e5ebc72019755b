"""What the built-in codecs share: a scale per block, or one per tensor, before a payload of small codes.

The message of `n` elements is ceil(n / block) scales (fp32, little endian), then the payload. With one scale per
tensor, the message carries that one scale. Blocks end with the tensor, so the last block may be shorter.

A scale below the smallest normal fp32 number is sent as zero and decodes to zeros, because its reciprocal would not be
finite. With error feedback the values are not lost: they stay in the residual.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ringway.compress.codecs.codec import Codec
from ringway.errors import UsageError

SCALE_BYTES = 4
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class ScaledCodec(Codec):
    """A codec whose message is scales and a payload. A `block` of None means one scale per tensor."""

    code: ClassVar[int]
    """The codec's number in the native core and the Triton kernels."""

    def __init__(self, block: int | None) -> None:
        if block is not None and (block < 8 or block % 8):
            raise UsageError(f"codec '{self.name}': a block must be a multiple of 8 elements, got {block}")
        self.block = block
        self.tensor_scale = block is None
        self.granule = block or 8

    @property
    def native_format(self) -> tuple[int, int, int]:
        return self.code, self.block or 0, 0

    @property
    def spec(self) -> str:
        return f"{self.name}:{'tensor' if self.block is None else self.block}"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, ScaledCodec) and other.block == self.block

    def __hash__(self) -> int:
        return hash((type(self), self.block))

    def scale_count(self, numel: int) -> int:
        """The number of scales in a message of `numel` elements."""
        if self.block is None or numel == 0:
            return min(1, numel)
        return -(-numel // self.block)

    @abc.abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """The length of the payload of `numel` elements."""

    @abc.abstractmethod
    def block_scales(self, blocks: Tensor, counts: Tensor) -> Tensor:
        """The scale of each row of `blocks`. `counts` elements of a row are real, the rest are zero."""

    @abc.abstractmethod
    def pack(self, blocks: Tensor, scales: Tensor, numel: int) -> Tensor:
        """The payload (uint8) of the first `numel` elements, each row with its own scale."""

    @abc.abstractmethod
    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        """The codes of `numel` elements as fp32. A value is its code times its scale."""

    def nbytes(self, numel: int) -> int:
        return SCALE_BYTES * self.scale_count(numel) + self.payload_bytes(numel)

    def encode(self, values: Tensor, message: Tensor, scale: Tensor | None = None) -> None:
        numel = values.numel()
        if numel == 0:
            return
        blocks = self._as_blocks(values)
        if scale is None and self.block is None:
            scale = self.scale(self.measure(values), numel)
        if scale is None:
            scales = self.block_scales(blocks, self._counts(numel, values.device))
        else:
            scales = scale.reshape(1).to(torch.float32)
        scales = torch.where(scales < SMALLEST_SCALE, torch.zeros_like(scales), scales)
        head = SCALE_BYTES * scales.numel()
        message[:head].copy_(scales.view(torch.uint8))
        message[head : self.nbytes(numel)].copy_(self.pack(blocks, scales, numel))

    def decode(self, message: Tensor, values: Tensor) -> None:
        if values.numel():
            values.copy_(self._decoded(message, values.numel(), 1.0))

    def decode_accumulate(self, message: Tensor, accumulator: Tensor, factor: float = 1.0) -> None:
        if accumulator.numel():
            accumulator.add_(self._decoded(message, accumulator.numel(), factor))

    def _decoded(self, message: Tensor, numel: int, factor: float) -> Tensor:
        count = self.scale_count(numel)
        scales = message[: SCALE_BYTES * count].clone().view(torch.float32)
        codes = self.unpack(message[SCALE_BYTES * count : self.nbytes(numel)], numel)
        return (self._as_blocks(codes) * (scales * factor).unsqueeze(1)).flatten()[:numel]

    def _as_blocks(self, values: Tensor) -> Tensor:
        if self.block is None:
            return values.unsqueeze(0)
        missing = -values.numel() % self.block
        if missing:
            values = torch.nn.functional.pad(values, (0, missing))
        return values.view(-1, self.block)

    def _counts(self, numel: int, device: torch.device) -> Tensor:
        assert self.block is not None
        counts = torch.full((self.scale_count(numel),), float(self.block), device=device)
        counts[-1] -= -numel % self.block
        return counts


class RoundingCodec(ScaledCodec):
    """A scaled codec whose codes are numbers up to `largest`, the code of a block's largest magnitude."""

    largest: ClassVar[float]

    def block_scales(self, blocks: Tensor, counts: Tensor) -> Tensor:
        return self._from_peak(blocks.abs().amax(dim=1))

    def measure(self, values: Tensor) -> Tensor:
        return values.abs().amax()

    def merge(self, statistics: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(statistics)).amax()

    def scale(self, statistic: Tensor, numel: int) -> Tensor:
        return self._from_peak(statistic)

    def _from_peak(self, peak: Tensor) -> Tensor:
        # A multiplication, not a division: every compiler produces the same bits.
        return peak * torch.tensor(1.0 / self.largest, dtype=torch.float32, device=peak.device)

    @staticmethod
    def scaled(blocks: Tensor, scales: Tensor) -> Tensor:
        """The values in units of their scale, flattened; zero where the scale is zero."""
        inverse = torch.where(scales > 0, 1.0 / scales, torch.zeros_like(scales))
        return (blocks * inverse.unsqueeze(1)).flatten()
