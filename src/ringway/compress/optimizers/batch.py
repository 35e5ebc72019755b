"""Parameters of an optimizer that travel as one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringway.compress.feedback import Slot


@dataclass
class Batch:
    """Parameters of one group and device that travel as one tensor."""

    group: dict[str, Any]
    parameters: list[Tensor]
    used: list[bool]
    """Whether a parameter takes part in this exchange. In a plain exchange, all do."""
    slot: Slot | None
    """The residuals; None if gradients travel uncompressed."""
    flat: Tensor

    @classmethod
    def of(cls, group: dict[str, Any], parameters: list[Tensor], used: list[bool], slot: Slot | None) -> Batch:
        """A batch whose flat tensor is zero."""
        numel = sum(parameter.numel() for parameter in parameters)
        flat = torch.zeros(numel, dtype=torch.float32, device=parameters[0].device)
        return cls(group, parameters, used, slot, flat)

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that take part, and their parts of the flat tensor."""
        parts = self.flat.split([parameter.numel() for parameter in self.parameters])
        return [
            (parameter, part.view(parameter.shape))
            for parameter, part, used in zip(self.parameters, parts, self.used, strict=True)
            if used
        ]

    def put_unused_back(self) -> None:
        """Return the results of parameters that did not take part to the residuals that they came from."""
        assert self.slot is not None
        start = 0
        for parameter, used in zip(self.parameters, self.used, strict=True):
            where = slice(start, start + parameter.numel())
            if not used:
                self.slot.put_back(where, self.flat[where])
            start = where.stop
