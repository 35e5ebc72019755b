"""Knows which parameters are split, and over which group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringway.errors import UsageError
from ringway.groups.communicator import Communicator

_split_over: Any = WeakTensorKeyDictionary()
"""The communicator over whose ranks each split parameter is split."""


def mark_split(parameter: Tensor, over: Communicator | None) -> None:
    """Mark that the ranks of a group hold different parts of the parameter; with None, that it is whole."""
    if over is None:
        _split_over.pop(parameter, None)
    else:
        _split_over[parameter] = over


def split_over(parameter: Tensor) -> Communicator | None:
    """The group whose ranks hold different parts of the parameter; None if it is whole."""
    found: Communicator | None = _split_over.get(parameter)
    return found


def is_split(parameter: Tensor) -> bool:
    return split_over(parameter) is not None


def refuse_parts(what: str, over: Communicator | None, communicator: Communicator) -> None:
    """Raise if ranks of `communicator` hold different parts of `what`, which is split over the ranks of `over`."""
    if over is not None and len(set(over.ranks) & set(communicator.ranks)) > 1:
        raise UsageError(
            f"{what} is split over the ranks {over.ranks}, so it cannot be averaged over the ranks "
            f"{communicator.ranks}; pass the group of the ranks that hold the same part, as in "
            'mesh.get_group("data"), or use ringway.initialize, which makes the groups'
        )


def refuse_split_parameters(parameters: Iterable[Tensor], communicator: Communicator) -> None:
    """Raise if ranks of this group hold different parts of one of the parameters, whose names are not known here."""
    if _split_over:
        for number, parameter in enumerate(parameters):
            refuse_parts(f"parameter {number}, of shape {list(parameter.shape)},", split_over(parameter), communicator)
