"""`shm`: ranks of one host over shared memory. The engine is native (csrc/shm/engine.h). This file joins the group,
passes calls on, and maps the engine's faults to ringway's errors.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.autograd import profiler

import ringway._core as _core
from ringway.backends.base import Backend, GroupInfo, Health
from ringway.backends.shm.errors import Faults
from ringway.backends.shm.fast_path import ShmFastPath
from ringway.backends.shm.handle import FOREVER, ShmHandle
from ringway.backends.shm.join import SharedSegment, share_segment
from ringway.backends.shm.profiler import profiled
from ringway.call import DTYPE_CODE, UNKNOWN_DTYPE, Call, Reduce
from ringway.work import DONE, Handle


class ShmBackend(Backend):
    """One rank of a group whose ranks share a host."""

    name: ClassVar[str] = "shm"
    needs_contiguous: ClassVar[bool] = True
    says_when_it_sends: ClassVar[bool] = True

    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self._faults = Faults(group)
        self._limit = _finite(group.timeout)
        self._native = share_segment(group, self._attach)
        group.process.part(_OpenBackends).add(self)

    def _attach(self, segment: SharedSegment) -> _core.ShmGroup:
        self._peers = segment.peers  # so that later groups find them
        return _core.ShmGroup(segment.fd, self.rank, segment.peers, segment.cpus, self._limit, self._faults.throw)

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        return _core.shm_can_reduce(DTYPE_CODE.get(dtype, UNKNOWN_DTYPE), int(reduce))

    def fast_paths(self, record: _core.GroupRecord, health: Health) -> Sequence[_core.FastPath]:
        return (ShmFastPath(self.group, self._native, self._faults, record, health),)

    def set_timeout(self, seconds: float) -> None:
        self._limit = _finite(seconds)
        self._native.set_timeout(self._limit)

    def _collective(self, call: Call) -> Handle:
        return profiled(call, self._start) if profiler._is_profiler_enabled else self._start(call)

    def _start(self, call: Call) -> Handle:
        task = self._native.collective(call, self._timeout(call))
        return DONE if task is None else ShmHandle(task, call, self._faults)

    broadcast = all_reduce = reduce = all_gather = all_gather_into_tensor = gather = scatter = _collective
    reduce_scatter = reduce_scatter_tensor = all_to_all = all_to_all_single = barrier = _collective

    def _message(self, call: Call) -> Handle:
        return profiled(call, self._start_message) if profiler._is_profiler_enabled else self._start_message(call)

    def _start_message(self, call: Call) -> Handle:
        return self._under_way(call, self._native.message(call, self._timeout(call)))

    def _under_way(self, call: Call, task: _core.ShmTask) -> ShmHandle:
        """The handle of a message; a synchronous one is done."""
        handle = ShmHandle(task, call, self._faults)
        if not call.async_op:
            self._wait_for(handle)
        return handle

    send = recv = _message

    def _wait_for(self, handle: ShmHandle) -> None:
        """Waits for a synchronous message. An interrupted one is taken back, or it would receive what is meant for the
        next. If it has begun to move, the group is over."""
        try:
            handle.wait()
        finally:
            if not handle.done() and not handle.withdraw():
                self._native.interrupted()

    def _timeout(self, call: Call) -> float:
        return self._limit if call.timeout is None else _finite(call.timeout)

    def failed(self, error: BaseException) -> None:
        """A rank may wait inside shared memory for one whose call failed elsewhere: in another backend of the group."""
        self._native.fail()

    def close(self) -> None:
        self._native.close()
        self._peers = []

    def abort(self) -> None:
        self._native.abort()
        self._peers = []


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else FOREVER


class _OpenBackends:
    """Closes what is open when the interpreter exits: the engine's threads must end before it does."""

    def __init__(self) -> None:
        self._backends: weakref.WeakSet[ShmBackend] = weakref.WeakSet()
        atexit.register(self._close)

    def add(self, backend: ShmBackend) -> None:
        self._backends.add(backend)

    def _close(self) -> None:
        for backend in list(self._backends):
            backend.close()
