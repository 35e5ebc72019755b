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
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

import ringway._core as _core
from ringway.backends.nccl.handles import NcclHandle, Works, doubtful, error_of, has_ended, overdue
from ringway.backends.torch.handles import mapped
from ringway.call import Call
from ringway.errors import RingwayError
from ringway.work import CompletionCell, Work, seconds

_IDLE_LOOKS = 50
"""How often the device watch finds no open call before it stops looking: to start it again costs a call more than all
the rest."""


class OpenCalls:
    """The asynchronous calls of one group that nobody has waited for yet, in the order of their start."""

    def __init__(self, works: Works, record: _core.GroupRecord, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called with the error of a call that failed."""
        self._works = works
        self._record = record
        self._failed = failed
        self._idle = 0
        self.works: dict[int, FastWork] = {}
        """By token. The native side adds calls, and takes those that a stream has waited for."""

    def watch(self, ended: Callable[[], None]) -> None:
        """Looks after open calls from now on. `ended` is called when there have been none for a while."""
        self._idle = 0
        self._works.watch.add(self, self, lambda _: ended(), soon=False)

    def take(self, token: int) -> FastWork | None:
        return self.works.pop(token, None)

    def fail(self) -> None:
        """The group has failed or ended, and its calls with it."""
        while self.works:
            with suppress(KeyError):  # the device watch has just taken it
                _, work = self.works.popitem()
                self._end(work, ok=False)

    def _end(self, work: FastWork, ok: bool) -> None:
        if not work.followed:
            self._record.end(work.token, ok)

    def sweep(self) -> None:
        """Ends the calls that the device has passed."""
        aborted, limit = self._works.aborted_with is not None, self._works.limit
        for work in list(self.works.values()):  # on one stream, so they end in this order
            at = work._at
            if not (aborted or has_ended(at.torchs)):
                work.is_overdue = limit is not None and at.seconds > limit
                if not work.is_overdue:
                    break
            if self.take(at.token) is not None:
                error = work.outcome()
                self._end(work, error is None)
                if error is not None:
                    self._failed(error)

    # The device watch polls this object as one ending.

    def done(self) -> bool:
        self.sweep()
        self._idle = 0 if self.works else self._idle + 1
        return self._idle > _IDLE_LOOKS

    def outcome(self) -> BaseException | None:
        return None


class FastWork(Work):
    """The Work of a call that torch runs on its own stream. What `Work` needs for rare questions is made when asked."""

    __slots__ = ("_at",)
    _at: _core.StreamWork
    """Set by the native side, which makes all of these."""
    _watched = False
    is_overdue = False

    __init__ = c10d.Work.__init__

    @property
    def token(self) -> int:
        return self._at.token

    @property
    def followed(self) -> bool:
        """Whether the native side reports its end."""
        return self._at.followed

    @property
    def _call(self) -> Call:
        at = self._at
        return replace(at.path.named(at.kind, at.sequence), outputs=tuple(self._result))

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
        """Orders the current stream behind the call."""
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

    def outcome(self) -> BaseException | None:
        """The error, once it has ended."""
        works, waited = self._works, self._at.seconds
        error = works.aborted_with
        if error is None and self.is_overdue:
            error = overdue(self._call, waited)
        if error is None and doubtful(self._began):
            error = error_of(self._at.torchs) or works.group_error()
        return None if error is None else mapped(error, self._call, waited)
