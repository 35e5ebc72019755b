"""Handles for NCCL's collectives: how a stream waits for them, and how to learn that they have ended."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ringway.backends.base import GroupInfo
from ringway.backends.device_watch import DeviceWatch, Ending
from ringway.backends.process import Process
from ringway.backends.torch.handles import C10dHandle, mapped
from ringway.call import Call, Op
from ringway.errors import CommTimeout, PeerLost
from ringway.work import Completion, Handle, PendingHandle

_DOUBTFUL_SECONDS = 0.1
"""Calls that take longer may have failed. torch prints a warning when asked for an error, so quicker calls are not
asked: if a peer is lost, the next call reports it."""


_BLOCKED_SECONDS = 0.0002


class LastCall(NamedTuple):
    """The last call on a communicator."""

    number: int
    work: Any
    """torch's."""
    op: Op
    sequence: int
    since: float
    """When the first call began that nobody has asked about since."""


class Works:
    """The calls of one group that may be in flight, and the error that ended all of them."""

    def __init__(self, process: Process, limit: float | None) -> None:
        self.process = process
        self.limit = limit
        """Seconds after which a call is overdue, unless it says otherwise; None if torch keeps the deadlines."""
        self.coalesced: list[Coalesced] | None = None
        """The calls of the coalesced block that is open, if one is."""
        self.watch = process.part(DeviceWatch)
        self.aborted_with: BaseException | None = None
        self.closed = False
        self.group_error: Callable[[], BaseException | None] = lambda: None
        """The error with which torch's watchdog has aborted the group: its streams go on as if all were well."""
        self.spoilt_by_another: Callable[[Call], BaseException | None] = lambda call: None
        """The group's error, if a call that ended well may have garbage from a rank that aborted the group."""
        self.failing: BaseException | None = None
        """The error of a call that the group is about to fail with: its explanation takes a moment."""
        self._issued = 0
        self._last: dict[Hashable, LastCall] = {}
        """By communicator, until the call is known to have ended."""
        self._changing = threading.Lock()

    def issued(self, call: Call, work: Any) -> int:
        """Numbers a call."""
        communicator = communicator_of(call)
        with self._changing:
            number = self._issued = self._issued + 1
            before = self._last.get(communicator)
            since = time.monotonic() if before is None else before.since
            self._last[communicator] = LastCall(number, work, call.op, call.sequence, since)
        return number

    def deadline(self, call: Call) -> float:
        return math.inf if self.limit is None else time.monotonic() + (call.timeout or self.limit)

    def last(self, communicator: Hashable) -> Any:
        """torch's work of the last call on this communicator, if it may still be in flight."""
        last = self._last.get(communicator)
        return None if last is None else last.work

    def ended(self, communicator: Hashable, number: int, error: BaseException | None) -> None:
        """Drops a call that has ended: torch's work would keep its tensors alive."""
        if error is not None:
            self.will_fail(error)
        with self._changing:
            last = self._last.get(communicator)
            if last is not None and last.number == number:
                del self._last[communicator]

    def when_ended(self, line: Hashable, ending: Ending, captured: bool, completion: Completion, soon: bool) -> None:
        if captured:
            completion(None)  # it became part of a graph, and runs whenever that is replayed
        else:
            self.watch.add(line, ending, completion, soon)

    def all_ended(self) -> bool:
        return all(has_ended(last.work) for last in list(self._last.values()))

    def failure(self, group: GroupInfo) -> BaseException | None:
        """What went wrong with the calls that have ended, as far as torch knows. The device watch may not have asked
        yet."""
        error = self.group_error()
        if error is not None:
            return error
        for last in list(self._last.values()):
            error = error_of(last.work) if doubtful(last.since) else None
            if error is not None:
                call = Call(last.op, group=group.name, ranks=group.ranks, sequence=last.sequence)
                return mapped(error, call, time.monotonic() - last.since)
        return None

    def error(self) -> BaseException | None:
        """What ended the group's communicator, as far as torch knows."""
        last = self.last(None)
        known = error_of(last) if last is not None and has_ended(last) else None
        return self.aborted_with or known or self.group_error()

    def wait_until_done(self, handle: Handle, call: Call, timeout: float | None) -> None:
        """Blocks until the device has finished the call of this handle, and raises what went wrong."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not handle.done():
            if limit is not None and time.monotonic() > limit:
                raise call.not_done(timeout)
            time.sleep(_BLOCKED_SECONDS)
        error = handle.outcome() or self.spoilt_by_another(call)
        if error is not None:
            raise error

    def will_fail(self, error: BaseException, of_device: bool = False) -> None:
        """The group is about to fail with this error."""
        if of_device or (self.limit is not None and isinstance(error, (CommTimeout, PeerLost))):
            self.failing = error


def on_current_stream(works: Works, call: Call, captured: bool) -> OnStream:
    """A call that torch has put on the current stream."""
    device = cuda_device(call)
    stream, event = torch.cuda.current_stream(device), torch.cuda.Event()
    handle = OnStream(works, _bare(call), call.sequence, 0, stream, event, captured)
    if not captured:
        handle.number = works.issued(call, handle)
    return handle


def _bare(call: Call) -> Call:
    """A call without its tensors, for messages."""
    return Call(
        call.op,
        reduce=call.reduce,
        peer=call.peer,
        tag=call.tag,
        group=call.group,
        ranks=call.ranks,
        timeout=call.timeout,
    )


class NcclHandle(C10dHandle):
    """A collective on NCCL's stream."""

    notifies = False
    on_device = True

    def __init__(self, work: Any, call: Call, works: Works, number: int, captured: bool) -> None:
        super().__init__(work, call, works.process)
        self._works = works
        self._number = number
        self._captured = captured
        self._failure: BaseException | None = None
        self._deadline = works.deadline(call)

    def since(self, began: float) -> NcclHandle:
        """This handle of a call that began before the handle was made."""
        self._deadline -= self._began - began
        self._began = began
        return self

    def wait(self, timeout: float | None = None) -> None:
        """Orders the current stream behind the collective. Blocks only in a barrier, with a timeout, and with torch's
        blocking wait."""
        if timeout is not None and self._works.limit is not None:
            # At the end of its own wait, torch would abort the group.
            self._works.wait_until_done(self, self._call, timeout)
            timeout = None
        try:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:  # not a signal handler's
            raise self._error(self._works.aborted_with or error) from None
        if self._works.aborted_with is not None:
            raise self._works.aborted_with

    def when_done(self, completion: Completion) -> None:
        # A late subscriber: its own line, because the order of issue does not hold any more.
        self._works.when_ended(self, self, self._captured, completion, soon=True)

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        call = self._call
        device = cuda_device(call)
        if call.async_op or soon or device is None:
            line = (self._works, device, communicator_of(call))
            self._works.when_ended(line, self, self._captured, completion, soon)
        else:
            self.behind().when_finished(completion, soon)

    def behind(self) -> Handle:
        call = self._call
        device = cuda_device(call)
        if device is None:
            return self
        stream, event = torch.cuda.current_stream(device), torch.cuda.Event()
        return OnStream(self._works, _bare(call), call.sequence, self._number, stream, event, self._captured)

    def done(self) -> bool:
        if self._captured or self._works.aborted_with is not None:
            return True
        try:
            if self._work.is_completed():
                return True
        except Exception as error:
            self._failure = error
            return True
        if time.monotonic() > self._deadline:
            self._failure = overdue(self._call, time.monotonic() - self._began)
        return self._failure is not None

    def outcome(self) -> BaseException | None:
        error = self._works.aborted_with or self._failure
        if error is None and doubtful(self._began):
            error = error_of(self._work) or self._works.group_error()
        found = None if error is None else self._error(error)
        self._works.ended(communicator_of(self._call), self._number, found)
        return found


class Barrier(NcclHandle):
    """A barrier blocks its caller. torch's own wait would do so without a deadline."""

    def wait(self, timeout: float | None = None) -> None:
        self._works.wait_until_done(self, self._call, timeout)


class OnStream(Handle):
    """Everything on a stream up to an event recorded now: a collective, and perhaps its last step.

    Unlike torch's work it keeps no tensor alive: `call` has none. Errors come from the last work on the same
    communicator, because an error of NCCL's affects the whole communicator.
    """

    notifies = False
    on_device = True

    def __init__(
        self, works: Works, call: Call, sequence: int, number: int, stream: Any, event: Any, captured: bool
    ) -> None:
        self._works = works
        self._call = call
        self._sequence = sequence
        self.number = number
        self._stream = stream
        self._event = event
        self._captured = captured
        self._began = time.monotonic()
        self._deadline = works.deadline(call)
        event.record(stream)

    @property
    def line(self) -> Hashable:
        return self._works, self._stream.device, self._stream.cuda_stream

    def is_completed(self) -> bool:
        """Like torch's works, among which it is kept."""
        return bool(self._event.query())

    def exception(self) -> None:
        """An event has none."""

    def wait(self, timeout: float | None = None) -> None:
        if timeout is not None and self._works.limit is not None:
            self._works.wait_until_done(self, self._named(), timeout)
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        if self._works.aborted_with is not None:
            raise self._works.aborted_with

    def when_done(self, completion: Completion) -> None:
        self._works.when_ended(self, self, self._captured, completion, soon=True)

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        self._works.when_ended(self.line, self, self._captured, completion, soon)

    def done(self) -> bool:
        if self._captured or self._works.aborted_with is not None or self._event.query():
            return True
        return self._is_overdue() or self._communicator_error() is not None

    def _is_overdue(self) -> bool:
        return time.monotonic() > self._deadline

    def _named(self) -> Call:
        return replace(self._call, sequence=self._sequence)

    def outcome(self) -> BaseException | None:
        call = self._named()
        error = self._works.aborted_with or self._communicator_error()
        if error is None and not self._captured and doubtful(self._began):
            error = self._works.group_error()
        if error is None and self._is_overdue() and not (self._captured or self._event.query()):
            error = overdue(call, time.monotonic() - self._began)
        found = None if error is None else mapped(error, call, time.monotonic() - self._began)
        self._works.ended(communicator_of(call), self.number, found)
        return found

    def _communicator_error(self) -> BaseException | None:
        if not doubtful(self._began):
            return None
        last = self._works.last(communicator_of(self._call))
        return error_of(last) if last is not None and has_ended(last) else None


def overdue(call: Call, waited: float) -> CommTimeout:
    return CommTimeout(
        f"{call.describe()} did not end on its device within {waited:.1f} s",
        op=call.op.name,
        sequence=call.sequence,
        waited=waited,
    )


def communicator_of(call: Call) -> Hashable:
    """Identifies the communicator. Messages use one of their own for each pair of ranks."""
    return None if call.op.collective else (call.op.name, call.peer)


def doubtful(began: float) -> bool:
    return time.monotonic() - began > _DOUBTFUL_SECONDS


def has_ended(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except Exception:  # its communicator was aborted
        return True


def error_of(work: Any) -> BaseException | None:
    """The error of a work that has ended, as far as torch can express it in Python."""
    try:
        error = work.exception()
    except TypeError:  # a C++ exception that has no Python type
        return None
    except Exception as failure:
        error = failure
    return error if isinstance(error, BaseException) else None


def cuda_device(call: Call) -> torch.device | None:
    for tensor in (*call.outputs, *call.inputs):
        if tensor.is_cuda:
            return tensor.device
    return None


class Coalesced(PendingHandle):
    """A call inside a coalesced block. Its end is that of the block, which starts when the block is closed."""

    notifies = False
    on_device = True

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self._steps: list[Callable[[], None]] = []
        self._block: Handle | None = None

    def then(self, finish: Callable[[], None], device: torch.device | None = None) -> Handle:
        """The last step must wait until the block has started: before, there is no result."""
        self._steps.append(finish)
        return self

    def start(self, block: Handle) -> None:
        if self._steps:
            block.wait()
            with torch.inference_mode():
                for step in self._steps:
                    step()
            block = block.behind()
        self._block = block
        block.when_finished(self._cell.finish)

    def fail(self, error: BaseException) -> None:
        """The block could not be started."""
        self._cell.finish(error)

    def wait(self, timeout: float | None = None) -> None:
        """Inside the block there is nothing to wait for yet."""
        self._cell.raise_error()
        if self._block is not None:
            self._block.wait(timeout)
