"""What a backend is.

A backend moves bytes for one group. It is a folder here, or a third party's class registered with `register_backend`.
It defines a method for each op it does natively, named like `Op.name` (`all_reduce`, `all_gather_into_tensor`, ...).
`backends/compose.py` composes the other ops out of those, once, when the communicator is built.

Contract:

- A method takes one `Call` and returns a `Handle`. It starts the collective and need not finish it. If `call.async_op`
  is False it may finish the work and return `DONE`.
- The communicator has checked the call (types, devices, lengths, divisibility, ranks); the backend need not. With
  `needs_contiguous` it passes contiguous tensors only. It passes only reductions that `can_reduce` accepts, and
  converts the rest before and after the call.
- Calls of one group come in issue order, from one thread at a time. The next may come before the last is done.
- Methods and handles raise only errors of `ringway.errors`; the backend maps foreign errors.
- Methods release the GIL while they wait, and every wait ends by `call.timeout` (seconds) at the latest.
- `close` is idempotent, bounded, and safe while calls are in flight: those end with an error. `abort` is a `close`
  that does not wait.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as c10d

import ringway._core as _core
from ringway.backends.process import Process
from ringway.call import Call, Reduce, reduces
from ringway.work import DONE, Completion, Handle


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """What a backend is made from: the group's place in the job.

    `ranks` are the global ranks of the group's members in order; `store` is the group's own part of the job's store;
    `name` is unique in the job; `timeout` in seconds is the default of every wait; `options` are the user's
    `pg_options`; `split_from` is torch's nccl of a larger group, if the new one shares its communicator; `mark`
    distinguishes the group from earlier ones in the same store, once its backend is made; `bound_device` is the device
    that the user bound the group to; `process` holds what all groups of this process share.
    """

    rank: int
    size: int
    ranks: Sequence[int]
    store: c10d.Store
    name: str
    timeout: float
    options: Any = None
    split_from: Any = None
    mark: str = ""
    bound_device: torch.device | None = None
    process: Process = field(default_factory=Process, repr=False, compare=False)


class Health(Protocol):
    """What a backend sees of its group's health."""

    fault: BaseException | None
    """What ended the group."""

    def check(self) -> None:
        """Raise if the group has failed, so that its waits can no longer succeed."""

    def fail(self, error: BaseException) -> BaseException:
        """A call failed, maybe after it had returned to its caller. Returns what to raise."""

    def fail_in_flight(self, error: BaseException) -> BaseException:
        """A call in flight failed. Returns what to raise: what ended the group, if it was not this call."""

    def device_failed(self, error: BaseException) -> None:
        """This process can no longer use its device."""

    def interrupted_by(self, error: BaseException) -> bool:
        """`error` leaves a call that may not have started. Whether nothing of it was sent."""


class _LikeTorch(abc.ABCMeta):
    """torch has a class `Backend` too, whose members are names: `Backend.NCCL`, `Backend("gloo")`. Programs written for
    it find those here."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Backend:
            return c10d.Backend(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(c10d.Backend, name)


class Backend(metaclass=_LikeTorch):
    """Moves bytes for one group."""

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    needs_contiguous: ClassVar[bool] = True
    origins: ClassVar[Mapping[str, str]] = {}
    """Describes ops that have a method here but are not native to the library, by name."""
    torch_group: Any = None
    """torch's backend object for the same group, if there is one."""
    own_routes: Any = None
    """How each op runs (a `compose.Routes`), if the backend decides that itself instead of by its methods."""
    coalesces: ClassVar[bool] = False
    """Whether calls between `start_coalescing` and `end_coalescing` start together, at the end."""
    notices_deaths: ClassVar[bool] = True
    """Whether a call fails soon after another rank's process has ended."""
    says_when_it_sends: ClassVar[bool] = False
    """Whether its methods start everything that they send through `_core.pass_on`."""
    abandoned = False
    """Whether the backend still runs calls that were given up: `close` must not wait for them."""

    def __init__(self, group: GroupInfo) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        """Whether this reduction of this dtype is native here. Others are converted around the call."""
        return reduces(dtype, reduce)

    def can_move(self, dtype: torch.dtype) -> bool:
        """Whether data of this dtype may be passed unchanged. Other dtypes are passed as bytes."""
        return True

    def belongs_to(self, record: _core.GroupRecord, health: Health) -> None:
        """The backend's group keeps this record, and this health, a weak proxy. Called before the first call, and
        perhaps again."""

    def fast_paths(self, record: _core.GroupRecord, health: Health) -> Sequence[_core.FastPath]:
        """The backend's fast paths; none by default.

        A fast path runs sums and moves of plain tensors without ringway's general path. Its `run` takes the op's code,
        outputs, inputs, the peer (root, destination or source; -1 for none), whether the call is asynchronous, a tag
        and the reduction. It gets asynchronous calls and other reductions than SUM only of the ops in its `async_ops`.
        It records the call in `record` and returns the Work of an asynchronous call, or True for a synchronous one that
        is done, which on a CUDA stream means that the current stream waits for it. It returns False for a call that is
        not for it, and leaves no trace then: nothing is numbered, recorded or sent. Errors that only show after `run`
        returned go to `health`, which is a weak proxy: keep it, not its methods.
        """
        return ()

    def set_timeout(self, seconds: float) -> None:
        """Sets the limit for everything that has none of its own: the fast path, and messages if the library takes no
        limit per message. A `Call` carries its own."""

    def start_coalescing(self, device: torch.device) -> None:
        """Open a block of calls that start together."""

    def end_coalescing(self, device: torch.device) -> Handle:
        """Start the calls of the block."""
        return DONE

    def failed(self, error: BaseException) -> None:
        """The group has failed for good. A backend whose calls in flight would wait forever ends them here."""

    def settle(self) -> None:
        """Wait until no call of this backend is in flight on a device. May raise what went wrong."""

    def close(self) -> None:
        """End the backend. Idempotent and bounded."""

    def abort(self) -> None:
        """End the backend without waiting."""
        self.close()


def supports(backend: Backend | type[Backend], op_name: str) -> bool:
    """Whether the backend has the op natively."""
    return callable(getattr(backend, op_name, None))


__all__ = ["DONE", "Backend", "Call", "Completion", "GroupInfo", "Handle", "Health", "supports"]
