"""The steps of a compressed collective in plain torch: short, slow, and the standard for the fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.compress.kernels.base import Kernels
from ringway.compress.windows import Window, body, statuses

NOT_FINITE = 1


def compensated(values: Tensor, residual: Tensor | None) -> Tensor:
    """Values plus the residual, as a new fp32 tensor."""
    total = values.to(torch.float32, copy=True)
    return total if residual is None else total.add_(residual.to(torch.float32))


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values as `dtype`. Those beyond its range become its largest number: a residual can push a mean there."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


class ReferenceKernels(Kernels):
    """Any codec on any device."""

    name = "reference"

    def measure(self, values: Tensor, residual: Tensor | None) -> Tensor:
        return self.codec.measure(compensated(values, residual))

    def encode(
        self, values: Tensor, residual: Tensor | None, window: Window, frames: Tensor, scale: Tensor | None
    ) -> None:
        for row, where in window.rows(frames.shape[0]):
            total = compensated(values[where], None if residual is None else residual[where])
            self._encode_frame(total, residual, where, frames[row], scale, NOT_FINITE)

    def measure_mean(self, frames: Tensor, residual: Tensor | None, count: int) -> Tensor:
        return self.codec.measure(compensated(self._mean(frames, count), residual))

    def encode_mean(
        self, frames: Tensor, residual: Tensor | None, count: int, frame: Tensor, scale: Tensor | None
    ) -> None:
        guilty = (statuses(frames) != 0).tolist()
        if any(guilty):
            statuses(frame).fill_(1 + guilty.index(True))
            return
        total = compensated(self._mean(frames, count), residual)
        self._encode_frame(total, residual, slice(0, count), frame, scale, 1 + frames.shape[0])

    def decode(self, frames: Tensor, window: Window, values: Tensor) -> None:
        for row, where in window.rows(frames.shape[0]):
            decoded = torch.empty(where.stop - where.start, dtype=torch.float32, device=values.device)
            if statuses(frames[row]).item():
                decoded.fill_(float("nan"))
            else:
                self.codec.decode(body(frames[row]), decoded)
            values[where].copy_(narrowed(decoded, values.dtype))

    def decode_mean(self, frames: Tensor, count: int, values: Tensor) -> None:
        mean = self._mean(frames, count)
        if statuses(frames).any():
            mean.fill_(float("nan"))
        values.copy_(narrowed(mean, values.dtype))

    def _mean(self, frames: Tensor, count: int) -> Tensor:
        mean = torch.zeros(count, dtype=torch.float32, device=frames.device)
        for frame in frames:
            self.codec.decode_accumulate(body(frame), mean, 1.0 / frames.shape[0])
        return mean

    def _encode_frame(
        self,
        total: Tensor,
        residual: Tensor | None,
        where: slice,
        frame: Tensor,
        scale: Tensor | None,
        not_finite: int,
    ) -> None:
        sound = torch.isfinite(total).all()
        if scale is not None:
            sound &= torch.isfinite(scale)
        if not sound:
            statuses(frame).fill_(not_finite)
            return
        self.codec.encode(total, body(frame), scale)
        decoded = torch.empty_like(total)
        self.codec.decode(body(frame), decoded)
        if not torch.isfinite(decoded).all():  # the scale of finite values may overflow
            statuses(frame).fill_(not_finite)
        elif residual is not None:
            residual[where].copy_(total.sub_(decoded))
