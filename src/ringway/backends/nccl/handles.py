"""Collectives of NCCL's under way, as handles: how a stream waits for them, and how their end is learnt."""

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
"""What takes longer than that may have failed. torch warns whoever asks, so of what is quicker nobody asks: where a
peer is lost, the next call says so."""


class Works:
    """What may be under way in one group, and what ended all of it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.watch = process.part(DeviceWatch)
        self.abortion: BaseException | None = None
        self._issued = 0
        self._last: dict[Hashable, tuple[int, Any]] = {}
        """By the way it went: the number and torch's work of the last call, while it is not known to have ended."""
        self._changing = threading.Lock()

    def issued(self, way: Hashable, work: Any) -> int:
        """Numbers a call."""
        with self._changing:
            number = self._issued = self._issued + 1
            self._last[way] = (number, work)
        return number

    def last(self, way: Hashable) -> Any:
        """torch's work of the last call that went this way, if it may still be under way."""
        return self._last.get(way, (0, None))[1]

    def forget(self, way: Hashable, number: int) -> None:
        """That call has ended: torch's work would keep its tensors from being freed."""
        with self._changing:
            if self._last.get(way, (0, None))[0] == number:
                del self._last[way]

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
        """Orders the current stream behind the collective; blocks only where torch's blocking wait is on."""
        try:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=timeout))
        except Exception as error:
            raise self._error(error) from None

    def when_done(self, completion: Completion) -> None:
        # Somebody asks late: not in line with those that were issued.
        self._works.when_ended(self, self, self._captured, completion, soon=True)

    def when_finished(self, completion: Completion, soon: bool = True) -> None:
        call = self._call
        device = cuda_device(call)
        if call.async_op or soon or device is None:
            line = (self._works, device, way(call))
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
        error = self._failure or self._works.abortion
        if error is None and _doubtful(self._began):
            error = _trouble(self._work)
        self._works.forget(way(self._call), self._number)
        return None if error is None else self._error(error)


class OnStream(Handle):
    """What stands on a stream up to an event that is recorded now: a collective, and perhaps its last step.

    Unlike torch's work it keeps no tensor from being freed: `call` is without any. Whether something went wrong, the
    last work that went the same way knows: an error of NCCL's is the whole communicator's.
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
        return self._captured or bool(self._event.query()) or self._trouble() is not None

    def outcome(self) -> BaseException | None:
        error = self._works.abortion or self._trouble()
        self._works.forget(way(self._call), self._number)
        if error is None:
            return None
        return mapped(error, replace(self._call, sequence=self._sequence), time.monotonic() - self._began)

    def _trouble(self) -> BaseException | None:
        if not _doubtful(self._began):
            return None
        last = self._works.last(way(self._call))
        return _trouble(last) if last is not None and _has_ended(last) else None


def way(call: Call) -> Hashable:
    """Messages go by communicators of their own, one for each pair."""
    return None if call.op.collective else (call.op.name, call.peer)


def _doubtful(began: float) -> bool:
    return time.monotonic() - began > _DOUBTFUL_SECONDS


def _has_ended(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except Exception:  # asked about a communicator that was aborted
        return True


def _trouble(work: Any) -> BaseException | None:
    """What went wrong with a work that has ended, if anything, and as far as torch can say it in Python."""
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
