"""Sends and receives of MPI under way, and the thread that moves them on while the program computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringway.backends.mpi import world as mpi_world
from ringway.backends.mpi.world import LOCK, MPI, mapped
from ringway.call import ANY_SOURCE, SEND, Call, describe_call
from ringway.errors import CommTimeout, RingwayError, message_sizes, mismatch_error
from ringway.threads import start
from ringway.work import Completion, Handle

_POLL_NAP = 50e-6
_POLL_MOST = 1e-3


class Place(Protocol):
    """What a message has to know of its group."""

    rank: int
    closed: bool
    departures: mpi_world.Departures

    @property
    def ranks(self) -> Sequence[int]: ...


class Message(Handle):
    """A send or a receive under way. Its end is noticed by whoever waits, or by the poller."""

    def __init__(self, request: Any, call: Call, deadline: float, backend: Place, keep: Any) -> None:
        self._request = request
        self._call = call
        self._deadline = deadline
        self._backend = backend
        self._keep = keep
        self._began = time.monotonic()
        self._status = MPI.Status()
        self._finished = False
        self._error: RingwayError | None = None

    def poll(self) -> bool:
        """Whether it has ended, well or not."""
        with LOCK:
            if self._finished:
                return True
            try:
                if self._request.Test(self._status):
                    self._end(self._shortfall())
                elif time.monotonic() > self._deadline or self._backend.closed:
                    self._give_up()
                elif (gone := self._backend.departures.missing(time.monotonic() - self._began)) is not None:
                    mpi_world.abandon(self._request, self._keep, cancel=bool(self._call.outputs))
                    self._end(mpi_world.left(self._call, gone))
            except MPI.Exception as error:
                self._end(mapped(error, self._call))
            return self._finished

    def _end(self, error: RingwayError | None) -> None:
        self._error = error
        self._finished = True
        self._keep = None

    def _shortfall(self) -> RingwayError | None:
        """MPI accepts a message that is shorter than the buffer without an error."""
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

    def _give_up(self) -> None:
        mpi_world.abandon(self._request, self._keep, cancel=bool(self._call.outputs))
        waited = time.monotonic() - self._began
        if self._backend.closed:
            self._end(RingwayError(f"{self._call.describe()} ended: its group was destroyed"))
            return
        self._end(
            CommTimeout(
                f"{self._call.describe()} timed out after {waited:.1f} s",
                op=self._call.op.name,
                waited=waited,
                missing=[] if self._call.peer == ANY_SOURCE else [self._backend.ranks[self._call.peer]],
            )
        )

    def wait(self, timeout: float | None = None) -> None:
        began = time.monotonic()
        while not self.poll():
            waited = time.monotonic() - began
            if timeout is not None and waited > timeout:
                raise self._call.not_done(timeout)
            mpi_world.pause(waited, self._call.nbytes)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self.poll()

    def when_done(self, completion: Completion) -> None:
        _poller.watch(self, lambda: completion(self._error))


class _Poller:
    """The progress thread of messages: it moves them on while the program computes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[tuple[Message, Callable[[], None]]] = []
        self._thread: threading.Thread | None = None

    def watch(self, message: Message, ended: Callable[[], None]) -> None:
        if message.poll():
            ended()
            return
        with self._changed:
            self._pending.append((message, ended))
            if self._thread is None:
                self._thread = start("ringway-mpi-messages", self._serve)
            self._changed.notify()

    def _serve(self) -> None:
        nap = _POLL_NAP
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                pending = list(self._pending)
            over = [entry for entry in pending if entry[0].poll()]
            if over:
                with self._changed:
                    self._pending = [entry for entry in self._pending if entry not in over]
                for _, ended in over:
                    ended()
                nap = _POLL_NAP
            else:
                time.sleep(nap)
                nap = min(nap * 1.5, _POLL_MOST)


_poller = _Poller()
