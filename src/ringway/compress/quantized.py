"""ZeRO++'s collectives: gradients reduced and scattered, parameters gathered, both in a codec's bytes.

Neither keeps residuals: a gradient shard is used once, and a parameter gathered anew every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.compress.codecs.codec import Codec, get_codec
from ringway.compress.kernels.choice import kernels_for
from ringway.compress.kernels.kernels import VALUE_DTYPES, Kernels
from ringway.compress.windows import Window, new_frames, statuses
from ringway.errors import NotFinite, UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.world import NON_MEMBER, world
from ringway.work import Finishing, Work, WorkHandle

Groups = c10d.ProcessGroup | tuple[c10d.ProcessGroup, c10d.ProcessGroup] | Mapping[str, Any] | None


@torch.no_grad()
def all_to_all_quant_reduce(
    tensors: Sequence[Tensor], groups: Groups = None, *, codec: str | Codec = "int4", kernels: str | None = None
) -> list[Tensor]:
    """The mean of each tensor over all ranks, of which this rank gets its share, in a codec's bytes.

    Rank r of W gets elements [r * s, (r + 1) * s) of the flat mean, s = ceil(numel / W); the last shares may be
    shorter. `groups` is one group, or a pair (inside the node, across the nodes) for two hops of which only
    the second, a node's size smaller, leaves the node; or DeepSpeed's dictionary of `local_i` and `global_j`.
    """
    stages = [world.communicator(group) for group in _stages(groups)]
    chosen = get_codec(codec)
    return [_reduce_scatter(tensor, stages, chosen, kernels) for tensor in tensors]


def _stages(groups: Groups) -> list[c10d.ProcessGroup | None]:
    if isinstance(groups, tuple):
        return list(groups)
    if not isinstance(groups, Mapping):
        return [groups]
    mine = {
        kind: [group for name, group in groups.items() if name.startswith(kind) and group != NON_MEMBER]
        for kind in ("local_", "global_")
    }
    if any(len(found) != 1 for found in mine.values()):
        raise UsageError(
            "groups= as a dictionary holds one 'local_i' and one 'global_j' that this rank is in, and among "
            f"{sorted(groups)} there are {', '.join(f'{len(found)} {kind}*' for kind, found in mine.items())}"
        )
    return [mine["local_"][0], mine["global_"][0]]


def _reduce_scatter(tensor: Tensor, stages: list[Communicator], codec: Codec, kernels: str | None) -> Tensor:
    if tensor.dtype not in VALUE_DTYPES:
        raise UsageError(f"all_to_all_quant_reduce takes float32, float16 and bfloat16, not {tensor.dtype}")
    engine = kernels_for(codec, tensor.device, kernels)
    flat = tensor.reshape(-1)
    if flat.numel() == 0:
        return flat.clone()
    if len(stages) == 1:
        only = stages[0]
        return _hop(flat, -(-flat.numel() // only.size), only, engine)
    inside, across = stages
    ranks = inside.size * across.size
    share = -(-flat.numel() // ranks)
    # Shares in the order (rank inside the node, node): what one rank of a node collects is then contiguous.
    padded = torch.nn.functional.pad(flat, (0, share * ranks - flat.numel()))
    by_place = padded.view(across.size, inside.size, share).transpose(0, 1).reshape(-1)
    of_node = _hop(by_place, across.size * share, inside, engine, last=False)
    mine = _hop(of_node, share, across, engine)
    place = across.rank * inside.size + inside.rank
    return mine[: max(0, min(share, flat.numel() - place * share))]


def _hop(flat: Tensor, share: int, communicator: Communicator, engine: Kernels, last: bool = True) -> Tensor:
    """Each rank's share of the mean over one group. What is not finite is told by the last hop, to everybody."""
    window = Window(flat.numel(), share, 0, share)
    frames = new_frames(engine.codec, communicator.size, share, flat.device)
    scale = None
    if engine.codec.tensor_scale:
        scale = engine.codec.scale(engine.measure(flat, None), flat.numel())
    engine.encode(flat, None, window, frames, scale)
    flags = statuses(frames)
    flags.copy_(flags.amax().expand_as(flags))
    arriving = torch.empty_like(frames)
    communicator.all_to_all_single(arriving, frames, log_name="quantized")
    count = window.count(communicator.rank)
    mean = torch.empty(count, dtype=flat.dtype, device=flat.device)
    engine.decode_mean(arriving, count, mean)
    if last:
        _raise_not_finite("all_to_all_quant_reduce", arriving, communicator)
    return mean


def _raise_not_finite(op: str, frames: Tensor, communicator: Communicator) -> None:
    guilty = [rank for rank, status in enumerate(statuses(frames).tolist()) if status]
    if guilty:
        raise NotFinite(
            f"{op}: rank {guilty[0]} of group {communicator.name} had NaN or infinity in its values", rank=guilty[0]
        )


@torch.no_grad()
def quantized_all_gather(
    output_tensor: Tensor,
    input_tensor: Tensor,
    codec: str | Codec = "int8",
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    kernels: str | None = None,
) -> Work | None:
    """Every rank's `input_tensor`, one after the other, into `output_tensor`, in a codec's bytes.

    All ranks get the same values, this rank's own included: what comes out is what the codec kept.
    """
    communicator = world.communicator(group)
    numel = input_tensor.numel()
    if output_tensor.numel() != numel * communicator.size or output_tensor.dtype != input_tensor.dtype:
        raise UsageError(
            f"quantized_all_gather: the output holds {output_tensor.numel()} elements of {output_tensor.dtype}, and "
            f"{communicator.size} inputs of {numel} of {input_tensor.dtype} are to go into it"
        )
    if input_tensor.dtype not in VALUE_DTYPES or not output_tensor.is_contiguous():
        raise UsageError("quantized_all_gather takes float32, float16 and bfloat16, and a contiguous output")
    engine = kernels_for(get_codec(codec), input_tensor.device, kernels)
    flat = input_tensor.reshape(-1)
    frame = new_frames(engine.codec, 1, numel, flat.device)
    if numel:
        scale = None
        if engine.codec.tensor_scale:
            scale = engine.codec.scale(engine.measure(flat, None), numel)
        engine.encode(flat, None, Window(numel, numel, 0, numel), frame, scale)
    gathered = frame.new_empty(communicator.size, frame.shape[1])

    def finish() -> None:
        if numel:
            window = Window(numel * communicator.size, numel, 0, numel)
            engine.decode(gathered, window, output_tensor.view(-1))
            _raise_not_finite("quantized_all_gather", gathered, communicator)

    work = communicator.all_gather_into_tensor(gathered, frame, async_op=async_op, log_name="quantized")
    if work is None:
        finish()
        return None
    return Work(Finishing(WorkHandle(work), finish), [output_tensor], lambda error: error)
