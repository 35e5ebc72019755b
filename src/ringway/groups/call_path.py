"""The path of every call: it is checked, numbered, recorded, compared and started, and its end is reported.

The user's calls, torch's own functions and DDP all come through `CallPath.issue`, or, if they are plain, through
`CallPath.run_fast`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.backends.compose import Routes
from ringway.call import ANY_SOURCE, RECV, Call, Op
from ringway.compare.across_hosts import HostComparison
from ringway.errors import CollectiveMismatch, UsageError
from ringway.groups.checks import admit, check
from ringway.groups.devices import Devices
from ringway.groups.fast_path import FastPaths
from ringway.groups.health import ENDS_THE_GROUP, CallTooEarly, Health
from ringway.groups.listener import Listener
from ringway.work import DONE, Handle, Sent, Work

_KNOWN_LABELS = 4096
_LABEL_LENGTH = 200
_FAST_FAILURES = (*ENDS_THE_GROUP, _core.CallsDiffer)


class CallPath:
    """Issues the calls of one group."""

    def __init__(
        self,
        info: GroupInfo,
        recorder: _core.Recorder,
        record: _core.GroupRecord,
        health: Health,
        devices: Devices,
        paths: FastPaths,
        listeners: Sequence[Listener],
    ) -> None:
        self._info = info
        self._recorder = recorder
        self._record = record
        self._health = health
        self._devices = devices
        self._paths = paths
        self._listeners = listeners
        self._watchers: list[Listener] = []
        self._labels: dict[str, int] = {}
        self._timeout: float | None = None
        self._across_hosts: HostComparison | None = None
        self._created: Any = None
        self.refresh()

    def compare(self, board: _core.CallBoard, created: Any) -> None:
        """Compares every later call with those of the other ranks on this host, before anything is sent. `created` is
        the board if this rank created it: it must live as long as the group."""
        self._record.compare(board)
        self._created = created

    def compare_across_hosts(self, comparison: HostComparison) -> None:
        """Also compares every later call with those of ranks on other hosts, through the store."""
        self._across_hosts = comparison
        self.refresh()

    def refresh(self) -> None:
        """Listeners came or went, or a backend was made. The fast paths are for a healthy group on one host whose
        calls no listener sees."""
        self._watchers = [listener for listener in self._listeners if listener.sees_calls]
        for backend in self._devices.made():
            backend.belongs_to(self._record, weakref.proxy(self._health))
        quiet = self._health.fault is None and not self._watchers and self._across_hosts is None
        if quiet and self._devices.first_is_made:
            self._paths.open(self._devices.made(), self._health)
        else:
            self._paths.close()

    def set_timeout(self, seconds: float) -> None:
        """The deadline of calls that name none, from now on."""
        self._timeout = seconds
        self._devices.set_timeout(seconds)

    def run_fast(
        self,
        op: int,
        outputs: Any,
        inputs: Any,
        peer: int = -1,
        async_op: bool = False,
        tag: int = 0,
    ) -> Work | bool:
        """The Work of an asynchronous call that a fast path has started, or True if it has done a synchronous one.
        False if nothing has happened: then `issue` must."""
        try:
            done = self._paths.run(op, outputs, inputs, peer, async_op, tag)
        except _FAST_FAILURES as error:
            raise self._health.fail(error) from None
        return Sent() if async_op and done is True else done

    def fast_failure(self, error: BaseException) -> BaseException:
        """What to raise for an error of a fast path."""
        return self._health.fail(error) if isinstance(error, _FAST_FAILURES) else error

    def issue(self, call: Call) -> Work | None:
        """Checks, numbers, records and starts a call. Returns a Work if the call is asynchronous."""
        if self._health.fault is not None:
            self._health.require()
        call.size = self._info.size
        call.group = self._info.name
        call.ranks = self._info.ranks
        call.timeout = call.timeout or self._timeout
        device = admit(call) or self._devices.default
        routes = self._devices.routes.get(device) or self._first_call_on(device)
        check(call, self._info.rank)
        call.check = self._health.check
        handle, token, watched = self._start(call, routes)
        if not call.async_op:
            try:
                handle.wait()
            except BaseException as error:
                raise self._ended(token, error, watched) or error from None
        if handle.on_device:
            timed = watched is not None or self._recorder.keeps_times
            handle.when_finished(lambda error: _discard(self._ended(token, error, watched)), soon=timed)
            return Work(handle, call.outputs, _unchanged) if call.async_op else None
        if call.async_op:
            work = Work(handle, call.outputs, lambda error: self._ended(token, error, watched))
            self._health.pending(work)
            return work
        self._ended(token, None, watched)
        if call.op is RECV:
            call.peer = handle.source if call.peer == ANY_SOURCE else call.peer
        return None

    def _start(self, call: Call, routes: Routes) -> tuple[Handle, int, Call | None]:
        """Numbers and starts a call. Returns its handle, its token (0 if its end is recorded), and the call if
        listeners see it."""
        call.record, call.sequence = self._record, -1
        ended = 0
        try:
            token = self._begin(call)
            watched = call if self._watchers else None
            try:
                if watched is not None:
                    call.issued = _core.monotonic_ns()
                    for listener in self._watchers:
                        listener.issued(call)
                handle = routes.runners[call.op.name](call)
            except BaseException as error:
                raise self._ended(token, error, watched) or error from None
            if handle is DONE:
                token, ended = 0, token
            return handle, token, watched
        except BaseException as error:
            self._interrupted(call, error)
            raise
        finally:
            if call.sequence >= 0:
                self._record.started(ended)

    def _interrupted(self, call: Call, error: BaseException) -> None:
        """`error` leaves a call that may not have started. If it has not, the next call gets its number."""
        if call.sequence >= 0 and self._health.interrupted_by(error) and self._across_hosts is not None:
            self._across_hosts.take_back(call.sequence)

    def recorded(self, op: Op, label: str) -> Recorded:
        """A block that is recorded as one call although no backend runs it."""
        return Recorded(self, Call(op, label=label, size=self._info.size, group=self._info.name))

    def _first_call_on(self, device: str) -> Routes:
        routes = self._devices.routes_on(device)
        self.refresh()  # the new backend may have fast paths
        return routes

    def _begin(self, call: Call) -> int:
        """Numbers and records a call, and compares it with the other ranks' calls."""
        label = 0 if call.label is None else self._label(call.label)
        try:
            token = self._record.begin_call(call, label)
            if not token:  # the two would run in another order than on the other ranks
                raise CallTooEarly(
                    f"a signal handler called {call.op.name} of the group {self._info.name} while this thread was "
                    "starting another call of the group, which must come first. Set a flag in the handler, and make "
                    "the call where the program looks at the flag"
                )
            if self._across_hosts is not None and call.op.collective:
                facts = (call.op.code, call.nbytes, call.dtype_code, int(call.reduce), call.peer)
                try:
                    self._across_hosts.compare(call.sequence, facts, token)
                except CollectiveMismatch:
                    self._record.end(token, False)
                    raise
        except _FAST_FAILURES as error:  # another rank called something else
            raise self._health.fail(error) from None
        return token

    def _ended(self, token: int, error: BaseException | None, watched: Call | None) -> BaseException | None:
        """Records the end of a call, unless `token` is 0, and informs the listeners. Returns the error to raise."""
        if token:
            self._record.end(token, error is None)
        if error is not None:
            error = self._health.fail(error)
        if watched is not None:
            watched.completed = _core.monotonic_ns()
            for listener in list(self._watchers):
                listener.completed(watched, error)
        return error

    def _label(self, label: str) -> int:
        if not isinstance(label, str):
            raise UsageError(f"log_name={label!r} is not a string")
        known = self._labels.get(label)
        if known is None:
            if len(self._labels) >= _KNOWN_LABELS:  # a program may make a new one for each call
                self._labels.clear()
            # Other processes read labels: escape what cannot be encoded, and truncate long ones.
            plain = label.encode(errors="backslashreplace").decode()
            if len(plain) > _LABEL_LENGTH:
                plain = plain[: _LABEL_LENGTH - 1] + "…"
            known = self._labels[label] = self._recorder.intern(plain)
        return known


class Recorded:
    """A block that is one call of a group. (A generator would make the standard library the call's site.)"""

    def __init__(self, calls: CallPath, call: Call) -> None:
        self._calls, self._call = calls, call

    def __enter__(self) -> None:
        try:
            self._token = self._calls._begin(self._call)
        except BaseException as error:
            self._calls._interrupted(self._call, error)
            raise
        finally:
            if self._call.sequence >= 0:
                self._calls._record.started(0)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._calls._record.end(self._token, kind is None)


def _unchanged(error: BaseException | None) -> BaseException | None:
    """For a Work whose end is recorded elsewhere."""
    return error


def _discard(_: object) -> None:
    """For a callback that must return nothing."""
