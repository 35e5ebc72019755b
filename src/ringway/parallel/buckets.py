"""Gradient buckets: which parameters travel together, and their memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ringway.work import Work

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the first message leaves early in backward."""


def assign(order: Sequence[int], keys: Sequence[Hashable], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split parameters, taken in `order`, into buckets of at least `limit` bytes, each of one key (dtype, device).

    `keys` and `sizes` are indexed by parameter. Buckets are in the order in which they fill up; those that do not fill
    come last. This is DistributedDataParallel's rule, so the two can be compared bit by bit.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    begun: set[Hashable] = set()
    done: list[list[int]] = []
    for index in order:
        key = keys[index]
        open_buckets.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + sizes[index]
        if filled[key] >= (limit if key in begun else min(limit, FIRST_BUCKET_BYTES)):
            done.append(open_buckets.pop(key))
            filled[key] = 0
            begun.add(key)
    return done + list(open_buckets.values())


def first_assignment(keys: Sequence[Hashable], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """The assignment before the first backward: the model's order reversed, since backward starts at the end."""
    buckets = assign(range(len(keys)), keys, sizes, limit)
    return sorted(buckets, key=min, reverse=True)


@dataclass(frozen=True)
class Transport:
    """How gradients travel: multiplied by `before`, in `dtype` (None: their own), and the sum multiplied by `after`."""

    before: float
    after: float = 1.0
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, size: int, predivide_factor: float | None, dtype: torch.dtype | None) -> Transport:
        """The mean over `size` ranks. Without a factor, gradients are divided by `size` before they are summed."""
        if predivide_factor is None:
            return cls(1.0 / size, dtype=dtype)
        return cls(1.0 / predivide_factor, predivide_factor / size, dtype)


@dataclass(slots=True)
class Slot:
    """One parameter's place in a bucket. `index` is its number among the trained ones, `view` its part of the
    bucket."""

    index: int
    name: str
    parameter: nn.Parameter
    bucket: Bucket
    view: Tensor
    pointer: int
    nbytes: int
    dtype: torch.dtype
    step: int = -1
    """The last step in which its gradient arrived."""
    in_place: bool = False
    """Whether this step's gradient was accumulated directly in the bucket and still has to be scaled."""

    def holds_gradient(self) -> bool:
        """Whether the parameter's gradient is stored in the bucket."""
        return self.parameter.grad is not None and self.parameter.grad.data_ptr() == self.pointer


class Bucket:
    """Parameters of one dtype and device whose gradients travel as one tensor."""

    def __init__(
        self, number: int, members: Sequence[tuple[int, str, nn.Parameter]], device: str | None = None
    ) -> None:
        """The bucket's memory is on the parameters' device unless another is given."""
        first = members[0][2]
        self.number = number
        self.label = f"gradients {number}"
        length = sum(p.numel() for _, _, p in members)
        self.flat = torch.zeros(length, dtype=first.dtype, device=first.device if device is None else device)
        self.slots: list[Slot] = []
        self.missing = 0
        self.work: Work | None = None
        self.launched = False
        self.compressed = False
        self._after = 1.0
        self._dtype: torch.dtype | None = None
        self._sent: Tensor | None = None
        # A zero-dimensional tensor: torch multiplies by it in a third of the time it needs for a Python number.
        exact = first.dtype in (torch.float64, torch.complex128)
        self._scale = torch.ones((), dtype=torch.float64 if exact else torch.float32)
        start = 0
        for index, name, parameter in members:
            view = _like(self.flat[start : start + parameter.numel()], parameter)
            self.slots.append(Slot(index, name, parameter, self, view, view.data_ptr(), view.nbytes, view.dtype))
            start += parameter.numel()

    def begin(self, transport: Transport, compressed: bool) -> None:
        """Start a new step. Buckets are summed, so gradients are scaled; a codec averages by itself."""
        self.missing = len(self.slots)
        self.work = None
        self.launched = False
        self.compressed = compressed
        self._scale.fill_(1.0 if compressed else transport.before)
        self._after = 1.0 if compressed else transport.after
        self._dtype = None if compressed or transport.dtype is self.flat.dtype else transport.dtype

    def wire(self) -> Tensor:
        """What is summed over the ranks: the bucket, or its values in another dtype."""
        self._sent = self.flat if self._dtype is None else self.flat.to(self._dtype)
        return self._sent

    def finish(self) -> None:
        """Wait for the sum, and turn it into the mean."""
        if self.work is not None:
            self.work.wait()
        if self._sent is not None:
            if self._sent is not self.flat:
                self.flat.copy_(self._sent)
            if self._after != 1.0:
                self.flat.mul_(self._after)
        self.work = self._sent = None

    def fill(self, slot: Slot, gradient: Tensor | None) -> None:
        """Copy a parameter's gradient, scaled, into its place; zeros if it has none."""
        if gradient is None:
            slot.in_place = False
            slot.view.zero_()
            return
        slot.in_place = gradient.data_ptr() == slot.pointer
        if not slot.in_place:  # a gradient in place may still grow before the bucket is sent, and is scaled then
            torch.mul(gradient, self._scale, out=slot.view)

    def scale_in_place(self) -> None:
        """Scale the gradients that `fill` skipped."""
        in_place = [slot.view for slot in self.slots if slot.in_place]
        if len(in_place) == len(self.slots):
            self.flat.mul_(self._scale)
        elif in_place:
            torch._foreach_mul_(in_place, self._scale)


def _like(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """The flat part in the parameter's shape and, if it is dense, its strides: autograd then accumulates without a
    copy."""
    outermost_first = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.is_contiguous() or not parameter.permute(outermost_first).is_contiguous():
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
