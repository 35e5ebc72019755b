"""What collectives compute, in plain torch on one process: the numbers that backends are checked against.

Inputs are functions of the rank, so every rank knows what every other one contributed. Values are small integers
wherever that makes the arithmetic exact in every dtype, so results can be compared for equality.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringway.call import Reduce

PREMUL_FACTOR = 0.5
"""PREMUL_SUM's factor in the suite: a power of two, so that products are exact."""

_BITWISE: dict[Reduce, Callable[[Tensor, Tensor], Tensor]] = {
    Reduce.BAND: torch.bitwise_and,
    Reduce.BOR: torch.bitwise_or,
    Reduce.BXOR: torch.bitwise_xor,
}
_SAME_FOR_BOOL = {
    Reduce.SUM: Reduce.BOR,
    Reduce.MAX: Reduce.BOR,
    Reduce.PRODUCT: Reduce.BAND,
    Reduce.MIN: Reduce.BAND,
}


def any_bits(shape: int | Sequence[int], dtype: torch.dtype, *key: int) -> Tensor:
    """A tensor of arbitrary bit patterns (NaNs among them), the same for the same key."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    generator = torch.Generator("cpu").manual_seed(functools.reduce(lambda seed, part: seed * 1009 + part + 1, key, 17))
    count = math.prod(sizes) * dtype.itemsize
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=generator, device="cpu")
    data = words.to(torch.get_default_device()).view(torch.uint8)[:count]
    if dtype is torch.bool:
        return (data % 2).to(torch.bool).reshape(sizes)
    return data.view(dtype).reshape(sizes)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's elements as bytes, so that NaNs and negative zeros compare by their bits."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


PERIOD = 15 * 128
"""`small_values` repeats itself after this many elements."""


def small_values(count: int, dtype: torch.dtype, rank: int, reduce: Reduce = Reduce.SUM) -> Tensor:
    """One rank's values, for which the reduction over up to eight ranks is exact."""
    index = torch.arange(count) + 3 * rank
    if dtype is torch.bool:
        return index % 3 != 0
    if reduce is Reduce.PRODUCT:
        values = torch.where(index % 4 == 0, 2, 1)
    elif reduce in _BITWISE:
        values = index * 37 % 128
    elif dtype is torch.uint8:
        values = index * 5 % 16
    else:
        values = index * 5 % 15 - 7
    if dtype.is_complex:
        return torch.complex(values.to(torch.float64), (values + rank).to(torch.float64)).to(dtype)
    return values.to(dtype)


def reduced(tensors: Sequence[Tensor], reduce: Reduce, factor: float = PREMUL_FACTOR) -> Tensor:
    """The reduction of one tensor per rank, computed in the widest type and rounded once."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        reduce = _SAME_FOR_BOOL.get(reduce, reduce)
    if reduce in _BITWISE:
        return functools.reduce(_BITWISE[reduce], tensors)
    wide = torch.stack([tensor.to(_wide(dtype)) for tensor in tensors])
    if reduce is Reduce.MIN:
        return wide.amin(0).to(dtype)
    if reduce is Reduce.MAX:
        return wide.amax(0).to(dtype)
    if reduce is Reduce.PRODUCT:
        return wide.prod(0).to(dtype)
    total = wide.sum(0)
    if reduce is Reduce.PREMUL_SUM:
        total = total * factor
    elif reduce is Reduce.AVG and dtype.is_floating_point | dtype.is_complex:
        total = total / len(tensors)
    elif reduce is Reduce.AVG:
        total = torch.div(total, len(tensors), rounding_mode="trunc")
    return total.to(dtype)


def relative_tolerance(dtype: torch.dtype, reduce: Reduce, size: int) -> float:
    """The allowed relative error of a result for `small_values`: zero, unless a mean cannot be exact.

    A mean over a number of ranks that is not a power of two is rounded: once if divided at the end, once per rank if
    each input is divided first.
    """
    inexact = reduce is Reduce.AVG and size & (size - 1) and (dtype.is_floating_point or dtype.is_complex)
    return 2 * size * torch.finfo(dtype).eps if inexact else 0.0


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
