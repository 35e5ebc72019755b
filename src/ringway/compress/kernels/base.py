"""The steps of a compressed collective, as an interface.

Kernels work on frames (see `windows.py`) and know nothing about ranks. There are three:

- `reference`: plain torch, any device, any codec. The others are tested against it.
- `native`: fused C++ for the CPU, one pass over memory per step.
- `triton`: fused Triton for CUDA.

All write the same bytes, except for elements within rounding error of an edge. int8, int4 and fp8 scales are equal to
the bit. A onebit scale is a sum, taken in different orders, and agrees to `SCALE_TOLERANCE`.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor

from ringway.compress.codecs.codec import Codec
from ringway.compress.windows import Window

SCALE_TOLERANCE = 2.0**-17
"""Relative difference of a onebit scale between kernels: 64 units in the last place of fp32. A SIMD lane adds at most
128 numbers in fp32 before its sum is widened."""

VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RESIDUAL_DTYPES = (torch.float32, torch.bfloat16)

KERNELS_VARIABLE = "RINGWAY_COMPRESS_KERNELS"
"""Forces the choice of kernels: reference, native or triton."""


class Kernels(abc.ABC):
    """The steps of a compressed collective for one codec.

    Results beyond the range of the values' dtype are stored as its largest number.
    `values` are flat and contiguous, of `VALUE_DTYPES`; residuals likewise, of `RESIDUAL_DTYPES`, or None. Where a
    value is not finite, the residual stays unchanged and the frame's status reports it.
    """

    name: ClassVar[str]

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    @abc.abstractmethod
    def measure(self, values: Tensor, residual: Tensor | None) -> Tensor:
        """The codec's statistic of values plus residual (for codecs with one scale per tensor)."""

    @abc.abstractmethod
    def encode(
        self, values: Tensor, residual: Tensor | None, window: Window, frames: Tensor, scale: Tensor | None
    ) -> None:
        """Encode each shard's columns, plus the residual, into its frame; write the encoding error to the residual."""

    @abc.abstractmethod
    def measure_mean(self, frames: Tensor, residual: Tensor | None, count: int) -> Tensor:
        """The codec's statistic of the mean of the frames' first `count` elements, plus the residual."""

    @abc.abstractmethod
    def encode_mean(
        self, frames: Tensor, residual: Tensor | None, count: int, frame: Tensor, scale: Tensor | None
    ) -> None:
        """Encode the mean of the frames, plus the residual, into one frame; write the encoding error to the
        residual."""

    @abc.abstractmethod
    def decode(self, frames: Tensor, window: Window, values: Tensor) -> None:
        """Decode each frame into its shard's columns of `values`; NaN where a status reports non-finite values."""

    @abc.abstractmethod
    def decode_mean(self, frames: Tensor, count: int, values: Tensor) -> None:
        """Decode the mean of the frames' first `count` elements into `values`."""
