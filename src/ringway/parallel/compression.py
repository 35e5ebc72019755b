"""How data-parallel hooks use a codec: one residual per bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as c10d
from torch import Tensor

from ringway.compress import ErrorFeedback, compressed_all_reduce, get_codec
from ringway.compress.kernels.base import VALUE_DTYPES
from ringway.parallel.buckets import Bucket
from ringway.work import Work


class Compression:
    """A codec with its error feedback, for the buckets of one model."""

    def __init__(self, codec: Any, group: c10d.ProcessGroup | None) -> None:
        self._codec = codec if _is_auto(codec) else get_codec(codec)
        self._feedback = ErrorFeedback(group)
        self._group = group

    def takes(self, flat: Tensor) -> bool:
        """Whether the codec supports the dtype. Other buckets are sent uncompressed."""
        return flat.dtype in VALUE_DTYPES

    def start(self, bucket: Bucket) -> Work | None:
        """Infinities and NaNs become NaNs, so that a gradient scaler finds them, as it would without a codec."""
        return compressed_all_reduce(
            bucket.flat,
            self._feedback[bucket.label],
            self._codec,
            self._group,
            async_op=True,
            not_finite="propagate",
        )

    def put_back(self, bucket: Bucket, where: slice) -> None:
        """Return a part of the bucket's result that is not used to the residuals."""
        self._feedback[bucket.label].put_back(where, bucket.flat[where])

    def state_dict(self) -> dict[str, Any]:
        return self._feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self._feedback.load_state_dict(state)

    def close(self) -> None:
        self._feedback.close()


def codec_name(codec: Any) -> str:
    """The codec's name and block. Raises if there is no such codec."""
    if not _is_auto(codec):
        return get_codec(codec).spec
    name, _, used = codec.partition(":")
    return f"{name}:{get_codec(used or 'onebit').spec}"


def _is_auto(codec: Any) -> bool:
    """Whether a measurement decides: "auto", or "auto:int8" with the codec to use if it helps."""
    return isinstance(codec, str) and codec.partition(":")[0] == "auto"
