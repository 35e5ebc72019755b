"""Whether all ranks hold the same model, and how they come to hold the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ringway.communicator import Communicator
from ringway.errors import CollectiveMismatch, UsageError
from ringway.objects import ObjectChannel
from ringway.world import NON_MEMBER, world


def member(group: object, what: str) -> Communicator:
    """The group's communicator; a rank outside the group has no business with `what`."""
    if group is not None and group == NON_MEMBER:
        raise UsageError(f"{what}: this rank is not in the given group; call it on the group's ranks only")
    return world.communicator(group)  # type: ignore[arg-type]


def describe(model: nn.Module) -> list[str]:
    """The model in words, a line for each parameter and buffer, in the order in which they are sent."""
    first_name: dict[int, str] = {}
    lines = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first_name.setdefault(id(parameter), name)
        if known != name:
            lines.append(f"parameter '{name}', shared with '{known}'")
        else:
            lines.append(
                f"parameter '{name}' {_shape(parameter)}, {'trained' if parameter.requires_grad else 'frozen'}"
            )
    return lines + [f"buffer '{name}' {_shape(buffer)}" for name, buffer in model.named_buffers()]


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"


def require_same(communicator: Communicator, lines: Sequence[str], what: str) -> None:
    """Raises on every rank where one rank's lines differ from rank 0's. Only digests travel while all agree."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = torch.empty(communicator.size * len(digest), dtype=torch.uint8)
    communicator.all_gather_into_tensor(digests, mine, log_name="model digest")
    rows = digests.view(communicator.size, -1)
    if bool((rows == rows[0]).all()):
        return
    everybody: list[list[str]] = ObjectChannel(communicator, world.max_object_bytes).all_gather(list(lines))
    for place, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise _difference(communicator.ranks[0], everybody[0], communicator.ranks[place], theirs, what)


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
        f"{what}: the ranks hold different models. Entry {number} on rank {rank}: {sides[rank]}; "
        f"on rank {other}: {sides[other]}. Build the same model, in the same order, on every rank",
        sides=sides,
    )


def broadcast(communicator: Communicator, tensors: Iterable[Tensor]) -> None:
    """Gives every rank the values that the group's rank 0 has."""
    works = [communicator.broadcast(t.detach(), group_src=0, async_op=True, log_name="model") for t in tensors]
    for work in works:
        if work is not None:
            work.wait()
