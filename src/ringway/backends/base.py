"""What a backend is.

A backend moves bytes for one group. It is one file in this folder, or a third party's class registered
with `register_backend`. It defines a method for each op it does natively, named as `Op.name` (`all_reduce`,
`all_gather_into_tensor`, ...); `backends/compose.py` makes the others out of those, once, when the
communicator is built.

Contract:

- A method takes one `Call` and returns a `Handle`; it has started, not finished, the collective. Where
  `call.async_op` is False it may finish the work before it returns and return `DONE`.
- The communicator has checked the call (types, devices, lengths, divisibility, ranks), so a backend does not.
  It hands over contiguous tensors only when `needs_contiguous` is set, and reductions that `can_reduce`
  accepts; the rest it converts before and after.
- Calls of one group come in issue order, from one thread at a time. The next may come before the last is done.
- A method or a handle raises errors of `ringway.errors` only; foreign ones are mapped in the backend's file.
- Methods release the GIL while they wait, and every wait ends by `call.timeout` (seconds) at the latest.
- `close` is idempotent, bounded, and safe while calls are under way: those end with an error. `abort` is a
  close that does not wait for anybody.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as c10d

from ringway.call import Call, Reduce, reduces

Completion = Callable[[BaseException | None], None]


class Handle(abc.ABC):
    """A collective under way."""

    source = -1
    """After a receive from any source: the rank of the group it came from."""

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Block until done, at most `timeout` seconds beyond the call's own deadline; raise what went wrong."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it has finished, well or not. Never blocks."""

    @abc.abstractmethod
    def when_done(self, completion: Completion) -> None:
        """Call `completion` once, on whichever thread finishes the work, or now if it has."""


class _Done(Handle):
    def wait(self, timeout: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True

    def when_done(self, completion: Completion) -> None:
        completion(None)


DONE: Handle = _Done()
"""The handle of a call that was finished before its method returned."""


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """What a backend is made from: the group's place in the job.

    `ranks` are the global ranks of the group's members in order; `store` is the group's own corner of the
    job's store; `name` is unique in the job; `timeout` in seconds is the default of every wait.
    """

    rank: int
    size: int
    ranks: Sequence[int]
    store: c10d.Store
    name: str
    timeout: float
    options: Any = None


class Backend(abc.ABC):
    """Moves bytes for one group."""

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    needs_contiguous: ClassVar[bool] = True

    def __init__(self, group: GroupInfo) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        """Whether this reduction of this dtype is native here; others are converted around the call."""
        return reduces(dtype, reduce)

    def can_move(self, dtype: torch.dtype) -> bool:
        """Whether data of this dtype may be handed over as it is; other dtypes are shown as bytes."""
        return True

    def close(self) -> None:  # noqa: B027 - a backend that holds nothing has nothing to close
        """End the backend. Idempotent and bounded."""

    def abort(self) -> None:
        """End the backend without waiting for anybody."""
        self.close()


def supports(backend: Backend | type[Backend], op_name: str) -> bool:
    """Whether the backend has the op natively."""
    return callable(getattr(backend, op_name, None))


__all__ = ["DONE", "Backend", "Call", "Completion", "GroupInfo", "Handle", "supports"]
