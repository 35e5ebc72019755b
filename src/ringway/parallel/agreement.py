"""Checks that all ranks hold the same model, and gives them the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ringway.errors import CollectiveMismatch, UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.objects import ObjectChannel
from ringway.groups.world import NON_MEMBER, world
from ringway.torch_versions import actual_group, constant_in_graphs

Prepared = TypeVar("Prepared")
_REFUSED = "refused: "
_OVERLAPS = 1
"""torch's term for a tensor whose elements share memory."""


@constant_in_graphs
def member(group: object, what: str) -> Communicator:
    """The group's communicator. Raises on a rank outside the group, which must not call `what`."""
    group = actual_group(group)
    if group is not None and group == NON_MEMBER:
        raise UsageError(f"{what}: this rank is not in the given group; call it only on the group's ranks")
    return world.communicator(group)  # type: ignore[arg-type]


def describe(model: nn.Module) -> list[str]:
    """Describes the model, one line per parameter and buffer, in the order in which they are sent."""
    first_name: dict[int, str] = {}
    lines = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _require_settable("parameter", name, parameter)
        known = first_name.setdefault(id(parameter), name)
        if known != name:
            lines.append(f"parameter '{name}', shared with '{known}'")
        else:
            lines.append(
                f"parameter '{name}' {_shape(parameter)}, {'trained' if parameter.requires_grad else 'frozen'}"
            )
    for name, buffer in model.named_buffers():
        _require_settable("buffer", name, buffer)
        lines.append(f"buffer '{name}' {_shape(buffer)}")
    return lines


def _require_settable(kind: str, name: str, tensor: Tensor) -> None:
    """Raise if the tensor cannot take rank 0's values, which every rank receives."""
    if is_lazy(tensor):
        raise UsageError(f"{kind} '{name}' has no shape yet: call the model once before you register its hooks")
    if tensor.layout is not torch.strided:
        raise UsageError(f"{kind} '{name}' is {tensor.layout}, but only dense tensors can be sent; make it dense")
    if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
        raise UsageError(f"{kind} '{name}' has elements that share memory (it was expanded); make it .contiguous()")


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"


def agreed(communicator: Communicator, prepare: Callable[[], tuple[list[str], Prepared]], what: str) -> Prepared:
    """Run `prepare` and return what it made, once every rank has produced the same descriptive lines.

    If one rank's lines differ, or `prepare` raises on one, every rank gets an error, so that no rank waits for one that
    has left. Only digests travel while all ranks agree.
    """
    refusal: Exception | None = None
    try:
        lines, made = prepare()
    except Exception as error:
        lines, refusal = [f"{_REFUSED}{error}"], error
    by_rank = [] if _digests_agree(communicator, lines) else _gathered(communicator, lines)
    if refusal is not None:
        raise refusal
    for rank, theirs in zip(communicator.ranks, by_rank, strict=False):
        if theirs and theirs[0].startswith(_REFUSED):
            raise CollectiveMismatch(f"{what}: rank {rank} {theirs[0]}", sides={rank: theirs[0]})
    for rank, theirs in zip(communicator.ranks, by_rank, strict=False):
        if theirs != by_rank[0]:
            raise _difference(communicator.ranks[0], by_rank[0], rank, theirs, what)
    return made


def _digests_agree(communicator: Communicator, lines: Sequence[str]) -> bool:
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = torch.empty(communicator.size * len(digest), dtype=torch.uint8)
    communicator.all_gather_into_tensor(digests, mine, log_name="model digest")
    rows = digests.view(communicator.size, -1)
    return bool((rows == rows[0]).all())


def _gathered(communicator: Communicator, lines: list[str]) -> list[list[str]]:
    by_rank: list[list[str]] = ObjectChannel(communicator, world.max_object_bytes).all_gather(lines)
    return by_rank


def _difference(
    rank: int, lines: Sequence[str], other: int, other_lines: Sequence[str], what: str
) -> CollectiveMismatch:
    number = next(
        (i for i, (a, b) in enumerate(zip(lines, other_lines, strict=False)) if a != b),
        min(len(lines), len(other_lines)),
    )
    sides = {
        who: said[number] if number < len(said) else f"nothing (it has {len(said)} entries)"
        for who, said in ((rank, lines), (other, other_lines))
    }
    return CollectiveMismatch(
        f"{what}: the ranks were given different models or settings. Entry {number} on rank {rank}: {sides[rank]}; "
        f"on rank {other}: {sides[other]}. Pass the same ones, in the same order, on every rank",
        sides=sides,
    )


def broadcast(communicator: Communicator, tensors: Iterable[Tensor]) -> None:
    """Copy the values of the group's rank 0 to every rank."""
    works = [communicator.broadcast(t.detach(), group_src=0, async_op=True, log_name="model") for t in tensors]
    for work in works:
        if work is not None:
            work.wait()
