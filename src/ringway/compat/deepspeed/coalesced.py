"""The collectives of deepspeed.runtime.comm.coalesced_collectives. Unlike ringway's own, they return the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringway.api import collectives as api
from ringway.compress.quantized import all_to_all_quant_reduce as quantized


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """This rank's flat share of each tensor's mean. Values are divided before they are summed, so that the sum of half
    precision values does not overflow. The inputs stay unchanged."""
    member = api.communicator(group)
    return member.reduce_scatter_coalesced([tensor / member.size for tensor in tensors])


@torch.no_grad()
def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, Any]) -> list[Tensor]:
    """This rank's flat share of each tensor's mean, exchanged as int4.

    As in deepspeed, tensors of one dimension, and those whose size is not a multiple of twice the world's, are
    exchanged uncompressed. `groups` maps `local_i` and `global_j` to groups; with `{}` there is one hop over the world.
    """
    multiple = 2 * api.communicator(None).size
    return [
        reduce_scatter_coalesced([tensor])[0]
        if tensor.dim() == 1 or tensor.numel() % multiple
        else quantized([tensor], groups or None)[0]
        for tensor in tensors
    ]
