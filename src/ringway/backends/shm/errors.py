"""What the shared-memory engine reports, as ringway's errors."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NoReturn

from ringway.backends.base import GroupInfo
from ringway.call import DTYPES, OPS, Reduce
from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost, RingwayError, UsageError

Facts = Mapping[str, Any]


class _Outcome(IntEnum):
    """csrc/shm/membership.h"""

    DONE = 0
    FAULTED = 1
    INTERRUPTED = 2
    CLOSED = 3
    FORKED = 4


class _Kind(IntEnum):
    """csrc/shm/segment.h"""

    MISMATCH = 1
    PEER_LOST = 2
    PEER_LEFT = 3
    TIMEOUT = 4
    INTERRUPTED = 5
    ABORTED = 6
    MEMORY = 7
    CORRUPT = 8


class Faults:
    """Words for one group's faults."""

    def __init__(self, group: GroupInfo) -> None:
        self._group = group

    def throw(self, outcome: int, fault: Facts | None) -> NoReturn:
        raise self.error(outcome, fault)

    def error(self, outcome: int, fault: Facts | None) -> RingwayError:
        """How a call ended, and the fault that ended the group, if there is one."""
        name = self._group.name
        if outcome == _Outcome.FORKED:
            return UsageError(
                f"a forked child is no member of the group {name}; only the process that joined it can call collectives"
            )
        if outcome == _Outcome.CLOSED:
            return RingwayError(f"the group {name} was closed while the call was under way, or before it")
        if fault is None:
            return RingwayError(f"the group {name} has failed, and the rank that saw why is gone")
        return self._from_fault(_Kind(fault["kind"]), fault)

    def _from_fault(self, kind: _Kind, fault: Facts) -> RingwayError:
        if kind is _Kind.MISMATCH:
            return self._mismatch(fault)
        if kind is _Kind.TIMEOUT:
            return self._timeout(fault)
        if kind is _Kind.MEMORY:
            return self._no_memory(fault)
        if kind is _Kind.CORRUPT:
            return RingwayError(
                f"{self._rank(fault['rank'])} has written into the shared memory of the group {self._group.name} what "
                "cannot be: something in that process writes where it should not. The group has ended"
            )
        return self._lost(kind, fault)

    def _rank(self, place: int) -> str:
        """A member by its global rank, as users know it."""
        return f"rank {self._group.ranks[place]}"

    def _no_memory(self, fault: Facts) -> RingwayError:
        who, name = self._rank(fault["rank"]), self._group.name
        if not fault["bytes"]:
            return RingwayError(
                f"{who} could not start the thread that asynchronous calls of the group {name} need; the group has "
                "ended. Raise the limits of the job or its container on threads and memory"
            )
        return RingwayError(
            f"{who} could not get {fault['bytes']} bytes of memory during {_describe(fault['own'])} of the group "
            f"{name}; the group has ended. Raise the memory limit of the job or its container"
        )

    def _lost(self, kind: _Kind, fault: Facts) -> RingwayError:
        place, name = fault["rank"], self._group.name
        pid, number = fault["pid"] or None, fault["signal"] or None
        who = self._rank(place) + (f" (pid {pid})" if pid else "")
        if kind is _Kind.PEER_LOST:
            end = f"was killed by {_signal_name(number)}" if number else "has ended"
            text = f"the process of {who} {end}"
        elif kind is _Kind.PEER_LEFT:
            text = f"{who} has closed the group"
        else:
            end = "was interrupted in the middle of a call" if kind is _Kind.INTERRUPTED else "aborted the group"
            text = f"{who} {end}"
            if place == self._group.rank:
                return RingwayError(f"{text} {name}, which has ended; make a new group")
        during = f" during {_describe(fault['own'])}" if fault["own"]["place"] or fault["own"]["count"] else ""
        return PeerLost(
            f"{text}; the group {name} has ended{during}",
            rank=self._group.ranks[place],
            host=socket.gethostname(),
            pid=pid,
            signal=number,
        )

    def _timeout(self, fault: Facts) -> CommTimeout:
        own, waited = fault["own"], fault["waited"]
        missing = [self._group.ranks[place] for place in fault["missing"]]
        waiter = self._rank(fault["reporter"])
        if self._group.rank in fault["missing"]:
            text = f"{waiter} waited {waited:.1f} s for this rank in {_describe(own)}, and gave up"
        else:
            absent = ", ".join(map(str, missing))
            text = f"{_describe(own)}: rank {absent} did not come within the timeout of {waited:.1f} s ({waiter} did)"
        return CommTimeout(
            f"{text}; the group {self._group.name} has ended",
            op=OPS[own["op"]].name,
            sequence=own["number"],
            waited=waited,
            missing=missing,
        )

    def _mismatch(self, fault: Facts) -> CollectiveMismatch:
        sides = {fault["reporter"]: _describe(fault["own"]), fault["rank"]: _describe(fault["theirs"])}
        lines = [f"ranks of the group {self._group.name} called different things, and the group has ended"]
        lines += [f"  {self._rank(place)}: {side}" for place, side in sorted(sides.items())]
        if fault["pair"] is not None:
            source, target, sent, expected = fault["pair"]
            lines.append(f"  {self._rank(source)} sends {sent} bytes to {self._rank(target)}, which expects {expected}")
        return CollectiveMismatch("\n".join(lines), sides=sides, sequence=fault["own"]["number"])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _describe(call: Facts) -> str:
    op = OPS[call["op"]]
    facts = []
    if op.name != "barrier":
        dtype = str(DTYPES[call["dtype"]]).removeprefix("torch.") if call["dtype"] < len(DTYPES) else "bytes"
        facts.append(f"{dtype}[{call['count']}]")
    if "reduce" in op.agree:
        facts.append(Reduce(call["reduce"]).name)
    if "root" in op.agree:
        facts.append(f"root {call['root']}")
    if not op.collective:
        facts.append("peer any" if call["root"] < 0 else f"peer {call['root']}")
    where = f" at {call['place']}" if call["place"] else ""
    details = f" ({', '.join(facts)})" if facts else ""
    return f"{op.name} #{call['number']}{details}{where}"
