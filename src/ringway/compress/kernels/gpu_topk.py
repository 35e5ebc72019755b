"""The steps of a compressed collective with `topk` in fused Triton, for CUDA tensors."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringway.compress.codecs.codec import Codec
from ringway.compress.codecs.topk import CHUNK, TopK
from ringway.compress.kernels.base import Kernels
from ringway.compress.kernels.gpu import EXACT, TritonKernels, extent, grid, rows
from ringway.compress.windows import HEADER_BYTES, Window


def _device_code() -> ModuleType:
    from ringway.compress.kernels import triton_topk

    return triton_topk


_ENCODING = {"num_warps": 8, "maxnreg": 80}
"""Three such programs fit a multiprocessor at a time, so some compute while others wait."""


class TritonTopK(Kernels):
    """One program for each chunk, enqueued on the current stream."""

    name = TritonKernels.name

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        assert isinstance(codec, TopK)
        self._shape: dict[str, Any] = {
            "KEPT": codec.kept,
            "BITS": codec.bits,
            "RECORD": codec.nbytes(CHUNK),
            "num_warps": 8,
            **EXACT,
        }
        # The unary part of a record has less than 3 bits for each kept element.
        self._decoding = {**self._shape, "UNARY": 1 << (3 * codec.kept - 1).bit_length()}

    @staticmethod
    def unfit(codec: Codec, device: torch.device) -> str | None:
        """The reason why these kernels cannot serve this codec on this device; None if they can."""
        return TritonKernels.unavailable(device)

    def measure(self, values: Tensor, residual: Tensor | None) -> Tensor:
        raise NotImplementedError("topk has no scale")

    def measure_mean(self, frames: Tensor, residual: Tensor | None, count: int) -> Tensor:
        raise NotImplementedError("topk has no scale")

    def encode(
        self, values: Tensor, residual: Tensor | None, window: Window, frames: Tensor, scale: Tensor | None
    ) -> None:
        self._encode(values, residual, window, frames, None)

    def encode_mean(
        self, frames: Tensor, residual: Tensor | None, count: int, frame: Tensor, scale: Tensor | None
    ) -> None:
        if count == 0:
            return
        mean = torch.empty(count, dtype=torch.float32, device=frames.device)
        self.decode_mean(frames, count, mean)
        self._encode(mean, residual, Window(count, count, 0, count), frame.unsqueeze(0), frames)

    def _encode(
        self, values: Tensor, residual: Tensor | None, window: Window, frames: Tensor, sources: Tensor | None
    ) -> None:
        frames[:, HEADER_BYTES:].zero_()
        kept, programs = self._shape["KEPT"], grid(CHUNK, window.columns, frames.shape[0])
        _device_code().encode[programs](
            values,
            residual,
            frames,
            frames.view(torch.int32),
            torch.empty(2 * kept * math.prod(programs), dtype=torch.int32, device=frames.device),
            None if sources is None else sources.view(torch.int32),
            0 if sources is None else sources.stride(0),
            *extent(frames, window),
            SOURCES=0 if sources is None else sources.shape[0],
            ALIGNED=window.shard % 16 == 0 and window.start % 16 == 0,
            LANES=1 << (kept - 1).bit_length(),
            HAS_RESIDUAL=residual is not None,
            **{**self._shape, **_ENCODING},
        )

    def decode(self, frames: Tensor, window: Window, values: Tensor) -> None:
        _device_code().decode[grid(CHUNK, window.columns, frames.shape[0])](
            frames,
            frames.view(torch.int32),
            values,
            *extent(frames, window),
            **self._decoding,
        )

    def decode_mean(self, frames: Tensor, count: int, values: Tensor) -> None:
        if count == 0:
            return
        sums = values if values.dtype == torch.float32 else torch.empty(count, device=values.device)
        _device_code().decode_mean[grid(CHUNK, count)](
            frames,
            frames.view(torch.int32),
            sums,
            values,
            *rows(frames),
            count,
            **self._decoding,
        )
