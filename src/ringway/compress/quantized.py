"""ZeRO++'s collectives: reduce-scatter of gradients and all-gather of parameters, both in a codec's bytes.

Neither keeps residuals: a gradient shard is used once, and parameters are gathered again every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.compress.agreement import Agreement
from ringway.compress.codecs.codec import Codec, get_codec
from ringway.compress.kernels.base import VALUE_DTYPES, Kernels
from ringway.compress.kernels.select import kernels_for
from ringway.compress.windows import Window, headers, new_frames, statuses
from ringway.errors import NotFinite, UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.world import NON_MEMBER, world
from ringway.work import Finishing, Work, WorkHandle

Groups = c10d.ProcessGroup | tuple[c10d.ProcessGroup, c10d.ProcessGroup] | Mapping[str, Any] | None


@torch.no_grad()
def all_to_all_quant_reduce(
    tensors: Sequence[Tensor], groups: Groups = None, *, codec: str | Codec = "int4", kernels: str | None = None
) -> list[Tensor]:
    """Return this rank's share of each tensor's mean over all ranks, exchanged in a codec's bytes.

    Rank r of W gets elements [r * s, (r + 1) * s) of the flat mean, s = ceil(numel / W); the last shares may be
    shorter. `groups` is one group, or a pair (within the node, across nodes) for two hops, of which only the second
    leaves the node, with data smaller by the node's size; or DeepSpeed's dictionary of `local_i` and `global_j`.
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
            "a dictionary groups= must have exactly one 'local_i' and one 'global_j' group that this rank is in; "
            f"{sorted(groups)} has {', '.join(f'{len(found)} {kind}*' for kind, found in mine.items())}"
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
        return _hop(flat, -(-flat.numel() // only.size), only, engine, flat.numel())
    inside, across = stages
    ranks = inside.size * across.size
    share = -(-flat.numel() // ranks)
    # Order the shares by (rank in the node, node), so that the part each rank of a node collects is contiguous.
    padded = torch.nn.functional.pad(flat, (0, share * ranks - flat.numel()))
    by_place = padded.view(across.size, inside.size, share).transpose(0, 1).reshape(-1)
    of_node = _hop(by_place, across.size * share, inside, engine, flat.numel(), last=False)
    mine = _hop(of_node, share, across, engine, flat.numel())
    place = across.rank * inside.size + inside.rank
    return mine[: max(0, min(share, flat.numel() - place * share))]


def _hop(
    flat: Tensor, share: int, communicator: Communicator, engine: Kernels, numel: int, last: bool = True
) -> Tensor:
    """Each rank's share of the mean over one group. The last hop reports values that are not finite, on every rank.
    `numel` is the length of the caller's tensor, which `flat` may pad."""
    window = Window(flat.numel(), share, 0, share)
    frames = new_frames(engine.codec, communicator.size, share, flat.device)
    agreement = Agreement(communicator, "all_to_all_quant_reduce", engine.codec, flat.dtype, numel)
    heading = agreement.stamp(frames)
    scale = None
    if engine.codec.tensor_scale:
        scale = engine.codec.scale(engine.measure(flat, None), flat.numel())
    engine.encode(flat, None, window, frames, scale)
    flags = statuses(frames)
    flags.copy_(flags.amax().expand_as(flags))
    arriving = torch.empty_like(frames)
    communicator.all_to_all_single(arriving, frames, log_name="quantized")
    agreement.check(heading, headers(arriving).tolist())
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
    """Gather every rank's `input_tensor`, in rank order, into `output_tensor`, in a codec's bytes.

    All ranks get the same values, including their own: each value is what the codec preserved of it.
    """
    communicator = world.communicator(group)
    numel = input_tensor.numel()
    if output_tensor.numel() != numel * communicator.size or output_tensor.dtype != input_tensor.dtype:
        raise UsageError(
            f"quantized_all_gather: the output has {output_tensor.numel()} elements of {output_tensor.dtype}, but it "
            f"receives {communicator.size} inputs of {numel} elements of {input_tensor.dtype}"
        )
    if input_tensor.dtype not in VALUE_DTYPES or not output_tensor.is_contiguous():
        raise UsageError("quantized_all_gather takes float32, float16 or bfloat16, and a contiguous output")
    engine = kernels_for(get_codec(codec), input_tensor.device, kernels)
    flat = input_tensor.reshape(-1)
    frame = new_frames(engine.codec, 1, numel, flat.device)
    agreement = Agreement(communicator, "quantized_all_gather", engine.codec, flat.dtype, numel)
    heading = agreement.stamp(frame)
    if numel:
        scale = None
        if engine.codec.tensor_scale:
            scale = engine.codec.scale(engine.measure(flat, None), numel)
        engine.encode(flat, None, Window(numel, numel, 0, numel), frame, scale)
    gathered = frame.new_empty(communicator.size, frame.shape[1])

    def finish() -> None:
        agreement.check(heading, headers(gathered).tolist())
        if numel:
            window = Window(numel * communicator.size, numel, 0, numel)
            engine.decode(gathered, window, output_tensor.view(-1))
            _raise_not_finite("quantized_all_gather", gathered, communicator)

    work = communicator.all_gather_into_tensor(gathered, frame, async_op=async_op, log_name="quantized")
    if work is None:
        finish()
        return None
    return Work(Finishing(WorkHandle(work), finish), [output_tensor], lambda error: error)
