"""The device code of the extra first pass that a whole-tensor scale needs: its statistics."""
# mypy: ignore-errors
# ruff: noqa: N803 - Triton spells its compile-time arguments in capitals

import triton
import triton.language as tl

from ringway.compress.kernels.triton_kernels import MAGNITUDE_BITS, ONEBIT, _mean, _tile


@triton.jit
def _store_statistic(total, statistics, KIND: tl.constexpr):
    """A tile's sum of squares, or its largest magnitude (at least infinity's bits if it is not finite)."""
    if KIND == ONEBIT:
        tl.store(statistics + tl.program_id(0), tl.sum(tl.sum(total * total, axis=1), axis=0))
    else:
        peak = tl.max(tl.max(total.to(tl.int32, bitcast=True) & MAGNITUDE_BITS, axis=1), axis=0)
        tl.store(statistics + tl.program_id(0), peak.to(tl.float32, bitcast=True))


@triton.jit
def measure(
    values,
    residual,
    statistics,
    numel,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    offsets, mask, _ = _tile(numel, GROUPS, BLOCK)
    total = tl.load(values + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    _store_statistic(total, statistics, KIND)


@triton.jit
def measure_mean(
    frames,
    frames_f32,
    frames_i32,
    residual,
    statistics,
    ROWS: tl.constexpr,
    factor,
    stride,
    count,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    offsets, mask, _, total, _ = _mean(
        frames, frames_f32, frames_i32, ROWS, factor, stride, count, KIND, GROUPS, BLOCK, True
    )
    if HAS_RESIDUAL:
        total += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    _store_statistic(tl.where(mask, total, 0.0), statistics, KIND)
