"""The device code that reduces and copies CUDA tensors of several ranks. A kernel reads a share of every rank's tensor.

Addresses come as integers: the memory is mapped from other processes, so torch has no tensor for it. They and the count
must not be specialized, or every alignment and size would be compiled again.
"""
# mypy: ignore-errors
# ruff: noqa: N803 - Triton spells its compile-time arguments in capitals

from typing import Any

import torch
import triton
import triton.language as tl

from ringway.call import Reduce

BLOCK = 2048
WARPS = 8

AVG = tl.constexpr(int(Reduce.AVG))
PRODUCT = tl.constexpr(int(Reduce.PRODUCT))
MIN = tl.constexpr(int(Reduce.MIN))
MAX = tl.constexpr(int(Reduce.MAX))
BAND = tl.constexpr(int(Reduce.BAND))
BOR = tl.constexpr(int(Reduce.BOR))
BXOR = tl.constexpr(int(Reduce.BXOR))
_COPY = -1
COPY = tl.constexpr(_COPY)

How = tuple[torch.dtype, Reduce | None]
"""What a kernel does with numbers of a dtype. Without a reduction it copies."""

_TYPES = {
    torch.float32: (tl.float32, tl.float32),
    torch.float64: (tl.float64, tl.float64),
    torch.float16: (tl.float16, tl.float32),
    torch.bfloat16: (tl.bfloat16, tl.float32),
    torch.int8: (tl.int8, tl.int8),
    torch.uint8: (tl.uint8, tl.uint8),
    torch.int16: (tl.int16, tl.int16),
    torch.int32: (tl.int32, tl.int32),
    torch.int64: (tl.int64, tl.int64),
}


@triton.jit
def _combined(total, value, REDUCE: tl.constexpr):
    if REDUCE == PRODUCT:
        return total * value
    elif REDUCE == MIN:
        return tl.where((total < value) | (total != total), total, value)
    elif REDUCE == MAX:
        return tl.where((total > value) | (total != total), total, value)
    elif REDUCE == BAND:
        return total & value
    elif REDUCE == BOR:
        return total | value
    elif REDUCE == BXOR:
        return total ^ value
    else:  # a sum, or an average before it is divided
        return total + value


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.int64).to(tl.pointer_type(TYPE))  # a small number is 32 bits wide
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _block(
    ins,
    outs,
    offsets,
    mask,
    INS: tl.constexpr,
    OUTS: tl.constexpr,
    REDUCE: tl.constexpr,
    TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if REDUCE == COPY:
        for i in tl.static_range(INS):
            value = tl.load(_pointer(ins[i], TYPE, ALIGNED) + offsets, mask=mask)
            tl.store(_pointer(outs[i], TYPE, ALIGNED) + offsets, value, mask=mask)
    else:
        total = tl.load(_pointer(ins[0], TYPE, ALIGNED) + offsets, mask=mask).to(WIDE)
        for i in tl.static_range(1, INS):
            value = tl.load(_pointer(ins[i], TYPE, ALIGNED) + offsets, mask=mask).to(WIDE)
            total = _combined(total, value, REDUCE)
        if REDUCE == AVG:
            if tl.float32 == WIDE:
                total = tl.div_rn(total, tl.full(total.shape, INS, tl.float32))
            elif tl.float64 == WIDE:
                total = total / tl.full(total.shape, INS, tl.float64)
            else:
                total = tl.where(total < 0, -((-total) // INS), total // INS)  # towards zero
        result = total.to(TYPE)
        for i in tl.static_range(OUTS):
            tl.store(_pointer(outs[i], TYPE, ALIGNED) + offsets, result, mask=mask)


@triton.jit(
    do_not_specialize=[
        *("in0", "in1", "in2", "in3", "in4", "in5", "in6", "in7"),
        *("out0", "out1", "out2", "out3", "out4", "out5", "out6", "out7"),
        "count",
    ]
)
def _kernel(
    in0,
    in1,
    in2,
    in3,
    in4,
    in5,
    in6,
    in7,
    out0,
    out1,
    out2,
    out3,
    out4,
    out5,
    out6,
    out7,
    count,
    INS: tl.constexpr,
    OUTS: tl.constexpr,
    REDUCE: tl.constexpr,
    TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduces INS arrays in order and writes the result to OUTS arrays, or copies each array to its own output. Halves
    accumulate in fp32 and are rounded once, and nothing is fused: the bits are those of the CPU's reduction
    (csrc/reduce/kernels.h)."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    ins = (in0, in1, in2, in3, in4, in5, in6, in7)
    outs = (out0, out1, out2, out3, out4, out5, out6, out7)
    # A mask keeps the compiler from moving 16 bytes at a time, so only the last block has one.
    if start + BLOCK <= count:
        _block(ins, outs, offsets, None, INS, OUTS, REDUCE, TYPE, WIDE, ALIGNED)
    else:
        _block(ins, outs, offsets, offsets < count, INS, OUTS, REDUCE, TYPE, WIDE, ALIGNED)


_compiled: dict[tuple[object, ...], Any] = {}
"""The kernels by what they were compiled for. Triton's own way to find them takes 40 µs a launch."""


def compiled(how: How, ins: int, outs: int, aligned: bool, large: bool) -> Any:
    """The kernel for the current device. `large` counts have 64 bits."""
    key = (torch.cuda.current_device(), how, ins, outs, aligned, large)
    kernel = _compiled.get(key)
    if kernel is None:
        # Triton takes the width of an argument from an example: addresses have 64 bits.
        example = [1 << 40] * 16 + [1 << 40 if large else 1]
        fixed = _fixed(how, ins, outs, aligned)
        kernel = _kernel.warmup(*example, *fixed, grid=(1,), num_warps=WARPS, enable_fp_fusion=False)
        _compiled[key] = kernel
    return kernel


def _fixed(how: How, ins: int, outs: int, aligned: bool) -> tuple[Any, ...]:
    dtype, kind = how
    stored, wide = _TYPES[dtype]
    if kind is Reduce.AVG and not dtype.is_floating_point:
        wide = tl.int64  # a sum of small integers may not fit into their type
    return ins, outs, _COPY if kind is None else int(kind), stored, wide, aligned, BLOCK


def launch(
    ins: list[int], outs: list[int], count: int, dtype: torch.dtype, kind: Reduce | None, stream: Any = None
) -> None:
    """Enqueues the kernel on a stream of the current device. Triton's interpreter needs none."""
    if count == 0:
        return
    aligned = not any(address % 16 for address in (*ins, *outs))
    shape = (dtype, kind), len(ins), len(outs), aligned
    arguments = [*ins, *[ins[0]] * (8 - len(ins)), *outs, *[outs[0]] * (8 - len(outs)), count, *_fixed(*shape)]
    blocks = (-(-count // BLOCK), 1, 1)
    if stream is None:
        _kernel[blocks](*arguments)
    else:
        compiled(*shape, large=count >> 31 != 0)[blocks](*arguments, stream=stream.cuda_stream)
