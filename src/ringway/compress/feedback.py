"""Error feedback: what a codec loses in one step is added to the next.

Each rank keeps two residuals for a tensor: the worker's, as long as the tensor, and the server's, as long as the shard
that this rank serves. Without them, a compressed mean is biased and training on it does not converge; with them, the
errors cancel over the steps.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.compress.auto import Forecast
from ringway.compress.background import Background
from ringway.compress.kernels.base import RESIDUAL_DTYPES
from ringway.compress.report import Report
from ringway.compress.windows import Sharding
from ringway.compress.workspace import Workspace
from ringway.errors import UsageError
from ringway.groups.world import NON_MEMBER, world
from ringway.work import Handle

FORMAT = 1


class Deferred(Protocol):
    """The outcome of a call that did not wait for the device."""

    def read(self) -> None:
        """Wait for it, and raise if values were not finite."""


class Slot:
    """The residuals of one tensor. Made by `feedback[key]`."""

    def __init__(self, owner: ErrorFeedback, key: Hashable) -> None:
        self.owner = owner
        self.key = key
        self.calls = 0
        self.lock = threading.Lock()
        """Held by a running call: calls with the same residuals run one after the other."""
        self.worker: Tensor | None = None
        self.server: Tensor | None = None
        self.bound_to: object = None
        self.unread: Deferred | None = None
        """The outcome of the last asynchronous call on a GPU: the next call reads it."""
        self.pending: Handle | None = None
        """The latest asynchronous call."""

    def settle(self) -> None:
        """Wait for the latest asynchronous call, so that the next one comes after it on every rank. Its error is for
        those who wait for its own Work."""
        pending, self.pending = self.pending, None
        if pending is not None:
            with suppress(Exception):
                pending.wait()

    def read_outcome(self) -> None:
        """Raise if the last call did not wait for the device, and its values were not finite."""
        unread, self.unread = self.unread, None
        if unread is not None:
            unread.read()

    def prepare(self, sharding: Sharding, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The residuals for a tensor with this sharding. Created as zeros; moved to the tensor's device if needed."""
        served = sharding.served(rank)
        dtype = self.owner.residual_dtype
        if self.worker is None:
            self.worker = torch.zeros(sharding.numel, dtype=dtype, device=device)
        if self.server is None:
            self.server = torch.zeros(served.stop - served.start, dtype=dtype, device=device)
        if self.worker.numel() != sharding.numel or self.server.numel() != served.stop - served.start:
            raise UsageError(
                f"the residual {self.key!r} is for a tensor of {self.worker.numel()} elements of which this rank "
                f"serves {self.server.numel()}, but the tensor has {sharding.numel} and this rank serves "
                f"{served.stop - served.start}; give each tensor its own key (feedback['name']), or reset() it when "
                "the tensor changes"
            )
        if self.worker.device != device:
            self.worker, self.server = self.worker.to(device), self.server.to(device)
        return self.worker, self.server

    def bind(self, identity: object) -> None:
        """Start again from zero if the slot's content has changed (DDP rebuilt its buckets)."""
        if self.bound_to is not None and self.bound_to != identity:
            self.reset()
        self.bound_to = identity

    def put_back(self, where: slice, result: Tensor) -> None:
        """Keep a part of the latest result that the caller does not use: the next call sends it again.

        The result is what all ranks' residuals gave away together, so each worker takes back all of it: the mean over
        the workers, plus the servers' residuals, is then what it was.
        """
        if self.worker is not None:
            with torch.inference_mode():
                self.worker[where].add_(torch.where(torch.isfinite(result), result, 0))

    def reset(self) -> None:
        """Discard the residuals."""
        self.settle()
        self.worker = self.server = None

    def copies(self) -> tuple[Tensor | None, Tensor | None]:
        """Copies of the residuals, for `restore`."""
        self.settle()
        worker, server = (None if residual is None else residual.clone() for residual in (self.worker, self.server))
        return worker, server

    def restore(self, worker: Tensor | None, server: Tensor | None) -> None:
        """Go back to earlier residuals. Where there is none, it starts from zero."""
        self.settle()
        self.worker, self.server = worker, server


class ServedModel:
    """The model whose DDP buckets a feedback serves, known by its parameters. Slots have the buckets' numbers, so a
    second model would use the first one's residuals."""

    def __init__(self) -> None:
        self._parameters: dict[int, Tensor] = {}
        """By id. Kept alive: the id of a deleted tensor may be reused."""
        self._indices: set[int] = set()
        self._complete = False

    def serve(self, parameters: Sequence[Tensor], index: int, is_last: bool) -> None:
        """Take the parameters of a bucket. All of a model's are known after its first backward."""
        unknown = [parameter for parameter in parameters if id(parameter) not in self._parameters]
        if unknown and (self._complete or index in self._indices):
            raise UsageError(
                "this ErrorFeedback already serves the buckets of another DistributedDataParallel model; give each "
                "model its own ddp_hook() and ErrorFeedback, or reset() the feedback when the model is replaced"
            )
        self._parameters.update((id(parameter), parameter) for parameter in unknown)
        self._indices.add(index)
        self._complete |= is_last


class ErrorFeedback:
    """Owns the residuals of a group's compressed collectives.

    `feedback["layer1"]` holds those of one tensor. Passing the feedback itself to `compressed_all_reduce` uses a single
    unnamed slot. `residual_dtype=torch.bfloat16` halves the residuals' memory and traffic, but rounds them to 8 bits.
    """

    def __init__(self, group: c10d.ProcessGroup | None = None, *, residual_dtype: torch.dtype = torch.float32) -> None:
        if residual_dtype not in RESIDUAL_DTYPES:
            raise UsageError(f"residuals are kept in float32 or bfloat16, not {residual_dtype}")
        self.group = group
        self.residual_dtype = residual_dtype
        self.report = Report()
        self.workspace = Workspace()
        self.forecasts: dict[tuple[str, str], Forecast] = {}
        """Times measured for `codec="auto"`, by device type and codec."""
        self.model = ServedModel()
        self._slots: dict[Hashable, Slot] = {}
        self._backgrounds: dict[str, Background] = {}

    def __getitem__(self, key: Hashable) -> Slot:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Slot(self, key)
        return slot

    def __len__(self) -> int:
        return len(self._slots)

    def reset(self) -> None:
        """Discard all residuals. Another model may use the feedback from now on."""
        self._settle()
        self.model = ServedModel()
        for slot in self._slots.values():
            slot.reset()

    def background(self, device: torch.device) -> Background:
        """Where this feedback's asynchronous calls run. The first call for a device is collective."""
        if device.type not in self._backgrounds:
            self._backgrounds[device.type] = Background.on(device, world.communicator(self.group), self.group)
        return self._backgrounds[device.type]

    def _settle(self) -> None:
        """Wait for all asynchronous calls: they change residuals while they run. Their errors are for those who wait
        for their Works."""
        for background in self._backgrounds.values():
            if background.latest is not None:
                with suppress(Exception):
                    background.latest.wait()

    def close(self) -> None:
        """Wait for pending asynchronous calls and end their threads. Safe to call more than once."""
        backgrounds, self._backgrounds = self._backgrounds, {}
        for background in backgrounds.values():
            background.close()
        self.workspace.clear()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals. Save those of every rank: each rank's are different."""
        communicator = world.communicator(self.group)
        self._settle()
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

    def load_own_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore residuals if `state` is this rank's own. Otherwise they start from zero, with a warning if there were
        any."""
        communicator = world.communicator(self.group)
        self.reset()
        if state is None:
            return
        whose = state["rank"], state["world_size"]
        if whose == (communicator.rank, communicator.size):
            self.load_state_dict(state)
        else:
            warnings.warn(
                f"the state holds the residuals of rank {whose[0]} of {whose[1]}, but this is rank "
                f"{communicator.rank} of {communicator.size}: residuals start from zero. To keep them, save every "
                "rank's state and pass all of them to optimizer.feedback.load_state_dict([...]).",
                stacklevel=3,
            )

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore residuals from this rank's own state, or from the states of all ranks of a job of another size.

        If the size differs, each worker gets the mean of all workers' residuals, and the servers' residuals are joined
        and split again, so the job as a whole loses nothing.
        """
        communicator = world.communicator(self.group)
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            if one.get("format") != FORMAT:
                raise UsageError(f"cannot read residuals of format {one.get('format')!r}, only of format {FORMAT}")
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
                f"these residuals belong to rank {', '.join(map(str, sorted(by_rank)))} of {size}, but this is rank "
                f"{communicator.rank} of {communicator.size}: pass the states of all {size} ranks, as a list"
            )
        self.reset()  # and keep the slots themselves: the program may hold them
        for key, (worker, server) in residuals.items():
            slot = self[key]
            slot.worker = worker.to(self.residual_dtype, copy=True)
            slot.server = server.to(self.residual_dtype, copy=True)


def _resharded(slots: Sequence[Mapping[str, Tensor]], size: int, rank: int) -> tuple[Tensor, Tensor]:
    """The residuals of `rank` in a job of `size` ranks, from those of the ranks that saved `slots`."""
    mean = torch.stack([slot["worker"].to(torch.float32) for slot in slots]).mean(dim=0)
    joined = torch.cat([slot["server"].to(torch.float32) for slot in slots])
    return mean, joined[Sharding(joined.numel(), size).served(rank)].clone()


def as_slot(feedback: ErrorFeedback | Slot | None) -> Slot | None:
    """The slot to use for the caller's `feedback` argument."""
    if feedback is None or isinstance(feedback, Slot):
        return feedback
    if isinstance(feedback, ErrorFeedback):
        return feedback[None]
    raise UsageError(
        f"feedback= takes an ErrorFeedback, one of its slots (feedback['name']) or None, not {type(feedback).__name__}"
    )


def is_outside(group: object) -> bool:
    """Whether this is the value torch returns to a rank outside the group it created."""
    return group == NON_MEMBER
