"""Compressed all_reduces as candidates. Their results are inexact, so they are compared with the true mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import ringway
from ringway.bench.cases import Place, WrongResult
from ringway.bench.runner import Candidate
from ringway.compress import Codec, ErrorFeedback, OneBit, TopK, compressed_all_reduce, get_codec

_LARGEST_ERRORS = {"int8": 0.02, "fp8": 0.08, "int4": 0.15, "topk": 0.25}
"""By codec, relative to the mean, over all elements that were kept: about twice of what rounding twice makes."""
_ERROR = 0.25
"""Of other codecs."""
_SCALE_ERROR = 0.05
_KEPT = 0.9
_SIGN_PERIOD = 3


def compressed(name: str, codec: str, place: Place, finish: Callable[[], object] | None) -> Candidate:
    """A compressed all_reduce on one backend."""
    original = _signed(place.values(place.rank, 0, place.whole))
    tensor = original.clone()
    feedback = ErrorFeedback(place.group)

    def prepare() -> None:
        tensor.copy_(original)

    def verify() -> None:
        """With a feedback of its own: what is left of earlier calls would be added to the values."""
        prepare()
        compressed_all_reduce(tensor, ErrorFeedback(place.group), codec, group=place.group)
        mean = _signed(place.total(0, place.whole)).float() / place.size
        seen = ringway.allgather_object((fault(get_codec(codec), tensor.float(), mean), float(tensor.double().sum())))
        told = next((told for told, _ in seen if told), None)
        if told is None and len({total for _, total in seen}) > 1:
            told = "the ranks have different results"
        if told is not None:
            raise WrongResult(f"{name} {codec}: all_reduce of {place.nbytes} bytes: {told}")

    run = lambda: compressed_all_reduce(tensor, feedback, codec, group=place.group)  # noqa: E731
    return Candidate(f"{name} {codec}", run, prepare, finish, verify)


def _signed(values: Tensor) -> Tensor:
    """Some are made negative, the same on every rank. So all ranks have the mean's signs, and its order by size."""
    places = torch.arange(values.numel(), device=values.device)
    return torch.where(places // _SIGN_PERIOD % 2 == 0, values, -values)


def fault(codec: Codec, result: Tensor, mean: Tensor) -> str | None:
    """What is wrong with a result, by its codec. No element of the mean is zero."""
    if isinstance(codec, OneBit):
        if wrong := int((result.sign() != mean.sign()).sum()):
            return f"{wrong} of {mean.numel()} signs are wrong"
        power = 2 if codec.tensor_scale else 1
        scale, wanted = (float(values.abs().pow(power).mean()) ** (1 / power) for values in (result, mean))
        return None if abs(scale - wanted) <= _SCALE_ERROR * wanted else f"the scale is {scale:g} and not {wanted:g}"
    kept = result != 0
    share = float(kept.float().mean())
    wanted = _KEPT * (codec.rate if isinstance(codec, TopK) else 1.0)
    if share < wanted:
        return f"{share:.2%} of the elements are not zero, and at least {wanted:.2%} should be"
    error = float(torch.linalg.vector_norm(result[kept] - mean[kept]) / torch.linalg.vector_norm(mean[kept]))
    limit = _LARGEST_ERRORS.get(codec.name, _ERROR)
    return None if error <= limit else f"the relative error is {error:.3g}, and at most {limit:g} is right"
