"""The steps of a compressed collective in fused C++, for CPU tensors and the built-in codecs."""

from __future__ import annotations

import torch
from torch import Tensor

import ringway._core as _core
from ringway.call import DTYPE_CODE
from ringway.compress.codecs.codec import Codec
from ringway.compress.kernels.base import Kernels
from ringway.compress.windows import Window

_NO_ARRAY = (0, DTYPE_CODE[torch.float32])


def _array(tensor: Tensor | None) -> tuple[int, int]:
    return _NO_ARRAY if tensor is None else (tensor.data_ptr(), DTYPE_CODE[tensor.dtype])


def _window(window: Window) -> tuple[int, int, int, int]:
    return window.numel, window.shard, window.start, window.stop


def _frames(frames: Tensor) -> tuple[int, int, int]:
    return frames.data_ptr(), frames.stride(0), frames.shape[0]


def _scalar(scale: Tensor | None) -> float:
    return 0.0 if scale is None else float(scale)


class NativeKernels(Kernels):
    """One pass over memory per step, on as many threads as torch may use."""

    name = "native"

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        assert codec.native_format is not None
        self._format = codec.native_format

    @staticmethod
    def unfit(codec: Codec, device: torch.device) -> str | None:
        """The reason why these kernels cannot serve this codec on this device; None if they can."""
        if device.type != "cpu":
            return "they support CPU tensors only"
        if codec.native_format is None:
            return "they support the built-in codecs only"
        return None

    def measure(self, values: Tensor, residual: Tensor | None) -> Tensor:
        threads = torch.get_num_threads()
        return torch.tensor(
            _core.pack_measure(self._format, _array(values), _array(residual), values.numel(), threads),
            dtype=torch.float32,
        )

    def encode(
        self, values: Tensor, residual: Tensor | None, window: Window, frames: Tensor, scale: Tensor | None
    ) -> None:
        _core.pack_encode(
            self._format,
            _array(values),
            _array(residual),
            _window(window),
            _frames(frames),
            _scalar(scale),
            torch.get_num_threads(),
        )

    def measure_mean(self, frames: Tensor, residual: Tensor | None, count: int) -> Tensor:
        threads = torch.get_num_threads()
        return torch.tensor(
            _core.pack_measure_mean(self._format, _frames(frames), _array(residual), count, threads),
            dtype=torch.float32,
        )

    def encode_mean(
        self, frames: Tensor, residual: Tensor | None, count: int, frame: Tensor, scale: Tensor | None
    ) -> None:
        _core.pack_encode_mean(
            self._format,
            _frames(frames),
            _array(residual),
            count,
            frame.data_ptr(),
            _scalar(scale),
            torch.get_num_threads(),
        )

    def decode(self, frames: Tensor, window: Window, values: Tensor) -> None:
        _core.pack_decode(self._format, _frames(frames), _window(window), _array(values), torch.get_num_threads())

    def decode_mean(self, frames: Tensor, count: int, values: Tensor) -> None:
        _core.pack_decode_mean(self._format, _frames(frames), count, _array(values), torch.get_num_threads())
