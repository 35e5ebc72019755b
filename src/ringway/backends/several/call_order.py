"""One order for the calls of a group that has several backends.

Each backend keeps the order of its own calls. A call goes straight to its backend where nothing is under way on
another one; else it waits in a queue (`ordered.py`) until what was issued before it is over, callbacks included.
So every backend sees its calls in the order of issue, on every rank, whether a rank had to wait or not. What a
completion callback issues does not wait for the call it belongs to: it runs before whatever comes after that.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from ringway.backends.queue import Ordered
from ringway.call import Call
from ringway.errors import CommTimeout
from ringway.work import DONE, Completion, Handle

Runner = Callable[[Call], Handle]
Hold = Callable[[int], None]

QUEUED = ""
"""The place of a call that has not reached its backend yet."""


class _Turn(Handle):
    """A call under way, on the backend named `where`; over when its completion callbacks have run too."""

    def __init__(self, order: Order, where: str, inner: Handle) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        self._completions: list[Completion] = []
        self.where = where
        self.inner = inner
        self.passed = threading.Event()
        """Set when what comes after this call need not wait for it any more."""
        order.began(self)
        inner.when_done(self._end)

    def _end(self, error: BaseException | None) -> None:
        with self._order.delivering(self):
            with self._lock:
                self._ended, self._error = True, error
                completions, self._completions = self._completions, []
            for completion in completions:
                try:
                    completion(error)
                except Exception:
                    traceback.print_exc()

    def wait(self, timeout: float | None = None) -> None:
        if self.where == QUEUED:
            self._order.let_pass()
        self.inner.wait(timeout)

    def done(self) -> bool:
        return self.inner.done()

    def when_done(self, completion: Completion) -> None:
        with self._lock:
            if not self._ended:
                self._completions.append(completion)
                return
        completion(self._error)


class _Delivering:
    """While it lasts, this thread runs the completion callbacks of a call."""

    def __init__(self, order: Order, turn: _Turn) -> None:
        self._order = order
        self._turn = turn

    def __enter__(self) -> None:
        self._order.callbacks.setdefault(threading.get_ident(), []).append(self._turn)

    def __exit__(self, *_: object) -> None:
        mine = self._order.callbacks[threading.get_ident()]
        mine.remove(self._turn)
        if not mine:
            del self._order.callbacks[threading.get_ident()]
        self._order.ended(self._turn)


class Order:
    """The order of one group."""

    def __init__(self, group: str, timeout: float) -> None:
        self._group = group
        self._timeout = timeout
        self._lock = threading.Lock()
        self._turns: list[_Turn] = []
        self._ordered = Ordered(f"mixed-{group}", timeout, inline=True)
        self._holds: list[tuple[str, Hold]] = []
        self.callbacks: dict[int, list[_Turn]] = {}
        """By thread: the calls whose completion callbacks it is running, innermost last."""

    def holding(self, backend: str, hold: Hold) -> None:
        """A backend's short cuts go past this order: `hold` shuts them (+1) while a call elsewhere is under way,
        and opens them again (-1)."""
        with self._lock:
            self._holds.append((backend, hold))
            hold(sum(turn.where != backend for turn in self._turns))

    def start(self, backend: str, runner: Runner, call: Call) -> Handle:
        if not self._turns or self._may_go(backend):
            handle = runner(call)
            return _Turn(self, backend, handle) if call.async_op and handle is not DONE else handle
        before = self._started()
        job = self._ordered.submit(call, lambda: self._after(before, runner, call))
        return job if job is DONE else _Turn(self, QUEUED, job)

    def _may_go(self, backend: str) -> bool:
        if threading.get_ident() in self.callbacks:
            return True
        with self._lock:
            return all(turn.where == backend for turn in self._turns)

    def _after(self, before: list[_Turn], runner: Runner, call: Call) -> None:
        """Runs the call when what was issued before it is over, and what callbacks of that have issued."""
        deadline = time.monotonic() + (self._timeout if call.timeout is None else call.timeout)
        while before:
            for turn in before:
                turn.inner.wait(max(0.0, deadline - time.monotonic()))  # what went wrong with it ends this call too
                if not turn.passed.wait(max(0.0, deadline - time.monotonic())):
                    raise CommTimeout(
                        f"{call.describe()} timed out: the completion callbacks of an earlier call have not ended",
                        op=call.op.name,
                        sequence=call.sequence,
                    )
            before = self._started()
        runner(replace(call, async_op=False)).wait()

    def _started(self) -> list[_Turn]:
        """The calls that backends are at and that others wait for."""
        with self._lock:
            return [turn for turn in self._turns if turn.where != QUEUED and not turn.passed.is_set()]

    def let_pass(self) -> None:
        """A callback is about to wait for a call that waits for the callback's own."""
        for turn in self.callbacks.get(threading.get_ident(), ()):
            turn.passed.set()

    def delivering(self, turn: _Turn) -> _Delivering:
        return _Delivering(self, turn)

    def began(self, turn: _Turn) -> None:
        with self._lock:
            self._turns.append(turn)
            self._hold_others(turn, 1)

    def ended(self, turn: _Turn) -> None:
        with self._lock:
            self._turns.remove(turn)
            self._hold_others(turn, -1)
        turn.passed.set()

    def _hold_others(self, turn: _Turn, change: int) -> None:
        for backend, hold in self._holds:
            if backend != turn.where:
                hold(change)

    def stop(self, error: BaseException) -> None:
        self._ordered.stop(error)
