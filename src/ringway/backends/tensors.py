"""Facts about the memory of tensors, for libraries that take pointers."""

from __future__ import annotations

from torch import Tensor


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def even_splits(tensor: Tensor, size: int) -> list[int]:
    """The rows of the first dimension that each rank gets by default."""
    return [(tensor.shape[0] if tensor.dim() else 0) // size] * size


def row_bytes(tensor: Tensor) -> int:
    """The bytes of one row of the first dimension."""
    return tensor.nbytes // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
