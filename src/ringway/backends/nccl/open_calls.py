"""Asynchronous calls on nccl's fast path, from their start until the current stream stands behind them.

Once a stream has waited for a call, an event on that stream reports the call's end, and the interpreter is not needed.
Until then only torch's work knows. DDP waits for futures, which nobody sees: a call asks about the ones before it, some
at a time, because it has the interpreter's lock anyway. The watch of streams asks only about calls that have been open
for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

import ringway._core as _core
from ringway.backends.nccl.handles import NcclHandle, Works, doubtful, error_of, has_ended, overdue
from ringway.backends.torch.handles import mapped
from ringway.call import Call
from ringway.errors import RingwayError
from ringway.torch_versions import untraced
from ringway.work import CompletionCell, Work, seconds


class OpenCalls:
    """The asynchronous calls of one group that nobody has waited for yet, in the order of their start."""

    def __init__(self, works: Works, record: _core.GroupRecord, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called with the error of a call that failed."""
        self._works = works
        self._record = record
        self._failed = failed
        self.calls: dict[int, _core.StreamWork] = {}
        """By token. The native side adds calls, and takes those that have ended or that a stream has waited for."""

    def fail(self) -> None:
        """The group has failed or ended, and its calls with it."""
        while self.calls:
            with suppress(KeyError):  # another thread has just taken it
                _, call = self.calls.popitem()
                self._end(call, ok=False)

    def _end(self, call: _core.StreamWork, ok: bool) -> None:
        if not call.followed:
            self._record.end(call.token, ok)

    def sweep(self) -> None:
        """Ends the calls that the device has passed."""
        aborted, limit = self._works.aborted_with is not None, self._works.limit
        behind = False  # a collective that has not ended: they end in this order, on one stream; messages do not
        for call in list(self.calls.values()):
            is_overdue = False
            if behind and not call.is_message:
                continue
            if not (aborted or has_ended(call.torchs)):
                is_overdue = limit is not None and call.seconds > limit
                if not is_overdue:
                    behind = behind or not call.is_message
                    continue
            error = _outcome(call, is_overdue)
            if error is not None:
                self._failed(error)  # first: without open calls, the group would seem to be well
            if self.calls.pop(call.token, None) is not None:
                self._end(call, error is None)


def _named(at: _core.StreamWork) -> Call:
    return replace(at.path.named(at.kind, at.sequence), outputs=() if at.outputs is None else (at.outputs,))


def _outcome(at: _core.StreamWork, is_overdue: bool) -> BaseException | None:
    """The error of a call that has ended."""
    works, waited = at.path.works, at.seconds
    error: BaseException | None = works.aborted_with
    if error is None and is_overdue:
        error = overdue(_named(at), waited)
    if error is None and doubtful(time.monotonic() - waited):
        error = error_of(at.torchs) or works.group_error()
    return None if error is None else mapped(error, _named(at), waited)


@untraced
class FastWork(Work):
    """The Work of a call that torch runs on its own stream. What `Work` needs for rare questions is made when asked."""

    __slots__ = ("_at",)
    _at: _core.StreamWork
    """Set by the native side, which makes all of these."""
    _watched = False

    __init__ = c10d.Work.__init__

    @property
    def _call(self) -> Call:
        return _named(self._at)

    @property
    def _works(self) -> Works:
        works: Works = self._at.path.works
        return works

    @property
    def _began(self) -> float:
        return time.monotonic() - self._at.seconds

    @cached_property
    def _handle(self) -> NcclHandle:  # type: ignore[override]
        return NcclHandle(self._at.torchs, self._call, self._works, -1, captured=False).since(self._began)

    @property
    def _cell(self) -> CompletionCell:  # type: ignore[override]
        made = self.__dict__
        return made.get("_end") or made.setdefault("_end", CompletionCell())  # one, even if two threads ask

    @property
    def _result(self) -> list[Tensor]:  # type: ignore[override]
        return [] if self._at.outputs is None else [self._at.outputs]

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Orders the current stream behind the call. Without a timeout, the native side does it."""
        if timeout is None or not seconds(timeout):  # from C++ the timeout is zero if there is none
            try:
                if self._at.wait():
                    return True
            except RingwayError:
                raise
            except RuntimeError as error:
                raise mapped(self._works.aborted_with or error, self._call, self._at.seconds) from None
        return super().wait(timeout)

    def get_future(self) -> torch.futures.Future[Any]:
        """torch's own: its wait and its callbacks order streams, as DDP expects, and do not wait for the device."""
        future: torch.futures.Future[Any] = self._at.torchs.get_future()
        return future
