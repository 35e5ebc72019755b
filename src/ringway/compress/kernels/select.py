"""Selects the kernels for a codec and device."""

from __future__ import annotations

import functools
import os

import torch

from ringway.compress.codecs.codec import Codec
from ringway.compress.codecs.topk import TopK
from ringway.compress.kernels.base import KERNELS_VARIABLE, Kernels
from ringway.compress.kernels.gpu import TritonKernels
from ringway.compress.kernels.gpu_topk import TritonTopK
from ringway.compress.kernels.native import NativeKernels
from ringway.compress.kernels.reference import ReferenceKernels
from ringway.errors import UsageError, nearest


def kernels_for(codec: Codec, device: torch.device, name: str | None = None) -> Kernels:
    """The fastest kernels for this codec and device, unless `name` or the environment forces others."""
    return _kernels_for(codec, device, name or os.environ.get(KERNELS_VARIABLE) or "auto")


@functools.lru_cache(maxsize=256)
def _kernels_for(codec: Codec, device: torch.device, chosen: str) -> Kernels:
    fused = (NativeKernels, TritonTopK if isinstance(codec, TopK) else TritonKernels)
    for kind in fused:
        if chosen in ("auto", kind.name):
            reason = kind.unfit(codec, device)
            if reason is None:
                return kind(codec)
            if chosen == kind.name:
                raise UsageError(f"kernels '{chosen}' cannot serve codec {codec.spec} on {device}: {reason}")
    names = ("auto", "reference", *(kind.name for kind in fused))
    if chosen not in names:
        raise UsageError(f"kernels {chosen!r} are unknown{nearest(chosen, names)}")
    return ReferenceKernels(codec)
