"""The steps of a compressed collective in fused Triton, for CUDA tensors and the built-in codecs.

With TRITON_INTERPRET=1, Triton interprets the same kernels on the CPU: slow, but it allows testing them without a GPU.
Kernels are enqueued on the current stream; nothing here waits for the device.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringway.compress.codecs.codec import Codec
from ringway.compress.codecs.scaled import RoundingCodec, ScaledCodec
from ringway.compress.kernels.base import Kernels
from ringway.compress.windows import Window

TILE = 2048
"""Elements that one program encodes or decodes."""
MEAN_TILE = 1024
"""Elements of an average that one program encodes, with fewer threads: the best of the values tried on an H200."""
MEASURE_TILE = 8192
"""Elements that one program sums. It can take more because it keeps nothing."""
LARGEST_BLOCK = 16384
"""A block must fit in the registers of one program."""
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""A fused multiply-add skips the rounding of the product. The mean of the frames would then differ from the reference's
in its last bit, and with it the scale of a block."""


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _device_code() -> ModuleType:
    from ringway.compress.kernels import triton_kernels

    return triton_kernels


def _statistics_code() -> ModuleType:
    from ringway.compress.kernels import triton_statistics

    return triton_statistics


def _views(frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return frames, frames.view(torch.float32), frames.view(torch.int32)


def rows(frames: Tensor) -> tuple[int, float, int]:
    """What a kernel needs to average the frames: their number, its reciprocal, and the distance between them."""
    return frames.shape[0], 1.0 / frames.shape[0], frames.stride(0)


def extent(frames: Tensor, window: Window) -> tuple[int, int, int, int, int]:
    """What a kernel needs to find the elements of a window, and the frames they belong to."""
    return frames.stride(0), window.numel, window.shard, window.start, window.stop


def grid(tile: int, columns: int, rows: int = 1) -> tuple[int, int]:
    """One program for each tile of each row."""
    return -(-columns // tile), rows


def _tiled(block: int | None, least: int) -> tuple[int, dict[str, Any]]:
    """Number of elements per program, at least `least`, and how they are split into blocks."""
    length = block or least
    tile = max(length, least)
    return tile, {"GROUPS": tile // length, "BLOCK": length, "SHARED": block is None}


class TritonKernels(Kernels):
    """One pass over memory per step, enqueued on the current stream."""

    name = "triton"

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        assert isinstance(codec, ScaledCodec)
        loss = {"LARGEST_INVERSE": 1.0 / codec.largest if isinstance(codec, RoundingCodec) else 0.0}
        self._kind: dict[str, Any] = {"KIND": codec.code, **EXACT}
        self._tile, shape = _tiled(codec.block, TILE)
        self._shape: dict[str, Any] = {**self._kind, **shape}
        self._lossy: dict[str, Any] = {**self._shape, **loss}
        self._mean_tile, mean_shape = _tiled(codec.block, MEAN_TILE)
        warps = 2 if self._mean_tile == MEAN_TILE else 4
        self._lossy_mean: dict[str, Any] = {**self._kind, **mean_shape, **loss, "num_warps": warps}

    @staticmethod
    def unfit(codec: Codec, device: torch.device) -> str | None:
        """The reason why these kernels cannot serve this codec on this device; None if they can."""
        if not isinstance(codec, ScaledCodec):
            return "they support the built-in codecs only"
        block = codec.block or TILE
        if block & (block - 1) or block > LARGEST_BLOCK:
            return f"a block must be a power of two of at most {LARGEST_BLOCK} elements"
        return TritonKernels.unavailable(device)

    @staticmethod
    def unavailable(device: torch.device) -> str | None:
        """The reason why Triton cannot serve this device; None if it can."""
        if device.type != "cuda" and not interpreted():
            return "they support CUDA tensors only"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return None

    def measure(self, values: Tensor, residual: Tensor | None) -> Tensor:
        count = values.numel()
        return self._statistic(_statistics_code().measure, (values,), residual, (count,), count)

    def encode(
        self, values: Tensor, residual: Tensor | None, window: Window, frames: Tensor, scale: Tensor | None
    ) -> None:
        _device_code().encode[grid(self._tile, window.columns, frames.shape[0])](
            values,
            residual,
            *_views(frames),
            scale,
            *extent(frames, window),
            **self._lossy,
            HAS_RESIDUAL=residual is not None,
        )

    def measure_mean(self, frames: Tensor, residual: Tensor | None, count: int) -> Tensor:
        sizes = (*rows(frames), count)
        return self._statistic(_statistics_code().measure_mean, _views(frames), residual, sizes, count)

    def encode_mean(
        self, frames: Tensor, residual: Tensor | None, count: int, frame: Tensor, scale: Tensor | None
    ) -> None:
        if count == 0:
            return
        _device_code().encode_mean[grid(self._mean_tile, count)](
            *_views(frames),
            residual,
            *_views(frame),
            scale,
            *rows(frames),
            count,
            **self._lossy_mean,
            HAS_RESIDUAL=residual is not None,
        )

    def decode(self, frames: Tensor, window: Window, values: Tensor) -> None:
        _device_code().decode[grid(self._tile, window.columns, frames.shape[0])](
            *_views(frames),
            values,
            *extent(frames, window),
            **self._shape,
        )

    def decode_mean(self, frames: Tensor, count: int, values: Tensor) -> None:
        if count == 0:
            return
        _device_code().decode_mean[grid(self._tile, count)](
            *_views(frames), values, *rows(frames), count, **self._shape
        )

    def _statistic(
        self, kernel: Any, sources: tuple[Tensor, ...], residual: Tensor | None, sizes: tuple[float, ...], count: int
    ) -> Tensor:
        """The statistic of `count` elements of the sources plus the residual."""
        programs = -(-count // MEASURE_TILE)
        statistics = torch.empty(programs, dtype=torch.float32, device=sources[0].device)
        shape = {"GROUPS": 1, "BLOCK": MEASURE_TILE, "HAS_RESIDUAL": residual is not None, "num_warps": 8}
        kernel[(programs,)](*sources, residual, statistics, *sizes, **self._kind, **shape)
        if isinstance(self.codec, RoundingCodec):
            # Compared as bits: NaN and infinity are above every number, so they are not lost.
            peak = statistics.view(torch.int32).amax()
            return peak.reshape(1).view(torch.float32).reshape(())
        return statistics.sum().sqrt()
