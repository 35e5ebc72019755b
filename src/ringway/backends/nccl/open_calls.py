"""Asynchronous calls on nccl's fast path, from their start until the current stream stands behind them.

Once a stream has waited for a call, an event on that stream reports the call's end, and the interpreter is not needed.
Until then only torch's work knows. Most programs wait soon, so the works are asked rarely.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as c10d
from torch import Tensor

import ringway._core as _core
from ringway.backends.nccl.handles import NcclHandle, Works, doubtful, error_of, has_ended, overdue
from ringway.backends.torch.handles import mapped
from ringway.call import Call
from ringway.work import CompletionCell, Work, seconds

Issue = Callable[[Any, Any], Any]


class Kind(NamedTuple):
    """Calls that differ in their tensors only: one of them without tensors, for messages, and what issues them."""

    number: int
    async_op: bool
    call: Call
    issue: Issue


class Path(Protocol):
    """What starts calls."""

    works: Works
    open: OpenCalls

    def waited(self, work: FastWork) -> None:
        """The current stream has waited for the call."""


class OpenCalls:
    """The asynchronous calls of one group that nobody has waited for yet, in the order of their start."""

    def __init__(self, works: Works, record: _core.GroupRecord, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called with the error of a call that failed."""
        self._works = works
        self._record = record
        self._failed = failed
        self._open: dict[int, FastWork] = {}
        self._watched = False

    def add(self, work: FastWork) -> None:
        self._open[work.token] = work
        if not self._watched:
            self._watched = True
            self._works.watch.add(self, self, self._swept, soon=False)

    def take(self, token: int) -> bool:
        """Whether the call was open. The caller now follows it."""
        return self._open.pop(token, None) is not None

    def fail(self) -> None:
        """The group has failed or ended, and its calls with it."""
        while self._open:
            with suppress(KeyError):  # the device watch has just taken it
                self._record.end(self._open.popitem()[0], False)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, token: int) -> bool:
        return token in self._open

    def sweep(self) -> None:
        """Ends the calls that the device has passed."""
        for work in list(self._open.values()):  # on one stream, so they end in this order
            if not work.has_ended_on_device():
                break
            if self.take(work.token):
                error = work.outcome()
                self._record.end(work.token, error is None)
                if error is not None:
                    self._failed(error)

    # The device watch polls this object as one ending: it ends when no call is open.

    def done(self) -> bool:
        self.sweep()
        return not self._open

    def outcome(self) -> BaseException | None:
        return None

    def _swept(self, error: BaseException | None) -> None:
        self._watched = False
        if self._open:  # a call came in between
            self._watched = True
            self._works.watch.add(self, self, self._swept, soon=False)


class FastWork(Work):
    """The Work of a call that torch runs on its own stream. What `Work` needs for rare questions is made when asked."""

    _watched = False

    def __init__(self, path: Path, kind: Kind, sequence: int, token: int, work: Any, outputs: Tensor) -> None:
        c10d.Work.__init__(self)
        self.token = token
        self._path = path
        self.kind = kind
        self.sequence = sequence
        self.outputs = outputs
        self._torchs = work
        self._began = time.monotonic()
        self._overdue = False

    @property
    def _call(self) -> Call:
        return replace(self.kind.call, outputs=(self.outputs,), sequence=self.sequence)

    @cached_property
    def _handle(self) -> NcclHandle:  # type: ignore[override]
        return NcclHandle(self._torchs, self._call, self._path.works, -1, captured=False).since(self._began)

    @property
    def _cell(self) -> CompletionCell:  # type: ignore[override]
        made = self.__dict__
        return made.get("_end") or made.setdefault("_end", CompletionCell())  # one, even if two threads ask

    @property
    def _result(self) -> list[Tensor]:  # type: ignore[override]
        return [self.outputs]

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Orders the current stream behind the call."""
        path = self._path
        # From C++ the timeout is zero if there is none.
        if (timeout is not None and seconds(timeout)) or path.works.aborted_with is not None:
            return super().wait(timeout)
        try:
            self._torchs.wait()
        except RuntimeError as error:
            raise mapped(path.works.aborted_with or error, self._call, time.monotonic() - self._began) from None
        if self.token in path.open:
            path.waited(self)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """torch's own: its wait and its callbacks order streams, as DDP expects, and do not wait for the device."""
        future: torch.futures.Future[Any] = self._torchs.get_future()
        return future

    def has_ended_on_device(self) -> bool:
        works = self._path.works
        if works.aborted_with is not None or has_ended(self._torchs):
            return True
        self._overdue = works.limit is not None and time.monotonic() - self._began > works.limit
        return self._overdue

    def outcome(self) -> BaseException | None:
        """The error, once it has ended."""
        works, waited = self._path.works, time.monotonic() - self._began
        error = works.aborted_with
        if error is None and self._overdue:
            error = overdue(self._call, waited)
        if error is None and doubtful(self._began):
            error = error_of(self._torchs) or works.group_error()
        return None if error is None else mapped(error, self._call, waited)
