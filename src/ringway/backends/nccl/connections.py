"""How NCCL's communicators are made, so that a rank that dies meanwhile is named.

torch makes a communicator in the first call that needs it. There NCCL waits for the communicator's ranks in a function
that nothing ends: not an abort, not a signal. So the ranks first wait for each other in the store, and then the call is
issued on a thread of its own. The death of a rank, a mismatch or a timeout ends the caller's wait. If NCCL never
returns, the thread is left to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ringway.backends.base import GroupInfo
from ringway.backends.exchange import mark_of
from ringway.backends.nccl.handles import cuda_device, overdue
from ringway.call import Call, Op
from ringway.store import Deadline
from ringway.threads import start

_LOOK = 0.01
"""Seconds between two looks whether the group has failed."""

Pair = tuple[int, ...] | None
"""The two ranks of a communicator for messages; None for that of the whole group."""


class Connections:
    """The communicators of one group that is not bound to a device: torch connects groups that are when it makes
    them."""

    def __init__(self, info: GroupInfo) -> None:
        self._info = info
        self._made: set[Pair] = set()
        self._mark = ""
        self.waiting = 0
        """How many calls wait for NCCL to make a communicator."""

    def pair(self, op: Op, peer: int, coalesced: bool = False) -> Pair:
        """Whose communicator torch takes for a call. A message has one of its own, except in a coalesced block."""
        return None if op.collective or coalesced else tuple(sorted((self._info.rank, peer)))

    def has(self, pair: Pair) -> bool:
        return self._info.size == 1 or pair in self._made

    def make(self, pair: Pair, call: Call, limit: float, issue: Callable[[], Any], same_thread: bool) -> Any:
        """What `issue` returns, in which torch makes the communicator. Every rank of the communicator comes here with
        a call. Raises what ended the group, or CommTimeout. NCCL and CUDA know coalesced blocks and captures by their
        thread, so these stay on it."""
        deadline = Deadline(limit)
        self._meet(pair, call, deadline)
        issued = issue() if same_thread else self._issue_on_a_thread(call, deadline, issue)
        self._made.add(pair)
        return issued

    def _meet(self, pair: Pair, call: Call, deadline: Deadline) -> None:
        store = self._info.store
        self._mark = self._mark or mark_of(self._info)
        where = f"ringway/nccl/{self._mark}/{pair or 'all'}"
        store.set(f"{where}/{self._info.rank}", "")
        keys = [f"{where}/{rank}" for rank in pair or range(self._info.size)]

        def all_came() -> bool | None:
            _check(call)
            return store.check(keys) or None

        if not deadline.poll(all_came):
            raise overdue(call, deadline.seconds)

    def _issue_on_a_thread(self, call: Call, deadline: Deadline, issue: Callable[[], Any]) -> Any:
        device = cuda_device(call)
        stream = None if device is None else torch.cuda.current_stream(device)
        ended = threading.Event()
        outcome: list[Any] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    outcome.append(issue())
            except BaseException as error:
                failure.append(error)
            finally:
                ended.set()

        self.waiting += 1
        try:
            start("ringway-nccl-connect", run)
            while not ended.wait(_LOOK):
                _check(call)
                if deadline.left() == 0 and not ended.is_set():
                    raise overdue(call, deadline.seconds)
        finally:
            self.waiting -= 1
        if failure:
            raise failure[0]
        return outcome[0]


def _check(call: Call) -> None:
    if call.check is not None:
        call.check()
