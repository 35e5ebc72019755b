"""Handles for NCCL's collectives: how a stream waits for them, and how to learn that they have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from ringway.backends.device_watch import DeviceWatch, Ending
from ringway.backends.process import Process
from ringway.backends.torch.handles import C10dHandle, mapped
from ringway.call import Call
from ringway.work import Completion, Handle

_DOUBTFUL_SECONDS = 0.1
"""Calls that take longer may have failed. torch prints a warning when asked for an error, so quicker calls are not
asked: if a peer is lost, the next call reports it."""


class Works:
    """The calls of one group that may be in flight, and the error that ended all of them."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.watch = process.part(DeviceWatch)
        self.aborted_with: BaseException | None = None
        self._issued = 0
        self._last: dict[Hashable, tuple[int, Any]] = {}
        """By communicator: the number and torch's work of the last call, until that is known to have ended."""
        self._changing = threading.Lock()

    def issued(self, communicator: Hashable, work: Any) -> int:
        """Numbers a call."""
        with self._changing:
            number = self._issued = self._issued + 1
            self._last[communicator] = (number, work)
        return number

    def last(self, communicator: Hashable) -> Any:
        """torch's work of the last call on this communicator, if it may still be in flight."""
        return self._last.get(communicator, (0, None))[1]

    def forget(self, communicator: Hashable, number: int) -> None:
        """Drops a call that has ended: torch's work would keep its tensors alive."""
        with self._changing:
            if self._last.get(communicator, (0, None))[0] == number:
                del self._last[communicator]

    def when_ended(self, line: Hashable, ending: Ending, captured: bool, completion: Completion, soon: bool) -> None:
        if captured:
            completion(None)  # it became part of a graph, and runs whenever that is replayed
        else:
            self.watch.add(line, ending, completion, soon)

    def all_ended(self) -> bool:
        return all(_has_ended(work) for _, work in list(self._last.values()))


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

    def wait(self, timeout: float | None = None) -> None:
        """Orders the current stream behind the collective. Blocks only with torch's blocking wait."""
        try:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=timeout))
        except Exception as error:
            raise self._error(error) from None

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
        bare = Call(call.op, reduce=call.reduce, peer=call.peer, tag=call.tag, group=call.group, ranks=call.ranks)
        return OnStream(self._works, bare, call.sequence, self._number, stream, event, self._captured)

    def done(self) -> bool:
        if self._captured:
            return True
        try:
            return bool(self._work.is_completed())
        except Exception as error:
            self._failure = error
            return True

    def outcome(self) -> BaseException | None:
        error = self._failure or self._works.aborted_with
        if error is None and _doubtful(self._began):
            error = _error_of(self._work)
        self._works.forget(communicator_of(self._call), self._number)
        return None if error is None else self._error(error)


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
        self._number = number
        self._stream = stream
        self._event = event
        self._captured = captured
        self._began = time.monotonic()
        event.record(stream)

    @property
    def line(self) -> Hashable:
        return self._works, self._stream.device, self._stream.cuda_stream

    def wait(self, timeout: float | None = None) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def when_done(self, completion: Completion) -> None:
        self._works.when_ended(self, self, self._captured, completion, soon=True)

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        self._works.when_ended(self.line, self, self._captured, completion, soon)

    def done(self) -> bool:
        return self._captured or bool(self._event.query()) or self._communicator_error() is not None

    def outcome(self) -> BaseException | None:
        error = self._works.aborted_with or self._communicator_error()
        self._works.forget(communicator_of(self._call), self._number)
        if error is None:
            return None
        return mapped(error, replace(self._call, sequence=self._sequence), time.monotonic() - self._began)

    def _communicator_error(self) -> BaseException | None:
        if not _doubtful(self._began):
            return None
        last = self._works.last(communicator_of(self._call))
        return _error_of(last) if last is not None and _has_ended(last) else None


def communicator_of(call: Call) -> Hashable:
    """Identifies the communicator. Messages use one of their own for each pair of ranks."""
    return None if call.op.collective else (call.op.name, call.peer)


def _doubtful(began: float) -> bool:
    return time.monotonic() - began > _DOUBTFUL_SECONDS


def _has_ended(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except Exception:  # its communicator was aborted
        return True


def _error_of(work: Any) -> BaseException | None:
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
