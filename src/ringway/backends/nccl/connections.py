"""How NCCL's communicators are made, so that a rank that dies meanwhile is named.

torch makes a communicator in the first call that needs it. There NCCL waits for the communicator's ranks in a function
that nothing ends: not an abort, not a signal. So a small call of ringway's own comes first, on a thread of its own,
with its own tensor and stream. The program's thread waits for that thread, and the death of a rank, a mismatch or a
timeout ends its wait. If NCCL never returns, the thread is left to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as c10d

from ringway.backends.base import GroupInfo
from ringway.call import Op
from ringway.store import Deadline
from ringway.threads import start
from ringway.torch_versions import set_async

_SLICE = 0.01
"""Seconds between two looks whether the group has failed."""

Members = tuple[int, int] | None
"""Whose communicator it is: that of two ranks, for their messages; or None, that of the whole group."""


class Connecting:
    """A call on a thread, which may never return."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._returned = threading.Event()
        self._error: BaseException | None = None

    def begin(self) -> None:
        start("ringway-nccl-connect", self._run)

    def _run(self) -> None:
        call, self._call = self._call, None  # it may hold this object's owner
        try:
            if call is not None:
                call()
        except BaseException as error:
            self._error = error
        self._returned.set()

    @property
    def under_way(self) -> bool:
        return not self._returned.is_set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self, seconds: float, check: Callable[[], None] | None = None) -> bool:
        """Whether it returned in time. Raises its error, or what `check` raises."""
        deadline = Deadline(seconds)
        while not self._returned.wait(_SLICE):
            if check is not None:
                check()
            if deadline.left() == 0 and self.under_way:
                return False
        if self._error is not None:
            raise self._error
        return True


class Connections:
    """The communicators of one group, for the device that its calls are on."""

    def __init__(self, info: GroupInfo, group: Any) -> None:
        """`group` is torch's. If it has no `connects_later`, or is connected by now, torch needs no help."""
        self._rank, self._size = info.rank, info.size
        self._group = group
        self._lock = threading.Lock()
        self._begun: dict[Members, Connecting] = {}
        self._made: set[Members] = set()
        self._given_up = False

    def members(self, op: Op, peer: int) -> Members:
        """Whose communicator torch takes for a call outside a coalesced block. Inside, it is that of the group."""
        return None if op.collective else (min(self._rank, peer), max(self._rank, peer))

    def needs(self, op: Op, peer: int) -> bool:
        """Whether torch would make a communicator in this call. A receive from any rank is refused by torch."""
        connects = self._size > 1 and getattr(self._group, "connects_later", False) is True
        return connects and (op.collective or peer >= 0) and self.members(op, peer) not in self._made

    @property
    def under_way(self) -> bool:
        """Whether a thread is inside NCCL, which may wait for a rank."""
        return any(each.under_way for each in list(self._begun.values()))

    @property
    def may_exist(self) -> bool:
        """Whether NCCL may have made a communicator."""
        return bool(self._begun) or getattr(self._group, "connects_later", False) is not True

    def give_up(self) -> None:
        """The group has ended. If NCCL still makes a communicator, that is aborted: torch does not know it before."""
        self._given_up = True

    def make(
        self, members: Members, device: torch.device | None, seconds: float, check: Callable[[], None] | None
    ) -> bool:
        """Makes a communicator, for which each of its ranks comes here. False if it took too long. After an interrupt,
        the next call goes on with the same attempt."""
        with self._lock:
            attempt = self._begun.get(members)
            if attempt is None:
                attempt = self._begun[members] = Connecting(lambda: self._first_call(members, device))
                try:
                    attempt.begin()
                except RuntimeError:  # there is no thread to be had
                    del self._begun[members]
                    raise
        try:
            if not attempt.wait(seconds, check):
                return False
        finally:
            with self._lock:
                if attempt.failed and self._begun.get(members) is attempt:  # the next call tries again, as in torch
                    del self._begun[members]
        self._made.add(members)
        return True

    def _first_call(self, members: Members, device: torch.device | None) -> None:
        self._issue(members, device)
        if self._given_up:
            with suppress(RuntimeError):
                self._group.abort()

    def _issue(self, members: Members, device: torch.device | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream(device))
        tensor = torch.zeros(1, device=device)
        if members is None:
            options = c10d.AllreduceOptions()
            set_async(options, False)
            self._group.allreduce([tensor], options)
        elif self._rank == members[0]:
            self._group.send([tensor], members[1], 0)
        else:
            self._group.recv([tensor], members[0], 0)
