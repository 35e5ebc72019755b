"""Error feedback: what a codec loses in one step is added to the next.

Each rank keeps two residuals for a tensor: the worker's, as long as the tensor, and the server's, as long as
the shard that this rank serves. Without them a compressed mean is biased, and training on it does not
converge; with them the errors cancel over the steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.compress.auto import Forecast
from ringway.compress.background import Lane
from ringway.compress.finite import Verdict
from ringway.compress.kernels.kernels import RESIDUAL_DTYPES
from ringway.compress.report import Report
from ringway.compress.windows import Layout
from ringway.compress.workspace import Workspace
from ringway.errors import UsageError
from ringway.groups.world import NON_MEMBER, world

FORMAT = 1


class Slot:
    """The residuals of one tensor. Made by `feedback[key]`."""

    def __init__(self, owner: ErrorFeedback, key: Hashable) -> None:
        self.owner = owner
        self.key = key
        self.calls = 0
        self.busy = False
        self.worker: Tensor | None = None
        self.server: Tensor | None = None
        self.bound_to: object = None
        self.unread: list[Verdict] = []
        """How the last asynchronous call on a GPU went: looked at by the next one."""

    def prepare(self, layout: Layout, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The residuals for a tensor cut so, zeros at first; moved to the tensor's device if need be."""
        served = layout.served(rank)
        if self.worker is None or self.server is None:
            dtype = self.owner.residual_dtype
            self.worker = torch.zeros(layout.numel, dtype=dtype, device=device)
            self.server = torch.zeros(served.stop - served.start, dtype=dtype, device=device)
        if self.worker.numel() != layout.numel or self.server.numel() != served.stop - served.start:
            raise UsageError(
                f"the residual {self.key!r} is for a tensor of {self.worker.numel()} elements of which this rank "
                f"serves {self.server.numel()}, not of {layout.numel} with {served.stop - served.start}; give each "
                "tensor a key of its own (feedback['name']), or reset() it when the tensor changes"
            )
        if self.worker.device != device:
            self.worker, self.server = self.worker.to(device), self.server.to(device)
        return self.worker, self.server

    def bind(self, identity: object) -> None:
        """Start again from zero when what this slot stands for has changed (DDP rebuilt its buckets)."""
        if self.bound_to is not None and self.bound_to != identity:
            self.reset()
        self.bound_to = identity

    def reset(self) -> None:
        """Forget what was lost."""
        self.worker = self.server = None


class ErrorFeedback:
    """Owns the residuals of a group's compressed collectives.

    `feedback["layer1"]` are those of one tensor; a tensor handed to `compressed_all_reduce` with the
    feedback itself uses the one slot that has no name. `residual_dtype=torch.bfloat16` halves their memory
    and traffic, at the price of rounding what was lost to 8 bits.
    """

    def __init__(self, group: c10d.ProcessGroup | None = None, *, residual_dtype: torch.dtype = torch.float32) -> None:
        if residual_dtype not in RESIDUAL_DTYPES:
            raise UsageError(f"residuals are kept in float32 or bfloat16, not in {residual_dtype}")
        self.group = group
        self.residual_dtype = residual_dtype
        self.report = Report()
        self.workspace = Workspace()
        self.forecasts: dict[tuple[str, str], Forecast] = {}
        """What `codec="auto"` has measured, by device type and codec."""
        self._slots: dict[Hashable, Slot] = {}
        self._lanes: dict[str, Lane] = {}

    def __getitem__(self, key: Hashable) -> Slot:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Slot(self, key)
        return slot

    def __len__(self) -> int:
        return len(self._slots)

    def reset(self) -> None:
        """Forget everything that was lost."""
        for slot in self._slots.values():
            slot.reset()

    def lane(self, device: torch.device) -> Lane:
        """Where this feedback's asynchronous calls run. The first call for a device is collective."""
        if device.type not in self._lanes:
            self._lanes[device.type] = Lane.on(device, world.communicator(self.group), self.group)
        return self._lanes[device.type]

    def close(self) -> None:
        """Wait for asynchronous calls under way, and end their threads. May be called again."""
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
        self.workspace.clear()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals. Save every rank's: each holds what only it has lost."""
        communicator = world.communicator(self.group)
        return {
            "format": FORMAT,
            "rank": communicator.rank,
            "world_size": communicator.size,
            "slots": {
                key: {"worker": slot.worker.clone(), "server": slot.server.clone()}
                for key, slot in self._slots.items()
                if slot.worker is not None and slot.server is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take residuals back: this rank's own state, or the states of all ranks of a job of another size.

        At another size each worker gets the mean of all workers' residuals, and the servers' residuals are
        joined and split anew: what the job as a whole had lost is kept.
        """
        communicator = world.communicator(self.group)
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            if one.get("format") != FORMAT:
                raise UsageError(f"residuals of format {one.get('format')!r} cannot be read, only {FORMAT}")
        sizes = {one["world_size"] for one in states}
        if len(sizes) != 1:
            raise UsageError(f"the states come from jobs of different sizes: {sorted(sizes)}")
        (size,) = sizes
        by_rank = {one["rank"]: one for one in states}
        if size == communicator.size and communicator.rank in by_rank:
            slots = by_rank[communicator.rank]["slots"]
            residuals = {key: (slot["worker"], slot["server"]) for key, slot in slots.items()}
        elif len(by_rank) == size:
            ordered = [by_rank[rank]["slots"] for rank in range(size)]
            residuals = {
                key: _resharded([slots[key] for slots in ordered], communicator.size, communicator.rank)
                for key in ordered[0]
            }
        else:
            raise UsageError(
                f"these residuals are of rank {', '.join(map(str, sorted(by_rank)))} of {size}, and this is rank "
                f"{communicator.rank} of {communicator.size}: give the states of all {size} ranks, as a list"
            )
        self._slots.clear()
        for key, (worker, server) in residuals.items():
            slot = self[key]
            slot.worker = worker.to(self.residual_dtype, copy=True)
            slot.server = server.to(self.residual_dtype, copy=True)


def _resharded(slots: Sequence[Mapping[str, Tensor]], size: int, rank: int) -> tuple[Tensor, Tensor]:
    """What `rank` of a job of `size` ranks takes over from the ranks that held `slots`."""
    mean = torch.stack([slot["worker"].to(torch.float32) for slot in slots]).mean(dim=0)
    joined = torch.cat([slot["server"].to(torch.float32) for slot in slots])
    return mean, joined[Layout(joined.numel(), size).served(rank)].clone()


def as_slot(feedback: ErrorFeedback | Slot | None) -> Slot | None:
    """The slot that a caller meant."""
    if feedback is None or isinstance(feedback, Slot):
        return feedback
    if isinstance(feedback, ErrorFeedback):
        return feedback[None]
    raise UsageError(
        f"feedback= takes an ErrorFeedback, one of its slots (feedback['name']) or None, not {type(feedback).__name__}"
    )


def is_outside(group: object) -> bool:
    """Whether this is what torch gives a rank that is not in the group it made."""
    return group == NON_MEMBER
