"""A compressed all-reduce among n ranks in one process, in float64 and numpy, written independently."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

CODE_LIMITS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}


def e4m3_numbers() -> np.ndarray:
    """Every non-negative e4m3 number, in order."""
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(subnormal + normal[:-1])  # the last pattern is NaN


def lossy(values: np.ndarray, codec: str, block: int | None, scale: float | None = None) -> np.ndarray:
    """Values after encoding and decoding."""
    if values.size == 0:
        return values.copy()
    width = block or values.size
    parts = [values[i : i + width] for i in range(0, values.size, width)]
    return np.concatenate([_lossy_block(part, codec, block is None, scale) for part in parts])


def tensor_scale(values: np.ndarray, codec: str) -> float:
    """The scale of a whole tensor."""
    if codec == "onebit":
        return float(np.sqrt(np.mean(values**2)))
    return float(np.abs(values).max() / CODE_LIMITS[codec])


def _lossy_block(part: np.ndarray, codec: str, shared: bool, scale: float | None) -> np.ndarray:
    if codec == "onebit":
        size = scale if shared and scale is not None else float(np.abs(part).mean())
        return np.where(part >= 0, size, -size)
    step = scale if shared and scale is not None else tensor_scale(part, codec)
    if step == 0:
        return np.zeros_like(part)
    if codec == "fp8":
        numbers = e4m3_numbers()
        nearest = numbers[np.abs(np.abs(part / step)[:, None] - numbers[None, :]).argmin(axis=1)]
        return np.sign(part) * nearest * step
    return np.rint(part / step) * step


def largest(values: np.ndarray, kept: int, bits: int) -> np.ndarray:
    """Values after `topk`, which keeps `kept` of each chunk of 4096."""
    decoded = np.zeros_like(values)
    for start in range(0, values.size, 4096):
        chunk = values[start : start + 4096]
        places = np.argsort(-np.abs(chunk), kind="stable")[: -(-kept * chunk.size // 4096)]
        magnitudes = np.abs(chunk[places])
        low, high = magnitudes.min(), magnitudes.max()
        step = (high - low) / 2 ** (bits - 1)
        level = np.minimum((magnitudes - low) // step if step else 0 * magnitudes, 2 ** (bits - 1) - 1)
        decoded[start + places] = np.where(chunk[places] >= 0, 1, -1) * (low + step * (level + 0.5))
    return decoded


class SimulatedRanks:
    """The residuals of n ranks, and the algorithm between them."""

    def __init__(self, ranks: int, numel: int, codec: str, block: int | None, feedback: bool = True) -> None:
        per_rank = -(-numel // ranks)
        self.shard = -(-per_rank // 8) * 8
        self.ranks, self.numel, self.codec, self.block, self.feedback = ranks, numel, codec, block, feedback
        self.worker = np.zeros((ranks, numel))
        self.server = np.zeros(numel)

    def step(self, values: np.ndarray) -> np.ndarray:
        """The result of one call with these values, [ranks, numel]: the same on every rank."""
        sent = np.zeros_like(values)
        for rank in range(self.ranks):
            total = values[rank] + self.worker[rank]
            scale = tensor_scale(total, self.codec) if self.block is None else None
            for served in self._shards():
                sent[rank, served] = lossy(total[served], self.codec, self.block, scale)
            if self.feedback:
                self.worker[rank] = total - sent[rank]
        result = np.zeros(self.numel)
        for served in self._shards():
            total = sent[:, served].mean(axis=0) + self.server[served]
            if total.size:
                scale = tensor_scale(total, self.codec) if self.block is None else None
                result[served] = lossy(total, self.codec, self.block, scale)
                if self.feedback:
                    self.server[served] = total - result[served]
        return result

    def _shards(self) -> list[slice]:
        starts = [min(rank * self.shard, self.numel) for rank in range(self.ranks + 1)]
        return [slice(a, b) for a, b in pairwise(starts)]


class GatheredRanks:
    """The same without servers: every rank averages what all ranks have sent."""

    def __init__(self, ranks: int, numel: int, codec: str, block: Any, decay: float = 1.0) -> None:
        self.codec, self.block, self.decay = codec, block, decay
        self.worker = np.zeros((ranks, numel))

    def step(self, values: np.ndarray) -> np.ndarray:
        total = values + self.decay * self.worker
        if self.codec == "topk":
            sent = np.stack([largest(one, *self.block) for one in total])
            self.worker = total - sent
            return np.asarray(sent.mean(axis=0))
        scales = [tensor_scale(one, self.codec) if self.block is None else None for one in total]
        sent = np.stack([lossy(one, self.codec, self.block, scale) for one, scale in zip(total, scales, strict=True)])
        self.worker = total - sent
        return np.asarray(sent.mean(axis=0))
