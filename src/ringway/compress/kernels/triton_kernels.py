"""The device code of the Triton kernels.

Frames are passed three times, as bytes, fp32 and int32 views of the same memory, because a Triton pointer has one
type. A program takes a tile of GROUPS blocks of BLOCK elements of one shard. With one scale per tensor (SHARED), a
tile is one block and the scale is read from memory. `windows.py` and the codecs' files describe the bytes. KIND is the
codec's code.

All offsets are 64 bits wide: tensors may have more than 2**31 elements.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806 - Triton spells its compile-time arguments in capitals

import triton
import triton.language as tl

HEADER = tl.constexpr(16)
ONEBIT = tl.constexpr(0)
INT8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
SMALLEST_SCALE = tl.constexpr(1.1754943508222875e-38)
ROUNDER = tl.constexpr(12582912.0)
"""Adding and subtracting 1.5 * 2**23 rounds to an integer, ties to even."""


@triton.jit
def _tile(count, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """The tile's offsets within its shard [GROUPS, BLOCK], the mask of real elements, and the tile's block numbers."""
    blocks = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return offsets, offsets < count, blocks


@triton.jit
def _payload(count, BLOCK: tl.constexpr, SHARED: tl.constexpr):
    """The offset of the payload in a frame."""
    if SHARED:
        return HEADER + 4 + count * 0
    return HEADER + 4 * ((count + BLOCK - 1) // BLOCK)


@triton.jit
def _row_count(row, numel, shard, start, stop):
    """The number of real elements of a shard in the window."""
    return tl.maximum(tl.minimum(stop, numel - row * shard) - start, 0)


@triton.jit
def _codes(frames, payload, offsets, mask, KIND: tl.constexpr):
    """The codes of elements, as fp32."""
    if KIND == ONEBIT:
        byte = tl.load(frames + payload + offsets // 8, mask=mask, other=0).to(tl.int32)
        bit = (byte >> (7 - offsets % 8).to(tl.int32)) & 1
        return bit.to(tl.float32) * 2.0 - 1.0
    elif KIND == INT4:
        byte = tl.load(frames + payload + offsets // 2, mask=mask, other=0).to(tl.int32)
        half = (byte >> (4 * (1 - offsets % 2)).to(tl.int32)) & 15
        return (half - 8).to(tl.float32)
    else:
        byte = tl.load(frames + payload + offsets, mask=mask, other=0).to(tl.int32)
        if KIND == INT8:
            return (byte - 256 * (byte >> 7)).to(tl.float32)
        else:
            magnitude = byte & 127
            normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
            small = magnitude.to(tl.float32) * 0.001953125
            value = tl.where(magnitude < 8, small, normal)
            return tl.where(byte > 127, -value, value)


@triton.jit
def _encoded(total, scales, KIND: tl.constexpr):
    """The codes of a tile as small integers, and as the fp32 numbers they represent."""
    if KIND == ONEBIT:
        positive = total >= 0
        return positive.to(tl.int32), tl.where(positive, 1.0, -1.0)
    ones = tl.full(scales.shape, 1.0, tl.float32)
    usable = scales > 0
    inverse = tl.where(usable, tl.div_rn(ones, tl.where(usable, scales, ones)), 0.0)
    scaled = total * inverse[:, None]
    if KIND == INT8:
        value = (tl.minimum(tl.maximum(scaled, -127.0), 127.0) + ROUNDER) - ROUNDER
        return value.to(tl.int32), value
    elif KIND == INT4:
        value = (tl.minimum(tl.maximum(scaled, -7.0), 7.0) + ROUNDER) - ROUNDER
        return value.to(tl.int32) + 8, value
    else:
        scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        bits = scaled.to(tl.int32, bitcast=True)
        magnitude = bits & MAGNITUDE_BITS
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & 0x7FF00000
        small = magnitude.to(tl.float32, bitcast=True) + 16384.0
        is_small = magnitude < 0x3C800000
        code = tl.where(is_small, small.to(tl.int32, bitcast=True) - 0x46800000, (rounded >> 20) - 960)
        value = tl.where(is_small, small - 16384.0, rounded.to(tl.float32, bitcast=True))
        below = bits < 0
        return code + tl.where(below, 128, 0), tl.where(below, -value, value)


@triton.jit
def _store_codes(frames, payload, codes, mask, count, KIND: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Pack small integers into the payload, as many per byte as fit, the first one highest."""
    if KIND == ONEBIT:
        PER_BYTE: tl.constexpr = 8
        BITS: tl.constexpr = 1
    elif KIND == INT4:
        PER_BYTE: tl.constexpr = 2
        BITS: tl.constexpr = 4
    else:
        PER_BYTE: tl.constexpr = 1
        BITS: tl.constexpr = 8
    BYTES: tl.constexpr = GROUPS * BLOCK // PER_BYTE
    codes = tl.where(mask, codes, 0)
    if PER_BYTE == 1:
        packed = tl.reshape(codes, [BYTES])
    else:
        shifts = BITS * (PER_BYTE - 1 - tl.arange(0, PER_BYTE))
        packed = tl.sum(tl.reshape(codes, [BYTES, PER_BYTE]) << shifts[None, :], axis=1)
    where = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    tl.store(frames + payload + where, packed.to(tl.uint8), mask=where < (count + PER_BYTE - 1) // PER_BYTE)


@triton.jit
def _block_scales(total, mask, KIND: tl.constexpr, LARGEST_INVERSE: tl.constexpr):
    """A scale for each block of a tile, and whether its values are all finite."""
    if KIND == ONEBIT:
        real = tl.maximum(tl.sum(mask.to(tl.float32), axis=1), 1.0)
        scales = tl.div_rn(tl.sum(tl.abs(total), axis=1), real)
        finite = scales <= 3.4028234663852886e38
    else:
        peak = tl.max(total.to(tl.int32, bitcast=True) & MAGNITUDE_BITS, axis=1)
        finite = peak < INFINITY_BITS
        scales = peak.to(tl.float32, bitcast=True) * LARGEST_INVERSE
    return scales, finite


@triton.jit
def _encode_tile(
    total,
    residual,
    where,
    mask,
    blocks,
    count,
    frames,
    frames_f32,
    frame_offset,
    scale,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LARGEST_INVERSE: tl.constexpr,
):
    """Write the scales and payload of a tile plus its residual into its frame, and the encoding error of finite blocks
    into the residual. Return whether any block is not finite."""
    if HAS_RESIDUAL:
        total += tl.load(residual + where, mask=mask, other=0.0).to(tl.float32)
    if SHARED:
        scales = tl.load(scale) + tl.zeros([GROUPS], tl.float32)
        finite = tl.abs(scales) <= 3.4028234663852886e38
        scale_mask = blocks == 0
        scale_places = blocks * 0
    else:
        scales, finite = _block_scales(total, mask, KIND, LARGEST_INVERSE)
        scale_mask = blocks * BLOCK < count
        scale_places = blocks
    scales = tl.where(finite & (scales >= SMALLEST_SCALE), scales, 0.0)
    tl.store(frames_f32 + (frame_offset + HEADER) // 4 + scale_places, scales, mask=scale_mask)
    codes, values = _encoded(total, scales, KIND)
    payload = frame_offset + _payload(count, BLOCK, SHARED)
    _store_codes(frames, payload, codes, mask, count, KIND, GROUPS, BLOCK)
    if HAS_RESIDUAL:
        lost = total - values * scales[:, None]
        tl.store(residual + where, lost.to(residual.dtype.element_ty), mask=mask & finite[:, None])
    return tl.max((finite == 0).to(tl.int32), axis=0) != 0


@triton.jit
def _narrowed(values, element: tl.constexpr):
    """Values in the type of their destination. Those beyond its range become its largest number."""
    if element == tl.float16:
        limit = 65504.0
    elif element == tl.bfloat16:
        limit = 3.3895313892515355e38
    else:
        limit = float("inf")
    return tl.where(values > limit, limit, tl.where(values < -limit, -limit, values)).to(element)


@triton.jit
def _mean(
    frames,
    frames_f32,
    frames_i32,
    ROWS: tl.constexpr,
    factor,
    stride,
    count,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """This program's tile, the mean of the frames over it, and 1 + the number of the first frame with a status; 0 if
    there is none. If there is one, the mean is NaN."""
    offsets, mask, blocks = _tile(count, GROUPS, BLOCK)
    total = tl.zeros([GROUPS, BLOCK], tl.float32)
    guilty = tl.program_id(0) * 0
    payload = _payload(count, BLOCK, SHARED)
    frame = tl.program_id(0).to(tl.int64) * 0
    for row in range(ROWS):
        status = tl.load(frames_i32 + frame // 4)
        guilty = tl.where((guilty == 0) & (status != 0), row + 1, guilty)
        if SHARED:
            scales = tl.load(frames_f32 + (frame + HEADER) // 4) + tl.zeros([GROUPS], tl.float32)
        else:
            where = (frame + HEADER) // 4 + blocks
            scales = tl.load(frames_f32 + where, mask=blocks * BLOCK < count, other=0.0)
        total += _codes(frames, frame + payload, offsets, mask, KIND) * (scales * factor)[:, None]
        frame += stride
    return offsets, mask, blocks, tl.where(guilty == 0, total, float("nan")), guilty


@triton.jit
def encode(
    values,
    residual,
    frames,
    frames_f32,
    frames_i32,
    scale,
    stride,
    numel,
    shard,
    start,
    stop,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LARGEST_INVERSE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    count = _row_count(row, numel, shard, start, stop)
    offsets, mask, blocks = _tile(count, GROUPS, BLOCK)
    where = row * shard + start + offsets
    total = tl.load(values + where, mask=mask, other=0.0).to(tl.float32)
    bad = _encode_tile(
        total,
        residual,
        where,
        mask,
        blocks,
        count,
        frames,
        frames_f32,
        row * stride,
        scale,
        KIND,
        GROUPS,
        BLOCK,
        SHARED,
        HAS_RESIDUAL,
        LARGEST_INVERSE,
    )
    tl.store(frames_i32 + row * stride // 4, 1, mask=bad & (count > 0))


@triton.jit
def encode_mean(
    frames,
    frames_f32,
    frames_i32,
    residual,
    out,
    out_f32,
    out_i32,
    scale,
    ROWS: tl.constexpr,
    factor,
    stride,
    count,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LARGEST_INVERSE: tl.constexpr,
):
    offsets, mask, blocks, total, guilty = _mean(
        frames, frames_f32, frames_i32, ROWS, factor, stride, count, KIND, GROUPS, BLOCK, SHARED
    )
    total = tl.where(mask, total, 0.0)
    bad = _encode_tile(
        total,
        residual,
        offsets,
        mask,
        blocks,
        count,
        out,
        out_f32,
        count * 0,
        scale,
        KIND,
        GROUPS,
        BLOCK,
        SHARED,
        HAS_RESIDUAL,
        LARGEST_INVERSE,
    )
    status = tl.where(guilty != 0, guilty, ROWS + 1)
    tl.store(out_i32, status, mask=bad)


@triton.jit
def decode(
    frames,
    frames_f32,
    frames_i32,
    values,
    stride,
    numel,
    shard,
    start,
    stop,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    frame = row * stride
    count = _row_count(row, numel, shard, start, stop)
    offsets, mask, blocks = _tile(count, GROUPS, BLOCK)
    if SHARED:
        scales = tl.load(frames_f32 + (frame + HEADER) // 4) + tl.zeros([GROUPS], tl.float32)
    else:
        scale_mask = blocks * BLOCK < count
        scales = tl.load(frames_f32 + (frame + HEADER) // 4 + blocks, mask=scale_mask, other=0.0)
    status = tl.load(frames_i32 + frame // 4)
    scales = tl.where(status == 0, scales, float("nan"))
    codes = _codes(frames, frame + _payload(count, BLOCK, SHARED), offsets, mask, KIND)
    decoded = codes * scales[:, None]
    tl.store(values + row * shard + start + offsets, _narrowed(decoded, values.dtype.element_ty), mask=mask)


@triton.jit
def decode_mean(
    frames,
    frames_f32,
    frames_i32,
    values,
    ROWS: tl.constexpr,
    factor,
    stride,
    count,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    offsets, mask, _, total, _ = _mean(
        frames, frames_f32, frames_i32, ROWS, factor, stride, count, KIND, GROUPS, BLOCK, SHARED
    )
    tl.store(values + offsets, _narrowed(total, values.dtype.element_ty), mask=mask)
