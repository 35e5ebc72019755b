"""The shared-memory engine's reports, turned into ringway's errors."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NoReturn

from ringway.backends.base import GroupInfo
from ringway.call import BARRIER, DTYPES, OPS, Reduce, describe_call
from ringway.errors import (
    CollectiveMismatch,
    CommTimeout,
    PeerLost,
    RingwayError,
    UsageError,
    message_sizes,
    mismatch_error,
)

Facts = Mapping[str, Any]
RAISE_MEMORY = "Raise the memory limit of the job or its container (memory.max, docker's --memory)"


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
    UNREADABLE = 9


class Faults:
    """Turns one group's faults into errors. Ranks are global in all of them."""

    def __init__(self, group: GroupInfo) -> None:
        self._group = group

    def throw(self, outcome: int, fault: Facts | None) -> NoReturn:
        raise self.error(outcome, fault)

    def error(self, outcome: int, fault: Facts | None) -> RingwayError:
        """The error for a call's outcome, and for the fault that ended the group if there is one."""
        name = self._group.name
        if outcome == _Outcome.FORKED:
            return UsageError(
                f"a forked child is not a member of the group {name}; only the process that joined it can make calls"
            )
        if outcome == _Outcome.CLOSED:
            return RingwayError(f"the group {name} was closed before or during the call")
        if fault is None:
            return RingwayError(f"the group {name} has failed, and the rank that knew why is gone")
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
                f"{self._rank(fault['rank'])} corrupted the shared memory of the group {self._group.name}: something "
                "in that process writes where it should not. The group has ended"
            )
        if kind is _Kind.UNREADABLE:
            return RingwayError(
                f"{self._rank(fault['reporter'])} could read the memory of {self._rank(fault['rank'])} when the group "
                f"{self._group.name} was made, and cannot any more: {fault['reason']}. The group has ended"
            )
        return self._lost(kind, fault)

    def _rank(self, place: int) -> str:
        """A member by its global rank, the one users know."""
        return f"rank {self._group.ranks[place]}"

    def _no_memory(self, fault: Facts) -> RingwayError:
        who, name = self._rank(fault["rank"]), self._group.name
        if not fault["bytes"]:
            return RingwayError(
                f"{who} could not start the thread that asynchronous calls of the group {name} need; the group has "
                "ended. Raise the limits of the job or its container on threads and memory"
            )
        why = f" ({fault['reason']})" if fault["reason"] else ""
        return RingwayError(
            f"{who} could not get {fault['bytes']} bytes of memory during {self._describe(fault['own'])}{why}; "
            f"the group has ended. {RAISE_MEMORY}"
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
                return RingwayError(f"{text}; the group {name} has ended, make a new one")
        during = f" during {self._describe(fault['own'])}" if fault["own"]["place"] or fault["own"]["count"] else ""
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
            text = f"{waiter} waited {waited:.1f} s for this rank in {self._describe(own)}, and gave up"
        else:
            absent = ", ".join(map(str, missing))
            late = f"rank {absent} did not arrive within the timeout of {waited:.1f} s ({waiter} did)"
            text = f"{self._describe(own)}: {late}"
        return CommTimeout(
            f"{text}; the group has ended",
            op=OPS[own["op"]].name,
            sequence=own["number"],
            waited=waited,
            missing=missing,
        )

    def _mismatch(self, fault: Facts) -> CollectiveMismatch:
        ranks, details = self._group.ranks, []
        sides = {
            ranks[fault["reporter"]]: self._describe(fault["own"]),
            ranks[fault["rank"]]: self._describe(fault["theirs"]),
        }
        if fault["pair"] is not None:
            source, target, sent, expected = fault["pair"]
            details.append(message_sizes(ranks[source], ranks[target], sent, expected))
        return mismatch_error(self._group.name, sides, fault["own"]["number"], details=details)

    def _describe(self, call: Facts) -> str:
        op, peer = OPS[call["op"]], call["root"]
        return describe_call(
            op,
            call["number"],
            dtype=DTYPES[call["dtype"]] if op is not BARRIER and call["dtype"] < len(DTYPES) else None,
            counts=() if op is BARRIER else [call["count"]],
            reduce=Reduce(call["reduce"]),
            peer=peer if peer < 0 else self._group.ranks[peer],
            group=self._group.name,
            place=call["place"],
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
