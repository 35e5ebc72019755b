"""MPI's sends and receives in flight, and the thread that progresses them while the program computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ringway.backends.base import GroupInfo
from ringway.backends.mpi import world as mpi_world
from ringway.backends.mpi.world import LOCK, MPI, mapped
from ringway.call import ANY_SOURCE, SEND, Call, describe_call
from ringway.errors import CommTimeout, RingwayError, message_sizes, mismatch_error
from ringway.threads import start
from ringway.work import Completion, PendingHandle

_POLL_NAP = 50e-6
_POLL_MOST = 1e-3


class MessageGroup(Protocol):
    """What a message needs to know about its group."""

    rank: int
    closed: bool
    departures: mpi_world.Departures
    group: GroupInfo

    @property
    def ranks(self) -> Sequence[int]: ...


class Message(PendingHandle):
    """A send or a receive in flight. A waiting thread or the progress thread notices its end."""

    def __init__(self, request: Any, call: Call, deadline: float, backend: MessageGroup, keep: Any) -> None:
        super().__init__()
        self._request = request
        self._call = call
        self._deadline = deadline
        self._backend = backend
        self._keep = keep
        self._began = time.monotonic()
        self._status = MPI.Status()
        self._error: RingwayError | None = None

    def done(self) -> bool:
        """Progresses the message. Its callbacks run here if this is where it ends."""
        with LOCK:
            if self._request is not None:
                try:
                    if self._request.Test(self._status):
                        self._error = self._shortfall()
                    else:
                        self._error = self._given_up()
                        if self._error is None:
                            return False
                except MPI.Exception as error:
                    self._error = mapped(error, self._call)
                self._request = self._keep = None
        self._cell.finish(self._error)  # outside the lock: callbacks may issue collectives
        return True

    def _shortfall(self) -> RingwayError | None:
        """MPI silently accepts a message that is shorter than the buffer."""
        if not self._call.outputs:
            return None
        self.source = self._status.Get_source()
        expected, came = self._call.outputs[0].nbytes, self._status.Get_elements(MPI.BYTE)
        if came == expected:
            return None
        source, own = self._backend.ranks[self.source], self._backend.ranks[self._backend.rank]
        return mismatch_error(
            self._call.group,
            {source: describe_call(SEND, nbytes=came, peer=own, group=self._call.group), own: self._call.describe()},
            self._call.sequence,
            details=[message_sizes(source, own, came, expected)],
        )

    def _given_up(self) -> RingwayError | None:
        """Why the message will not end any more, if so; MPI then keeps the request and its buffers."""
        waited = time.monotonic() - self._began
        if self._backend.closed:
            error: RingwayError = RingwayError(f"{self._call.describe()} ended: its group was destroyed")
        elif time.monotonic() > self._deadline:
            error = CommTimeout(
                f"{self._call.describe()} timed out after {waited:.1f} s",
                op=self._call.op.name,
                waited=waited,
                missing=[] if self._call.peer == ANY_SOURCE else [self._backend.ranks[self._call.peer]],
            )
        elif (gone := self._backend.departures.missing(waited)) is not None:
            error = mpi_world.left(self._call, gone)
        else:
            return None
        mpi_world.abandon(self._request, self._keep, cancel=bool(self._call.outputs))
        return error

    def wait(self, timeout: float | None = None) -> None:
        began = time.monotonic()
        while not self.done():
            waited = time.monotonic() - began
            if timeout is not None and waited > timeout:
                raise self._call.not_done(timeout)
            mpi_world.pause(waited, self._call.nbytes)
        self._cell.raise_error()

    def when_done(self, completion: Completion) -> None:
        self._cell.when_done(completion)
        if not self.done():
            self._backend.group.process.part(_ProgressThread).add(self)


class _ProgressThread:
    """Progresses the messages that have a completion callback."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._thread: threading.Thread | None = None

    def add(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            if self._thread is None:
                self._thread = start("ringway-mpi-messages", self._serve)
            self._changed.notify()

    def _serve(self) -> None:
        nap = _POLL_NAP
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages)
                messages = list(self._messages)
            ended = {message for message in messages if message.done()}
            if ended:
                with self._changed:
                    self._messages = [message for message in self._messages if message not in ended]
                nap = _POLL_NAP
            else:
                time.sleep(nap)
                nap = min(nap * 1.5, _POLL_MOST)
