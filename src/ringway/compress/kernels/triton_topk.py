"""The device code of the Triton kernels for `topk`: `codecs/topk.py` describes a record to the bit.

A program takes one chunk. It finds the k-th largest magnitude by bisection, beginning near the largest: each step
counts how many magnitudes reach a number, and a number that exactly k of them reach ends the search. The kept elements
then go to a scratch memory, one after the other, and what remains is done with them alone. Records begin at any byte,
so their fields are written with atomic operations on the words around them, in memory that was zeroed before.

All offsets are 64 bits wide: tensors may have more than 2**31 elements.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806 - Triton spells its compile-time arguments in capitals

import triton
import triton.language as tl

from ringway.compress.kernels.triton_kernels import HEADER, INFINITY_BITS, MAGNITUDE_BITS, _narrowed, _row_count

CHUNK = tl.constexpr(4096)
RANGE_BYTES = tl.constexpr(8)
EXTENT = ["stride", "numel", "shard", "start", "stop"]
"""Numbers of which no kernel is a special case: compiling one takes seconds, and tensors have many sizes."""


@triton.jit
def _shape(length, KEPT: tl.constexpr):
    """How many elements of a chunk are kept, and how many bits of their places are not in unary."""
    kept = tl.maximum((KEPT * length + CHUNK - 1) // CHUNK, 1).to(tl.int32)
    share = length.to(tl.int32) // kept
    low = kept * 0
    for bit in tl.static_range(1, 13):
        low += ((share >> bit) > 0).to(tl.int32)
    return kept, low


@triton.jit
def _magnitude(level, smallest, largest, LEVELS: tl.constexpr):
    step = (largest - smallest) * (1.0 / LEVELS)
    middle = smallest + step * (level.to(tl.float32) + 0.5)
    return tl.where(level == 0, tl.where(smallest == 0, 0.0, middle), middle)


@triton.jit
def _big_endian(words):
    """Swap the bytes of each word. The first bit of a record is the highest of its first byte."""
    return ((words & 255) << 24) | ((words & 0xFF00) << 8) | ((words >> 8) & 0xFF00) | ((words >> 24) & 255)


@triton.jit
def _write(words, positions, fields, width, mask):
    """Set the bits of zeroed memory from `positions` on to `fields`, each `width` bits wide, 32 at most."""
    inside = (positions % 32).to(tl.int32)
    both = fields.to(tl.int64) << (64 - width - inside).to(tl.int64)
    upper, lower = (both >> 32).to(tl.int32), both.to(tl.int32)
    tl.atomic_or(words + positions // 32, _big_endian(upper), mask=mask & (upper != 0), sem="relaxed")
    tl.atomic_or(words + positions // 32 + 1, _big_endian(lower), mask=mask & (lower != 0), sem="relaxed")


@triton.jit
def _read(words, positions, width, mask):
    """The fields at `positions`, each `width` bits wide, 31 at most."""
    inside = (positions % 32).to(tl.int32)
    upper = _big_endian(tl.load(words + positions // 32, mask=mask, other=0))
    lower = _big_endian(tl.load(words + positions // 32 + 1, mask=mask & (inside + width > 32), other=0))
    both = (upper.to(tl.int64) << 32) | (lower.to(tl.int64) & 0xFFFFFFFF)
    return (both >> (64 - width - inside).to(tl.int64)).to(tl.int32) & ((1 << width) - 1)


@triton.jit
def _number(bytes_, record):
    """The fp32 number at any byte."""
    places = tl.arange(0, 4)
    parts = tl.load(bytes_ + record + places).to(tl.int32) << (8 * places)
    return tl.sum(parts, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _chunk(pointer, length):
    """The elements of a chunk in fp32, and zeros behind its end."""
    places = tl.arange(0, CHUNK)
    # A mask keeps the compiler from moving 16 bytes at a time, so only the last chunk has one.
    if length == CHUNK:
        loaded = tl.load(pointer + places)
    else:
        loaded = tl.load(pointer + places, mask=places < length, other=0.0)
    return loaded.to(tl.float32)


@triton.jit
def _selected(magnitudes, peak, kept):
    """Which elements are kept, and the smallest magnitude among them, as bits. Of equal ones, the first are kept."""
    # `kept` or more reach `low`, fewer reach `high`. The first guess is an octave below the peak.
    low = kept * 0
    high = peak + 1
    below = kept * 0 + (1 << 23)
    while high - low > 1:
        middle = tl.maximum(low + (high - low) // 2, high - below)
        reached = tl.sum((magnitudes >= middle).to(tl.int32), axis=0)
        low = tl.where(reached >= kept, middle, low)
        high = tl.where(reached > kept, high, middle)
        below = tl.minimum(below, 1 << 28) * 4
    smallest = tl.min(tl.where(magnitudes >= low, magnitudes, MAGNITUDE_BITS), axis=0)
    above = magnitudes > smallest
    equal = magnitudes == smallest
    ties = kept - tl.sum(above.to(tl.int32), axis=0)
    taken = above | equal
    if tl.sum(equal.to(tl.int32), axis=0) > ties:
        taken = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= ties))
    return taken, smallest


@triton.jit
def _order(taken):
    """How many elements before each are taken. Threads of one warp count a row, so warps meet only for the rows."""
    rows = tl.reshape(taken.to(tl.int32), [CHUNK // 32, 32])
    counts = tl.sum(rows, axis=1)
    before = tl.cumsum(counts, axis=0) - counts
    return tl.reshape(before[:, None] + tl.cumsum(rows, axis=1) - rows, [CHUNK])


@triton.jit(do_not_specialize=["source_stride", *EXTENT])
def encode(
    values,
    residual,
    frames,
    frames_i32,
    scratch,
    sources_i32,
    source_stride,
    stride,
    numel,
    shard,
    start,
    stop,
    SOURCES: tl.constexpr,
    KEPT: tl.constexpr,
    BITS: tl.constexpr,
    RECORD: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Encode one chunk of a shard. `scratch` has 2 * KEPT numbers for each program; LANES is KEPT or more.

    If a value is not finite, the frame's status is 1; or, if the values are the mean of SOURCES frames, 1 + the number
    of the first of these with a status, or 1 + SOURCES if none has one."""
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    length = tl.minimum(_row_count(row, numel, shard, start, stop) - begin, CHUNK)
    places = tl.arange(0, CHUNK)
    mask = places < length
    first = row * shard + start + begin
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    total = _chunk(values + first, length)
    if HAS_RESIDUAL:
        total += _chunk(residual + first, length)
    magnitudes = tl.where(mask, total.to(tl.int32, bitcast=True) & MAGNITUDE_BITS, -1)
    peak = tl.max(magnitudes, axis=0)
    finite = peak < INFINITY_BITS
    sound = places < tl.where(finite, length, 0)
    kept, low = _shape(length, KEPT)
    taken, least = _selected(magnitudes, peak, kept)
    order = _order(taken)
    mine = scratch + (row * tl.num_programs(0) + tl.program_id(0)) * (2 * KEPT)
    tl.store(mine + order, places, mask=taken & sound)
    tl.store(mine + KEPT + order, total.to(tl.int32, bitcast=True), mask=taken & sound)
    if HAS_RESIDUAL:
        kept_back = total.to(residual.dtype.element_ty)
        if finite & (length == CHUNK):
            tl.store(residual + first + places, kept_back)
        else:
            tl.store(residual + first + places, kept_back, mask=sound)
    record = row * stride + HEADER + tl.program_id(0).to(tl.int64) * RECORD
    ends = tl.arange(0, 8)
    byte = (tl.where(ends < 4, least, peak) >> (8 * (ends % 4))) & 255
    _write(frames_i32, (record + ends) * 8, byte, 8, ends < tl.minimum(length, 1) * RANGE_BYTES)

    tl.debug_barrier()  # what follows reads and overwrites what was stored
    order = tl.arange(0, LANES)
    here = order < tl.where(finite & (length > 0), kept, 0)
    places = tl.load(mine + order, mask=here, other=0, volatile=True)
    total = tl.load(mine + KEPT + order, mask=here, other=0, volatile=True).to(tl.float32, bitcast=True)
    smallest = least.to(tl.float32, bitcast=True)
    largest = peak.to(tl.float32, bitcast=True)
    width = tl.zeros([LANES], tl.float32) + (largest - smallest)
    share = tl.div_rn(tl.abs(total) - smallest, tl.where(width > 0, width, 1.0))
    levels = tl.minimum((tl.where(here & (width > 0), share, 0.0) * LEVELS).to(tl.int32), LEVELS - 1)
    positive = total >= 0
    if HAS_RESIDUAL:
        magnitude = _magnitude(levels, smallest, largest, LEVELS)
        lost = total - tl.where(positive, magnitude, -magnitude)
        tl.store(residual + first + places, lost.to(residual.dtype.element_ty), mask=here)
    bits = (record + RANGE_BYTES) * 8
    _write(frames_i32, bits + order * BITS, levels + tl.where(positive, LEVELS, 0), BITS, here)
    bits += kept * BITS
    _write(frames_i32, bits + order * low, places & ((1 << low) - 1), low, here)
    bits += kept * low
    _write(frames_i32, bits + (places >> low) + order, tl.full([LANES], 1, tl.int32), 1, here)

    status = tl.program_id(0) * 0 + SOURCES + 1
    # Unrolled, because without sources there is no pointer to compile the loop with.
    for source in tl.static_range(SOURCES):
        number = SOURCES - 1 - source
        found = tl.load(sources_i32 + number * source_stride.to(tl.int64) // 4)
        status = tl.where(found != 0, number + 1, status)
    tl.store(frames_i32 + row * stride // 4, status, mask=(finite == 0) & (length > 0))


@triton.jit
def _kept_elements(
    frames,
    frames_i32,
    record,
    length,
    KEPT: tl.constexpr,
    BITS: tl.constexpr,
    UNARY: tl.constexpr,
):
    """The places and values of a record, [UNARY], and which of these are there. A peer's bytes never lead beyond the
    chunk."""
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    kept, low = _shape(length, KEPT)
    smallest, largest = _number(frames, record), _number(frames, record + 4)
    codes_at = (record + RANGE_BYTES) * 8
    low_at = codes_at + kept * BITS
    unary_at = low_at + kept * low
    lanes = tl.arange(0, UNARY)
    here = lanes < kept + ((length.to(tl.int32) - 1) >> low)
    ones = _read(frames_i32, unary_at + lanes, 1, here)
    order = tl.cumsum(ones, axis=0) - 1
    here = here & (ones == 1) & (order < kept)
    places = ((lanes - order) << low) + _read(frames_i32, low_at + order * low, low, here)
    codes = _read(frames_i32, codes_at + order * BITS, BITS, here)
    magnitude = _magnitude(codes % LEVELS, smallest, largest, LEVELS)
    return places, tl.where(codes >= LEVELS, magnitude, -magnitude), here & (places < length)


@triton.jit(do_not_specialize=EXTENT)
def decode(
    frames,
    frames_i32,
    values,
    stride,
    numel,
    shard,
    start,
    stop,
    KEPT: tl.constexpr,
    BITS: tl.constexpr,
    RECORD: tl.constexpr,
    UNARY: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    length = tl.minimum(_row_count(row, numel, shard, start, stop) - begin, CHUNK)
    if length > 0:
        places = tl.arange(0, CHUNK)
        element: tl.constexpr = values.dtype.element_ty
        chunk = values + row * shard + start + begin
        spoiled = tl.load(frames_i32 + row * stride // 4) != 0
        rest = tl.where(spoiled, float("nan"), tl.zeros([CHUNK], tl.float32))
        tl.store(chunk + places, rest.to(element), mask=places < length)
        tl.debug_barrier()  # the next stores must come after these
        record = row * stride + HEADER + tl.program_id(0).to(tl.int64) * RECORD
        at, decoded, here = _kept_elements(frames, frames_i32, record, length, KEPT, BITS, UNARY)
        tl.store(chunk + at, _narrowed(decoded, element), mask=here & (at < tl.where(spoiled, 0, length)))


@triton.jit(do_not_specialize=["stride", "count"])
def decode_mean(
    frames,
    frames_i32,
    sums,
    values,
    ROWS: tl.constexpr,
    factor,
    stride,
    count,
    KEPT: tl.constexpr,
    BITS: tl.constexpr,
    RECORD: tl.constexpr,
    UNARY: tl.constexpr,
):
    """`sums` is fp32 memory for `count` elements; it may be `values`."""
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    length = tl.minimum(count - begin, CHUNK)
    places = tl.arange(0, CHUNK)
    chunk = sums + begin
    tl.store(chunk + places, tl.zeros([CHUNK], tl.float32), mask=places < length)
    guilty = tl.program_id(0) * 0
    record = HEADER + tl.program_id(0).to(tl.int64) * RECORD
    for row in range(ROWS):
        tl.debug_barrier()  # each frame adds to what the one before left
        frame = row * stride.to(tl.int64)
        guilty |= tl.load(frames_i32 + frame // 4)
        at, decoded, here = _kept_elements(frames, frames_i32, record + frame, length, KEPT, BITS, UNARY)
        before = tl.load(chunk + at, mask=here, other=0.0, volatile=True)
        tl.store(chunk + at, before + decoded * factor, mask=here)
    tl.debug_barrier()
    mean = tl.load(chunk + places, mask=places < length, other=0.0, volatile=True)
    mean = tl.where(guilty == 0, mean, float("nan"))
    tl.store(values + begin + places, _narrowed(mean, values.dtype.element_ty), mask=places < length)
