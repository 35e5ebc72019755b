"""A call in flight on the engine."""

from __future__ import annotations

import ringway._core as _core
from ringway.backends.shm.errors import Faults
from ringway.call import Call
from ringway.work import Completion, Handle

FOREVER = 1e9
DONE_WELL = 0
"""The outcome of a call that succeeded."""


class ShmHandle(Handle):
    """An asynchronous call, or a message."""

    def __init__(self, task: _core.ShmTask, call: Call, faults: Faults) -> None:
        self.task = task
        self._call = call
        self._faults = faults

    @property
    def source(self) -> int:  # type: ignore[override]
        return self.task.source()

    def wait(self, timeout: float | None = None) -> None:
        if not self.task.wait(FOREVER if timeout is None else timeout):
            raise self._call.not_done(timeout)
        error = self._error()
        if error is not None:
            raise error

    def done(self) -> bool:
        return self.task.done()

    def withdraw(self) -> bool:
        """Takes a message back if nothing of it has moved; whether that succeeded."""
        return self.task.withdraw()

    def when_done(self, completion: Completion) -> None:
        self.task.when_done(lambda: completion(self._error()))

    def _error(self) -> BaseException | None:
        outcome = self.task.outcome()
        return None if outcome == DONE_WELL else self._faults.error(outcome, self.task.fault())
