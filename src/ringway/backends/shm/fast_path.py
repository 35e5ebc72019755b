"""shm's fast path: one native step goes from plain tensors to the engine. It also starts asynchronous messages."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property

import torch.distributed as c10d
from torch import Tensor
from torch.autograd import profiler

import ringway._core as _core
from ringway.backends.base import GroupInfo, Health
from ringway.backends.shm.errors import Faults
from ringway.backends.shm.handle import DONE_WELL, FOREVER, ShmHandle
from ringway.call import RECV, SEND, Call
from ringway.references import weak_method
from ringway.work import CompletionCell, Sent, Work


class ShmFastPath(_core.ShmFastPath):
    """The native side makes the Works of messages, and calls `_failed`."""

    def __init__(
        self, info: GroupInfo, native: _core.ShmGroup, faults: Faults, record: _core.GroupRecord, health: Health
    ) -> None:
        self.info = info
        self.faults = faults
        self._native = native
        self._health = health
        # Weakly: a message may end after the group.
        super().__init__(native, record, vars(profiler), MessageWork, Sent, weak_method(self._failed))

    def _failed(self, outcome: int) -> None:
        self.what_to_raise(self.faults.error(outcome, self._native.fault()))

    def what_to_raise(self, error: BaseException | None) -> BaseException | None:
        """The error of a message, or what ended the group before."""
        if error is None:
            return None
        try:
            return self._health.fail_in_flight(error)
        except ReferenceError:  # the group is gone
            return error


class MessageWork(Work):
    """The Work of a message that the fast path has started. The native side records its end. What `Work` needs for rare
    questions is made when asked."""

    __slots__ = ("_path", "_task", "_tensor")
    _path: ShmFastPath
    _task: _core.ShmTask
    _tensor: Tensor
    _watched = False

    __init__ = c10d.Work.__init__

    @cached_property
    def _handle(self) -> ShmHandle:  # type: ignore[override]
        sends, peer, tag, sequence = self._task.message()
        call = Call(SEND if sends else RECV, peer=peer, tag=tag, async_op=True, sequence=sequence)
        if sends:
            call.inputs = (self._tensor,)
        else:
            call.outputs = (self._tensor,)
        info = self._path.info
        call.group, call.ranks, call.size = info.name, info.ranks, info.size
        return ShmHandle(self._task, call, self._path.faults)

    @property
    def _cell(self) -> CompletionCell:  # type: ignore[override]
        made = self.__dict__
        return made.get("_end") or made.setdefault(
            "_end", CompletionCell(self._path.what_to_raise)
        )  # one for all threads

    @property
    def _result(self) -> list[Tensor]:  # type: ignore[override]
        sends, *_ = self._task.message()
        return [] if sends else [self._tensor]

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        task = self._task
        if timeout is None and task.wait(FOREVER) and task.outcome() == DONE_WELL:
            return True
        return super().wait(timeout)
