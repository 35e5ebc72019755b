"""Tensors as MPI sees them: memory, counts and datatypes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringway.backends.mpi.world import MPI
from ringway.backends.tensors import row_bytes

DATATYPES: dict[torch.dtype, Any] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
MOST = (1 << 31) - 1
"""The largest count that every MPI accepts."""
_BLOCK = 1 << 20


def _memory(tensor: Tensor) -> Any:
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


@functools.lru_cache(maxsize=256)
def _stretch(nbytes: int, place: int = 0) -> Any:
    """A datatype of `nbytes` bytes at offset `place`. Not every MPI accepts counts beyond 2^31, but every MPI accepts
    one element of any size."""
    blocks, rest = divmod(nbytes, _BLOCK)
    block = MPI.BYTE.Create_contiguous(_BLOCK)
    made = MPI.Datatype.Create_struct([blocks, rest], [place, place + blocks * _BLOCK], [block, MPI.BYTE])
    # The next share lies `nbytes` further on, wherever this one begins.
    return made.Create_resized(0, nbytes).Commit()


def as_bytes(tensor: Tensor, shares: int = 1) -> list[Any]:
    """A tensor as raw bytes, for calls that do not compute. The count is that of one of `shares` equal parts."""
    share = tensor.nbytes // shares
    if share > MOST:
        return [_memory(tensor), 1, _stretch(share)]
    return [_memory(tensor), share, MPI.BYTE]


def as_numbers(tensor: Tensor, shares: int = 1) -> list[Any]:
    return [_memory(tensor), tensor.numel() // shares, DATATYPES[tensor.dtype]]


def as_vector(tensor: Tensor, rows: Sequence[int]) -> list[Any]:
    """A tensor in one piece for each rank, `rows` of its first dimension each."""
    counts = [count * row_bytes(tensor) for count in rows]
    places = [sum(counts[:rank]) for rank in range(len(counts))]
    if sum(counts) <= MOST:
        return [_memory(tensor), (counts, places), [MPI.BYTE] * len(counts)]
    kinds = [_stretch(count, place) for count, place in zip(counts, places, strict=True)]
    return [_memory(tensor), ([1] * len(counts), [0] * len(counts)), kinds]


def countable(tensor: Tensor) -> Sequence[Tensor]:
    """Pieces whose elements MPI can count: reductions work on plain datatypes only."""
    return tensor.view(-1).split(MOST) if tensor.numel() > MOST else [tensor]
