"""nccl: torch's group, with named calls, mapped errors and a bounded end.

A synchronous call runs on the current stream, an asynchronous one on torch's. Reductions that NCCL does not have are
exchanged and computed on the device. A wait only orders the stream, as torch's does. A thread polls the device to
learn that a collective has finished, so nothing is synchronized. If the group fails, because a peer died, a call is
overdue or the ranks called different things, its communicator is aborted: that frees the stream, and the next call
raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as c10d
from torch import Tensor

import ringway._core as _core
from ringway.backends.base import GroupInfo, Health
from ringway.backends.compose import reduced, reduced_share
from ringway.backends.nccl.connections import Connections, Members
from ringway.backends.nccl.fast_path import Driver, NcclFastPath
from ringway.backends.nccl.group import Aborts, make_nccl
from ringway.backends.nccl.handles import (
    Barrier,
    Coalesced,
    NcclHandle,
    Works,
    cuda_device,
    on_current_stream,
)
from ringway.backends.torch.backend import TorchBackend, options_for
from ringway.backends.torch.handles import mapped
from ringway.call import ALL_REDUCE_COALESCED, Call, Reduce
from ringway.errors import CommTimeout, PeerLost, RingwayError, UsageError
from ringway.references import weak_method
from ringway.threads import start
from ringway.torch_versions import set_async
from ringway.work import DONE, Handle

_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_REDUCED = _FLOATS | {torch.int8, torch.uint8, torch.int32, torch.int64}
_MOVED = _REDUCED | {torch.bool}
_BITWISE = frozenset({Reduce.BAND, Reduce.BOR, Reduce.BXOR})
_LEAVE_SECONDS = 10.0
_SETTLE_SECONDS = 0.00005
_NOTICE_SECONDS = 1.0
"""How long a rank whose group was aborted by another may take to notice what happened."""
_EXPLAIN_SECONDS = 30.0
"""How long it may take to explain what it has noticed."""
_CONNECT_SECONDS = 60.0
"""The least time that ranks have for their first call."""
_SLOW_SHUTDOWN = (
    "group %s: NCCL does not close its communicator. It waits for the CUDA graphs that captured the group's calls: "
    "delete them before you destroy the group"
)


class NcclBackend(TorchBackend):
    """One group on torch's ProcessGroupNCCL."""

    name = "nccl"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    coalesces: ClassVar[bool] = True
    notices_deaths: ClassVar[bool] = False

    def __init__(self, info: GroupInfo, group: Any = None, destroyed: Callable[[], bool] | None = None) -> None:
        """For a group that torch made, `destroyed` says whether torch has ended it."""
        self._ours = destroyed is None
        self.torch_group = group or make_nccl(info)
        super().__init__(info, self.torch_group)
        self._works = Works(info.process, info.timeout if self._ours else None)
        self._works.group_error = weak_method(self._reported_error)
        self._works.spoilt_by_another = weak_method(self._spoilt_by_another)
        self._connections = Connections(info, self.torch_group)
        self._closed = False
        self._destroyed = destroyed
        self._fast_path: NcclFastPath | None = None
        self._record: _core.GroupRecord | None = None
        self._health: Health | None = None
        self._sound = (0, 0)
        """How many collectives and messages were known to have ended well."""
        self._captures = False
        """Whether a call of the general path was captured. Replays of a graph have no numbers."""
        self._limit: float | None = None
        self._abort_once = threading.Lock()
        """Who aborts the communicator locks it, and keeps it locked."""

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        if reduce in _BITWISE:
            return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        if reduce is Reduce.AVG:
            return dtype in _FLOATS
        # NCCL's own PREMUL_SUM does not scale bfloat16 in a group of one, so inputs are multiplied here.
        return dtype in _REDUCED and reduce is not Reduce.PREMUL_SUM

    def can_move(self, dtype: torch.dtype) -> bool:
        return dtype in _MOVED

    def belongs_to(self, record: _core.GroupRecord, health: Health) -> None:
        self._record, self._health = record, health

    def fast_paths(self, record: _core.GroupRecord, health: Health) -> Sequence[_core.FastPath]:
        watch = self.group.process.part(Driver).watch
        if watch is None:
            return ()
        summed = [dtype for dtype in _REDUCED if self.can_reduce(dtype, Reduce.SUM)]
        self._fast_path = NcclFastPath(
            self.group, self._works, self._connections, self._group, record, health, watch, summed, _FLOATS, _MOVED
        )
        self._fast_path.set_timeout(self._limit)
        return (self._fast_path,)

    def _all_ended(self) -> bool:
        """Whether no call is in flight on the device."""
        return self._works.all_ended() and not (self._fast_path and self._fast_path.pending())

    def set_timeout(self, seconds: float) -> None:
        if self._ours:
            self._works.limit = seconds
            if self._fast_path is not None:
                self._fast_path.set_limit(seconds)
            return
        self._limit = seconds
        if self._fast_path is not None:
            self._fast_path.set_timeout(seconds)

    def _options(self, kind: Any, call: Call, **values: Any) -> Any:
        # The deadline of a call on a group of ours is kept by the device watch: torch would abort the group at it.
        options = options_for(kind, replace(call, timeout=None) if self._ours else call, **values)
        set_async(options, call.async_op)
        return options

    def all_reduce(self, call: Call) -> Handle:
        if call.reduce in _BITWISE:
            call.outputs[0].copy_(self._reduced(call))
            return self._started(call, None)
        options = self._options(c10d.AllreduceOptions, call, reduceOp=self._reduce_op(call))
        return self._start(call, self._group.allreduce, list(call.outputs), options)

    def barrier(self, call: Call) -> Handle:
        options = self._options(c10d.BarrierOptions, call)
        set_async(options, True)  # its work is what blocks the caller
        # torch would guess a device from the rank.
        call.device = call.device or self.group.bound_device or torch.device("cuda", torch.cuda.current_device())
        options.device = call.device
        if not self._ours:
            return self._start(call, self._group.barrier, options)
        work = self._issued(call, self._group.barrier, options)
        return Barrier(work, call, self._works, self._works.issued(call, work), captured=False)

    def _issued(self, call: Call, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._works.aborted_with is not None:
            raise self._works.aborted_with
        self._connect(call)
        if self._works.aborted_with is not None:
            raise self._works.aborted_with
        began = time.monotonic()
        try:
            return _core.pass_on(method, *arguments)
        except RuntimeError as error:
            raise mapped(self._works.aborted_with or error, call, time.monotonic() - began) from error

    def _connect(self, call: Call) -> None:
        """Makes the communicator that the call needs. A captured call is left to torch: CUDA knows a capture by its
        thread."""
        inside = self._works.coalesced is not None
        if not inside and self._connections.needs(call.op, call.peer) and not _is_captured(call):
            members, began = self._connections.members(call.op, call.peer), time.monotonic()
            try:
                self._make_communicator(members, _device(call), call)
            except RingwayError:
                raise
            except RuntimeError as error:  # not a signal handler's
                raise mapped(self._works.aborted_with or error, call, time.monotonic() - began) from error

    def _make_communicator(self, members: Members, device: torch.device | None, call: Call | None) -> None:
        """`call` needs it, or a coalesced block."""
        # Not a call's own timeout: NCCL may take longer to connect, and torch does not count that either.
        limit = max(self._works.limit or self.group.timeout, _CONNECT_SECONDS)

        def look() -> None:
            if self._works.aborted_with is not None:
                raise self._works.aborted_with
            if self._closed:
                raise RingwayError(f"the group {self.group.name} was destroyed while NCCL connected its ranks")
            if call is not None and call.check is not None:
                call.check()

        if not self._connections.make(members, device, limit, look):
            what = f"coalesced calls of group {self.group.name}" if call is None else call.describe()
            text = f"{what}: NCCL has not connected the ranks within {limit:g} s"
            if call is None:
                raise CommTimeout(text, waited=limit)
            raise CommTimeout(text, op=call.op.name, sequence=call.sequence, waited=limit)

    def _start(self, call: Call, method: Callable[..., Any], *arguments: Any) -> Handle:
        work = self._issued(call, method, *arguments)
        if self._works.coalesced is not None:
            self._works.coalesced.append(Coalesced(call))
            return self._works.coalesced[-1]
        return self._started(call, work)

    def _started(self, call: Call, work: Any) -> Handle:
        # A call captured into a graph cannot be queried.
        captured = _is_captured(call)
        self._captures = self._captures or captured
        if work is None:
            return on_current_stream(self._works, call, captured)
        number = -1 if captured else self._works.issued(call, work)
        return NcclHandle(work, call, self._works, number, captured)

    # Coalesced blocks: NCCL starts their calls together, so a receive before a send cannot wait for it.

    def start_coalescing(self, device: torch.device) -> None:
        if self._works.aborted_with is not None:
            raise self._works.aborted_with
        if self._connections.needs(ALL_REDUCE_COALESCED, -1) and not torch.cuda.is_current_stream_capturing():
            try:
                self._make_communicator(None, _with_index(device), None)
            except RingwayError:
                raise
            except RuntimeError as error:
                raise RingwayError(f"coalesced calls of group {self.group.name} failed: {error}") from error
        self._group._start_coalescing()
        self._works.coalesced = []
        if self._fast_path is not None:
            self._fast_path.hold(1)

    def end_coalescing(self, device: torch.device) -> Handle:
        calls, self._works.coalesced = self._works.coalesced or [], None
        if self._fast_path is not None:
            self._fast_path.hold(-1)
        try:
            work = self._group._end_coalescing()
        except RuntimeError as error:
            failure = RingwayError(f"coalesced calls failed: {error}")
            for call in calls:
                call.fail(failure)
            raise failure from error
        if not calls:
            return DONE
        block = self._started(calls[-1].call, work)
        for call in calls:
            call.start(block)
        return block

    # NCCL has no bitwise reductions: data is exchanged and reduced here, all of it on the current stream.

    def _exchange(self, call: Call) -> Callable[[Tensor, Tensor], None]:
        if self._works.coalesced is not None:
            raise UsageError(f"{call.describe()}: a bitwise reduction takes several steps and cannot be coalesced")
        plain = replace(call, input_splits=None, output_splits=None)

        def exchange(source: Tensor, target: Tensor) -> None:
            super(NcclBackend, self).all_to_all_single(
                replace(plain, inputs=[_bytes(source)], outputs=[_bytes(target)])
            ).wait()

        return exchange

    def _reduced(self, call: Call) -> Tensor:
        def gather(share: Tensor, whole: Tensor) -> None:
            super(NcclBackend, self).all_gather_into_tensor(
                replace(call, inputs=[_bytes(share)], outputs=[_bytes(whole)])
            ).wait()

        return reduced(call, self._exchange(call), gather)

    def reduce(self, call: Call) -> Handle:
        if call.reduce not in _BITWISE:
            return super().reduce(call)
        total = self._reduced(call)
        if self.rank == call.peer:
            call.outputs[0].copy_(total)
        return self._started(call, None)

    def reduce_scatter(self, call: Call) -> Handle:
        if call.reduce not in _BITWISE:
            return super().reduce_scatter(call)
        joined = replace(call, inputs=[torch.cat([t.reshape(-1) for t in call.inputs])])
        return self.reduce_scatter_tensor(joined)

    def reduce_scatter_tensor(self, call: Call) -> Handle:
        if call.reduce not in _BITWISE:
            return super().reduce_scatter_tensor(call)
        call.outputs[0].copy_(reduced_share(call, self._exchange(call)).view(call.outputs[0].shape))
        return self._started(call, None)

    # The end

    def settle(self) -> None:
        works, record = self._works, self._record
        calls = None if record is None else (record.collectives, record.messages)
        while not (works.closed or works.aborted_with or self._has_settled()):
            if self._fast_path is not None:
                self._fast_path.settle()
                if self._has_settled():
                    break
            time.sleep(_SETTLE_SECONDS)
        if works.closed or works.aborted_with:
            return
        error = works.failure(self.group)
        if error is not None:
            with suppress(ReferenceError):  # another thread has dropped the group
                raise error if self._health is None else self._health.fail(error)
        elif calls is not None and self._spoilt_by_another() is None:
            self._sound = calls

    def _has_settled(self) -> bool:
        """In this order: a call that has failed says so before it counts as ended."""
        return self._all_ended() and self._works.failing is None

    def _spoilt_by_another(self, call: Call | None = None) -> BaseException | None:
        """The group's error, if another rank has aborted it: its kernel may have sent garbage, with which calls of this
        rank ended, or this call."""
        works, record, health = self._works, self._record, self._health
        first = None if record is None else record.aborted_from
        if first is None or record is None or health is None:
            return None
        if call is not None and call.op.collective:
            collectives, messages = call.sequence + 1, 0
        else:
            collectives, messages = record.collectives, record.messages
        replays = call is None and (self._captures or (self._fast_path is not None and self._fast_path.captures))
        if collectives <= first and not (first == 0 and messages) and not replays:
            return None  # they were sound
        began = time.monotonic()
        while not (works.closed or works.aborted_with):  # what this rank sees itself says more
            if time.monotonic() - began > (_NOTICE_SECONDS if works.failing is None else _EXPLAIN_SECONDS):
                break
            time.sleep(_NOTICE_SECONDS / 200)
        with suppress(ReferenceError):  # another thread has dropped the group
            if works.aborted_with is None and not works.closed:
                health.fail(PeerLost(f"another rank has aborted the group {self.group.name}"))
            return works.aborted_with or health.fault
        return works.aborted_with

    def _announce_abort(self) -> None:
        """Before anything is aborted. What this rank has not settled may be spoilt for others."""
        if self._record is not None and self._connections.may_exist:
            collectives, messages = self._sound
            self._record.announce_abort(collectives if self._record.messages == messages else 0)

    def _reported_error(self) -> BaseException | None:
        try:
            state = self._group.get_error()
        except Exception:  # a torch without it, or a group that has ended
            return None
        name = getattr(state, "name", "SUCCESS")
        if name == "TIMEOUT":  # of a call whose options had one
            return CommTimeout("torch's watchdog reports that a call has not ended in time")
        return None if name == "SUCCESS" else PeerLost(f"NCCL reports {name}: the connection to another rank is gone")

    def failed(self, error: BaseException) -> None:
        """Calls in flight would wait for ever, and hold up the stream: ends them. torch's own watchdog looks after the
        groups that torch made."""
        if self._ours and not self._closed:
            self._works.aborted_with = self._works.aborted_with or error
            if not self._abort_once.acquire(blocking=False):  # another thread reports the failure, too
                return
            self._announce_abort()
            if self._fast_path is not None:
                self._fast_path.fail()
            self._connections.give_up()
            aborts = self.group.process.part(Aborts)
            if self._connections.under_way:  # its thread may keep an abort waiting
                _start_or_leave(partial(aborts.abort, self._group))
            else:
                aborts.abort(self._group)

    def close(self) -> None:
        """torch's shutdown waits for calls in flight, forever if a rank is gone. So calls that do not finish in time
        are aborted."""
        if self._closed:
            return
        self._closed = self._works.closed = True
        if self._works.aborted_with is not None:
            return
        if self._connections.under_way:
            self._abort_aside()
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        while not self._all_ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self._all_ended():
            self._abort_group()
        elif self._ours:  # without a shutdown its destructor would complain
            self._shut_down()

    def _shut_down(self) -> None:
        slow = threading.Timer(_LEAVE_SECONDS, logging.getLogger("ringway").error, [_SLOW_SHUTDOWN, self.group.name])
        slow.daemon = True
        slow.start()
        with suppress(RuntimeError):
            self._group.shutdown()
        slow.cancel()

    def abort(self) -> None:
        if not self._closed:
            self._closed = self._works.closed = True
            if self._works.aborted_with is None:
                if self._connections.under_way:
                    self._abort_aside()
                else:
                    self._abort_group()

    def _abort_aside(self) -> None:
        """A thread waits inside NCCL for a rank, and may keep an abort waiting."""
        self._announce_abort()
        self._connections.give_up()
        _start_or_leave(self._abort_group)

    def _abort_group(self) -> None:
        if self._destroyed is not None and self._destroyed():  # by torch: NCCL would free the communicator twice
            return
        if not self._abort_once.acquire(blocking=False):
            return
        if self._fast_path is not None:
            self._fast_path.settle()  # the watch may not have looked yet
        if not self._all_ended():
            self._works.aborted_with = RingwayError("the group was aborted")
            self._announce_abort()
        if self._fast_path is not None:
            self._fast_path.fail()
        with suppress(RuntimeError):  # a group that never connected has nothing to abort
            self._group.abort()


def _start_or_leave(abort: Callable[[], None]) -> None:
    """Aborts on another thread. While the interpreter exits there is none, and the process takes the group along."""
    with suppress(RuntimeError):
        start("ringway-nccl-abort", abort)


def _is_captured(call: Call) -> bool:
    return cuda_device(call) is not None and torch.cuda.is_current_stream_capturing()


def _device(call: Call) -> torch.device | None:
    return cuda_device(call) or _with_index(call.device)


def _with_index(device: torch.device | None) -> torch.device | None:
    """The device by its number: another thread has another current device."""
    if device is None or str(device) != device.type:
        return device
    return torch.device(device.type, torch.cuda.current_device())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
