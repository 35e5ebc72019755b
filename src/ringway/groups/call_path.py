"""The one way in: every collective of a group passes `Issuer.issue`, whether the user called it, torch's own
functions did, or DDP. It is checked, numbered, recorded, started, and its end reported to the listeners.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import index
from typing import Any

from torch import Tensor

import ringway._core as _core
from ringway.backends.base import Backend, GroupInfo
from ringway.backends.compose import Plan, plan
from ringway.call import (
    ALL_REDUCE,
    ANY_SOURCE,
    DTYPE_CODE,
    RECV,
    UNKNOWN_DTYPE,
    Call,
    Op,
)
from ringway.compare.across_hosts import HostComparison
from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost, RingwayError, UsageError
from ringway.groups.checks import admit, check
from ringway.groups.fast_path import ShortCut, ShortCuts
from ringway.groups.listener import Listener
from ringway.references import weak_method
from ringway.work import Handle, Work

_KNOWN_LABELS = 4096
_LABEL_LENGTH = 200
_POISON = (CollectiveMismatch, CommTimeout, PeerLost)


class Issuer:
    """What a communicator is besides its spellings: the group's backends, its numbers, its health.

    `backends` are by device type; a value may be a function that makes the backend when the first call on
    that device comes, which is the same call on every rank.
    """

    def __init__(
        self,
        info: GroupInfo,
        backends: Mapping[str, Backend | Callable[[], Backend]],
        recorder: _core.Recorder,
        listeners: list[Listener],
    ) -> None:
        self.info = info
        self.rank = info.rank
        self.size = info.size
        self.name = info.name
        self.ranks = list(info.ranks)
        self._rank_of = {rank: place for place, rank in enumerate(self.ranks)}
        self._recorder = recorder
        self._lane = _core.Lane(recorder, info.name, info.size, self.ranks)
        self._labels: dict[str, int] = {}
        self._listeners = listeners
        self._call_listeners: list[Listener] = []
        self._backends = dict(backends)
        self._plans: dict[str, Plan] = {}
        self._default_device = next(iter(self._backends))
        self._fault: BaseException | None = None
        self.closed = False
        self._limit: float | None = None
        self._check = self._lane.check
        self._offered: Any = None
        self.spans_hosts = False
        self._across: HostComparison | None = None
        self._works: weakref.WeakSet[Work] = weakref.WeakSet()
        self._barriers = 0
        for device, backend in self._backends.items():
            if isinstance(backend, Backend):
                self._plans[device] = plan(backend)
        self._offers = ShortCuts(self._lane, weak_method(self._poison_late))
        self._short_cuts: dict[str, ShortCut] = {}
        self._instead: dict[int, ShortCut] = {}
        self.quick_all_reduce: Callable[[Tensor, int], int] | None = None
        self.listeners_changed()

    @property
    def backend(self) -> Backend:
        """The backend of the group's first device."""
        self._plan(self._default_device)
        backend = self._backends[self._default_device]
        assert isinstance(backend, Backend)
        return backend

    @property
    def lane(self) -> _core.Lane:
        return self._lane

    @property
    def fault(self) -> BaseException | None:
        """What poisoned the group: every further call raises it again."""
        return self._fault

    def poison(self, error: BaseException) -> None:
        """From now on every call of this group raises `error`."""
        self._fault = self._fault or error
        self.listeners_changed()

    def _poisoned(self, error: BaseException) -> BaseException:
        """Makes the error the group's fault, as the listeners explain it."""
        try:
            self._check()
        except _POISON as known:  # whatever the backend made of it
            error = known
        first = self._fault is None
        for listener in list(self._listeners):
            error = listener.failed(self, error)
        if isinstance(error, CollectiveMismatch):
            self.abandon()
        self.poison(error)
        if first and self._fault is not None:  # another rank's word may have come meanwhile; later calls raise that
            error = self._fault
        return error

    def abandon(self) -> None:
        """What is under way never ends by itself: ranks part, or this one leaves."""
        for backend in self._backends.values():
            if isinstance(backend, Backend):
                backend.abandoned = True

    def compare(self, board: _core.CallBoard | None, offered: Any = None) -> None:
        """From now on each call is compared with those of the other ranks, before anything is sent. What was
        `offered` to them lives as long as this group."""
        if board is not None:
            self._lane.compare(board)
            self._offered = offered

    def compare_across(self, across: HostComparison | None) -> None:
        """The group spans hosts, whose ranks compare their calls through the store, or with None when they stall."""
        self.spans_hosts = True
        self._across = across
        self.listeners_changed()

    def _look(self) -> None:
        """For whoever waits: raises where waiting has become vain."""
        if self.closed and self._fault is not None:
            raise self._fault.with_traceback(None)
        self._check()

    def look_for_parting(self) -> None:
        """Ends what is under way, though its backend will not, where ranks were found to call different things."""
        if self.closed or self._fault is not None:
            return
        try:
            self._check()
        except CollectiveMismatch as error:
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """Ends what is under way with `error`, though its backend still waits: nothing will come any more."""
        self.abandon()
        self.poison(error)
        self._lane.fail(error)
        for work in list(self._works):
            work.fail(error)

    def require_health(self) -> None:
        if self._fault is not None:
            raise self._fault.with_traceback(None)

    def recorded(self, op: Op, label: str) -> Recorded:
        """Numbers and records what goes past the backends, through the store."""
        return Recorded(self, op, label)

    def next_barrier(self) -> int:
        """Numbers the group's monitored barriers."""
        self._barriers += 1
        return self._barriers

    def listeners_changed(self) -> None:
        """The short cuts are for a healthy group of one host whose calls no listener sees."""
        self._call_listeners = [listener for listener in self._listeners if listener.sees_calls]
        first = self._backends[self._default_device]
        alone = not self._call_listeners and self._across is None
        if self._fault is None and alone and isinstance(first, Backend):
            others = [backend for backend in self._backends.values() if isinstance(backend, Backend)]
            self._short_cuts, self._instead = self._offers.of(first, others)
        else:
            self._short_cuts, self._instead = {}, {}
        self.quick_all_reduce = self._short_cuts.get(ALL_REDUCE.name)

    def _poison_late(self, error: BaseException) -> None:
        """For short cuts whose calls may fail after they have returned."""
        if isinstance(error, _POISON):
            self._poisoned(error)

    def set_timeout(self, seconds: float) -> None:
        """The limit of calls that name none, from now on; until then it is the group's."""
        self.info = replace(self.info, timeout=seconds)
        self._limit = seconds
        for backend in self._backends.values():
            if isinstance(backend, Backend):
                backend.set_timeout(seconds)

    def origins(self) -> dict[str, dict[str, str]]:
        """Where each op comes from, by device: native, or composed of what."""
        return {device: dict(made.origins) for device, made in self._plans.items()}

    # The one way in

    def issue(self, call: Call) -> Work | None:
        """Checks, numbers, records and starts a call. Returns a Work where it is asynchronous."""
        self.require_health()
        call.size = self.size
        call.group = self.name
        call.ranks = self.ranks
        call.timeout = call.timeout or self._limit
        made = self._plan(admit(call) or self._default_device)
        check(call, self.rank)
        dtype = call.dtype
        call.check = self._look
        code = UNKNOWN_DTYPE if dtype is None else DTYPE_CODE.get(dtype, UNKNOWN_DTYPE)
        token = self._begin(call.op, call.nbytes, code, int(call.reduce), call.peer, call.label)
        call.sequence = (self._lane.collectives if call.op.collective else self._lane.messages) - 1
        observed = call if self._call_listeners else None
        if observed is not None:
            call.issued = _core.monotonic_ns()
            for listener in self._call_listeners:
                listener.issued(call)
        try:
            handle = made.runners[call.op.name](call)
            if not call.async_op:
                handle.wait()
        except BaseException as error:
            raise self._ended(token, error, observed) or error from None
        if handle.on_device:
            timed = observed is not None or self._recorder.keeps_times
            handle.when_finished(lambda error: _discard(self._ended(token, error, observed)), soon=timed)
            return Work(handle, call.outputs, _as_it_is) if call.async_op else None
        if call.async_op:
            return self._work(call, token, handle, observed)
        self._ended(token, None, observed)
        if call.op is RECV:
            call.peer = handle.source if call.peer == ANY_SOURCE else call.peer
        return None

    def _begin(self, op: Op, nbytes: int, dtype: int, reduce: int, peer: int, label: str | None) -> int:
        """Numbers and records a call, and compares it with those of the other ranks."""
        number = 0 if label is None else self._label(label)
        try:
            token = self._lane.begin(op.code, nbytes, dtype, reduce, peer, number)
            if self._across is not None and op.collective:
                try:
                    self._across.compare(self._lane.collectives - 1, (op.code, nbytes, dtype, reduce, peer), token)
                except CollectiveMismatch:
                    self._lane.end(token, False)
                    raise
        except _POISON as error:  # the other ranks call something else
            raise self._poisoned(error) from None
        return token

    def _work(self, call: Call, token: int, handle: Handle, observed: Call | None) -> Work:
        def settle(error: BaseException | None) -> BaseException | None:
            return self._ended(token, error, observed)

        work = Work(handle, call.outputs, settle)
        self._works.add(work)
        return work

    def _ended(self, token: int, error: BaseException | None, observed: Call | None) -> BaseException | None:
        """Records the end of a call, and tells the listeners that see calls."""
        self._lane.end(token, error is None)
        if isinstance(error, _POISON):
            error = self._poisoned(error)
        if observed is not None:
            observed.completed = _core.monotonic_ns()
            for listener in self._call_listeners:
                listener.completed(observed, error)
        return error

    def _plan(self, device: str) -> Plan:
        made = self._plans.get(device)
        if made is None:
            backend = self._backends.get(device)
            if backend is None:
                raise UsageError(
                    f"the group {self.name} has no backend for tensors on {device}, only for "
                    f"{', '.join(self._backends)}; move the tensor, or name one, as in 'cpu:gloo,{device}:nccl'"
                )
            if not isinstance(backend, Backend):
                backend = self._backends[device] = backend()
                if self._limit is not None:
                    backend.set_timeout(self._limit)
            made = self._plans[device] = plan(backend)
            self.listeners_changed()  # it may have short cuts
        return made

    def _label(self, label: str) -> int:
        if not isinstance(label, str):
            raise UsageError(f"log_name={label!r} is not a string")
        known = self._labels.get(label)
        if known is None:
            if len(self._labels) >= _KNOWN_LABELS:  # a program may make a new one for each call
                self._labels.clear()
            # What cannot be encoded is shown as it can be; what is endless is cut: others read this too.
            plain = label.encode(errors="backslashreplace").decode()
            known = self._labels[label] = self._recorder.intern(
                plain if len(plain) <= _LABEL_LENGTH else plain[: _LABEL_LENGTH - 1] + "…"
            )
        return known

    def place(self, name: str, rank: int | None, group_rank: int | None, default: int | None = None) -> int:
        """The group's rank for torch's pair of spellings: a global rank, or the group's own."""
        if rank is not None and group_rank is not None:
            raise UsageError(f"pass {name} or group_{name}, not both")
        if group_rank is None and rank is None and default is not None:
            rank = default
        try:
            if group_rank is not None:
                place = index(group_rank)
                if not 0 <= place < self.size:
                    raise UsageError(f"group_{name}={group_rank} is outside the group's ranks 0 to {self.size - 1}")
                return place
            if rank is None:
                raise UsageError(f"pass {name} (a global rank) or group_{name} (the group's own)")
            found = self._rank_of.get(index(rank))
        except TypeError:
            given = f"{name}={rank!r}" if group_rank is None else f"group_{name}={group_rank!r}"
            raise UsageError(f"{given} is not a rank: ranks are integers") from None
        if found is None:
            raise UsageError(f"{name}={rank} is not a rank of the group {self.name}, which has {self.ranks}")
        return found

    def shortly(self, op: Op, async_op: bool, label: str | None, *arguments: Any) -> bool:
        """Whether a short cut took the call: only a synchronous one without a label has any."""
        short_cut = None if async_op or label is not None else self._short_cuts.get(op.name)
        return short_cut is not None and self.quickly(short_cut, *arguments)

    def quickly(self, function: Callable[..., int], *arguments: Any) -> bool:
        """Whether the short cut took the call."""
        try:
            if function(*arguments) == 0:
                return True
            instead = self._instead.get(id(function))
            return instead is not None and instead(*arguments) == 0
        except _POISON as error:
            raise self._poisoned(error) from None

    # The end

    def close(self, wait: bool = True) -> None:
        """Ends the group's backends. Idempotent; what is under way ends with an error."""
        if self._fault is None:
            self.poison(RingwayError(f"the group {self.name} was destroyed; make a new one with new_group"))
        self.closed = True
        for backend in self._backends.values():
            if isinstance(backend, Backend):
                if wait:
                    backend.close()
                else:
                    backend.abort()
        self._plans.clear()
        self._offers.clear()
        self._short_cuts, self._instead = {}, {}
        self.quick_all_reduce = None
        for work in list(self._works):
            if not work.has_ended():
                work.fail(self._fault or RingwayError(f"the group {self.name} was destroyed"))


class Recorded:
    """A block that is one call of a group. (A generator would show the standard library as the call's site.)"""

    def __init__(self, issuer: Issuer, op: Op, label: str) -> None:
        self._issuer, self._op, self._label = issuer, op, label

    def __enter__(self) -> None:
        self._token = self._issuer._begin(self._op, 0, UNKNOWN_DTYPE, 0, -1, self._label)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._issuer.lane.end(self._token, kind is None)


def _as_it_is(error: BaseException | None) -> BaseException | None:
    """For a Work whose end somebody else records."""
    return error


def _discard(_: object) -> None:
    """For a callback that must return nothing."""
