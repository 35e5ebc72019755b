"""Cross-entropy of logits whose vocabulary is split over the ranks: it sends three numbers per token, not the
logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.parallel.agreement import member
from ringway.parallel.functions import Group, all_reduced, even_shares, require_all


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Group = None,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of the joined logits.

    `logits` are this rank's part along the last dimension, as a column-parallel head produces them. `target` has one
    dimension less, holds indices into the whole vocabulary, and is the same on every rank of the group. `vocabulary` is
    the size of the whole vocabulary, required if it is not divisible by the number of ranks. The computation is in
    fp32, or in the logits' dtype if that is double.
    """
    communicator = member(group, "vocabulary_parallel_cross_entropy")
    whole = logits.shape[-1] * communicator.size if vocabulary is None else vocabulary
    shares = even_shares(whole, communicator.size)
    _check(logits, target, shares, whole, communicator, ignore_index, reduction)
    start = sum(shares[: communicator.rank])
    flat_target = target.reshape(-1)
    losses: Tensor = _CrossEntropy.apply(
        logits.reshape(-1, logits.shape[-1]), flat_target, start, whole, ignore_index, label_smoothing, communicator
    )
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (flat_target != ignore_index).sum()


def _check(
    logits: Tensor,
    target: Tensor,
    shares: list[int],
    whole: int,
    communicator: Communicator,
    ignore_index: int,
    reduction: str,
) -> None:
    what = "vocabulary_parallel_cross_entropy"
    if logits.shape[:-1] != target.shape:
        raise UsageError(
            f"{what}: logits {list(logits.shape)} need a target {list(logits.shape[:-1])}, not {list(target.shape)}"
        )
    if logits.shape[-1] != shares[communicator.rank]:
        raise UsageError(
            f"{what}: rank {communicator.rank} of {communicator.size} has {logits.shape[-1]} logits per token, but "
            f"{shares[communicator.rank]} are its share of a vocabulary of {whole}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"{what}: reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    known = ((target >= 0) & (target < whole)) | (target == ignore_index)
    require_all(known, f"{what}: a target is outside the vocabulary of {whole}")


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        start: int,
        vocabulary: int,
        ignore_index: int,
        smoothing: float,
        communicator: Communicator,
    ) -> Tensor:
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        peak = all_reduced(values.amax(-1), communicator, "cross_entropy peak", "max")
        values = values - peak[:, None]
        own = target - start
        elsewhere = (own < 0) | (own >= values.shape[-1])
        own = own.masked_fill(elsewhere, 0)[:, None]
        hit = values.gather(1, own).squeeze(1).masked_fill(elsewhere, 0)
        smooth = values.sum(-1) if smoothing else torch.zeros_like(hit)
        weights = values.exp_()
        totals = all_reduced(torch.stack([weights.sum(-1), hit, smooth]), communicator, "cross_entropy sums")
        norm, hit, smooth = totals
        losses = norm.log() - (1 - smoothing) * hit - smoothing * smooth / vocabulary
        ctx.save_for_backward(weights.div_(norm[:, None]), own, elsewhere, target == ignore_index)
        ctx.smoothing, ctx.vocabulary, ctx.dtype = smoothing, vocabulary, logits.dtype
        return losses.masked_fill(target == ignore_index, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, own, elsewhere, ignored = ctx.saved_tensors
        change = probabilities - ctx.smoothing / ctx.vocabulary if ctx.smoothing else probabilities.clone()
        there = torch.full_like(gradient, ctx.smoothing - 1.0).masked_fill(elsewhere, 0)
        change.scatter_add_(1, own, there[:, None])
        change.mul_(gradient.masked_fill(ignored, 0)[:, None])
        return change.to(ctx.dtype), None, None, None, None, None, None
