"""Ranks of different hosts compare their calls through the job's store.

Every rank keeps a running digest of the group's calls. At some calls it puts the digest, and the calls since the last
time, into the store, unless another rank has already done so for that call; then it compares. `check = "always"` does
this at every call; `sample` does it at the first ones, then every N calls, the same calls on all ranks. The exchange is
one request and one reply, and no rank waits for another. If two ranks differ, the second one to arrive sees it before
it sends anything of that call. It leaves an error where the others look, and `observe/stall` wakes the ranks that are
already waiting.

The store keeps a fixed number of entries per group, one for each of the latest `_SLOTS` calls. A rank that is further
behind is not compared at that call; the digest of a later call shows the difference too.
"""

from __future__ import annotations

import json
import warnings
from typing import Any
from zlib import crc32

import torch.distributed as c10d

import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.compare.one_host import describe_posted
from ringway.errors import CollectiveMismatch, mismatch_error
from ringway.store import Connections

_SLOTS = 128
_FIRST_CALLS = 16
_SAMPLE_EVERY = 64
_TRIES = 16

_NONE: tuple[int, int, int, list[Any]] = (-1, 0, 0, [])

Facts = tuple[int, int, int, int, int]
"""A call's op, bytes, dtype, reduction and root, as `_core.signature` takes them. The root is the group's."""


def join_comparison(info: GroupInfo, check: str, recorder: _core.Recorder) -> HostComparison | None:
    """Call it after the backend is made. None if the configuration compares calls only when they stall."""
    if check == "stall":
        return None
    store = c10d.PrefixStore(f"ringway/compare/{info.mark}", info.process.part(Connections).to(info.store))
    # The more ranks use the store, the less often each of them does.
    return HostComparison(info, store, recorder, 1 if check == "always" else max(_SAMPLE_EVERY, info.size))


class HostComparison:
    """One rank's part in one group's comparison. Calls arrive in issue order, from one thread at a time."""

    def __init__(self, info: GroupInfo, store: c10d.Store, recorder: _core.Recorder, every: int) -> None:
        self._info = info
        self._store = store
        self._recorder = recorder
        self._every = every
        self._digest = 0
        self._before = 0
        self._since: list[tuple[Facts, int]] = []
        self._stored: dict[int, str] = {}
        self._off = False
        self._latest = _NONE
        """The latest call's number, and what was here before it."""

    def compare(self, sequence: int, facts: Facts, token: int) -> None:
        """Adds a call, which the recorder knows by `token`. Raises CollectiveMismatch if the ranks' calls differ."""
        if self._off:
            return
        self._latest = sequence, self._digest, self._before, self._since
        self._digest = crc32(_core.signature(*facts).to_bytes(8, "little"), self._digest)
        self._since.append((facts, token))
        if sequence >= _FIRST_CALLS and (sequence + 1) % self._every:
            return
        own = self._own_side(sequence)
        self._before = self._digest
        self._since = []
        try:
            other = self._exchange(sequence, json.dumps(own))
        except Exception as error:  # if the store is gone, the collective itself fails with a better message
            self._off = True
            warnings.warn(
                f"ringway: calls of the group {self._info.name} are no longer compared across hosts: {error}",
                stacklevel=2,
            )
            return
        if other is not None:
            self._judge(sequence, own, other)

    def take_back(self, sequence: int) -> None:
        """The call of this number was not made. If it is the latest, forget it: the next call has its number."""
        if self._latest[0] == sequence:
            _, self._digest, self._before, self._since = self._latest
            self._since.pop()
            self._latest = _NONE

    def _own_side(self, sequence: int) -> dict[str, Any]:
        """This rank's calls since the last time. Calls repeat, so each kind is written once."""
        kinds: dict[str, int] = {}
        calls = []
        for facts, token in self._since:
            row = self._recorder.find(token)
            place = "an unknown line" if row is None or row[8] is None else f"{row[8][0]}:{row[8][1]}"
            root = self._info.ranks[facts[4]] if facts[4] >= 0 else facts[4]
            calls.append(kinds.setdefault(json.dumps([*facts[:4], root, place]), len(kinds)))
        return {
            "sequence": sequence,
            "rank": self._info.ranks[self._info.rank],
            "before": self._before,
            "after": self._digest,
            "kinds": [json.loads(kind) for kind in kinds],
            "calls": calls,
        }

    def _exchange(self, sequence: int, own: str) -> dict[str, Any] | None:
        """Another rank's entry for this call; None if this rank is the first, or far behind."""
        slot = sequence % _SLOTS
        expected = self._stored.get(slot, "")
        for _ in range(_TRIES):
            stored = self._store.compare_set(str(slot), expected, own).decode()
            self._stored[slot] = stored
            if stored == own:
                return None
            other: dict[str, Any] = json.loads(stored)
            if other["sequence"] >= sequence:
                return other if other["sequence"] == sequence else None
            expected = stored  # of an earlier call, at which this rank was far behind
        return None

    def _judge(self, sequence: int, own: dict[str, Any], other: dict[str, Any]) -> None:
        if "fault" in other:  # two other ranks have already found a difference
            fault = other["fault"]
            sides = {int(rank): side for rank, side in fault["sides"].items()}
            raise CollectiveMismatch(fault["text"], sides=sides, sequence=fault["sequence"])
        if own["after"] == other["after"]:
            return
        error = self._difference(own, other)
        fault = {"text": str(error), "sides": error.sides, "sequence": error.sequence}
        self._store.set(str(sequence % _SLOTS), json.dumps({"sequence": sequence, "fault": fault}))
        raise error

    def _difference(self, own: dict[str, Any], other: dict[str, Any]) -> CollectiveMismatch:
        """The error for the first call at which the two ranks differ."""
        last = own["sequence"]
        mine, theirs = _history(own), _history(other)
        if own["before"] != other["before"] or len(mine) != len(theirs):
            calls = {own["rank"]: mine[-1], other["rank"]: theirs[-1]}
            return self._error(last, calls, f"at call #{last} or before it")
        for place, (one, another) in enumerate(zip(mine, theirs, strict=True)):
            if _core.signature(*one[:5]) != _core.signature(*another[:5]):
                return self._error(last - len(mine) + 1 + place, {own["rank"]: one, other["rank"]: another})
        raise AssertionError("the digests differ, but no call does")

    def _error(self, sequence: int, calls: dict[int, Any], *details: str) -> CollectiveMismatch:
        name = self._info.name
        sides = {rank: describe_posted(name, (sequence, *call)) for rank, call in calls.items()}
        return mismatch_error(name, sides, sequence, details=details)


def _history(side: dict[str, Any]) -> list[Any]:
    kinds = [tuple(kind) for kind in side["kinds"]]
    return [kinds[number] for number in side["calls"]]
