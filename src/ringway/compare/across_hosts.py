"""Ranks of different hosts compare what they call, through the job's store.

Every rank counts a digest of the group's calls. At some calls (`always`: at each; `sample`: at the first ones, then at
one of many, all ranks at the same) it puts the digest, and the calls since the last time, into the store, unless
another rank has done so for that call; then it compares. That is one question and one answer, and nobody is waited for:
of two ranks that part, whoever comes second sees it, before it sends anything of that call. It leaves what it saw where
the others look, and `observe/faults.py` wakes those that wait already.

The store keeps a fixed number of answers a group: one for each of the latest `_SLOTS` calls. A rank that is further
behind than that is not compared at that call; the digest of the next one tells all the same.
"""

from __future__ import annotations

import json
import secrets
import warnings
from contextlib import suppress
from typing import Any
from zlib import crc32

import torch.distributed as c10d

import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.call import OPS
from ringway.compare.one_host import describe, parted
from ringway.errors import CollectiveMismatch

_SLOTS = 128
_FIRST_CALLS = 16
_ONE_OF = 64
_TRIES = 16
_CORNER = "ringway/across"

Facts = tuple[int, int, int, int, int]
"""Codes of op, bytes, dtype, reduction and root of a call."""

_connections: dict[tuple[str, int], c10d.Store] = {}
"""This process's own, one to each store: another thread may be inside a wait on the program's."""


def _own_connection(store: c10d.Store) -> c10d.Store:
    inner: Any = store
    while isinstance(inner, c10d.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, c10d.TCPStore):
        return inner  # a file, or memory: nobody's wait blocks it
    where = (inner.host, inner.port)
    try:
        _connections[where].check([_CORNER])
    except Exception:  # there is none, or it was to an earlier job's store
        _connections[where] = inner.clone()  # type: ignore[attr-defined]
    return _connections[where]


def announce(info: GroupInfo) -> None:
    """Rank 0 of the group names a corner of the store that no earlier group has used. Before the backend is made."""
    if info.rank == 0 and info.size > 1:
        with suppress(Exception):  # a store that is gone fails the backend, with a better message
            info.store.set(_CORNER, secrets.token_hex(8))


def join(info: GroupInfo, how: str, recorder: _core.Recorder) -> Across | None:
    """After the backend is made. None where the configuration leaves comparing to stalls."""
    if how == "stall":
        return None
    corner = info.store.get(_CORNER).decode()
    store = c10d.PrefixStore(f"{_CORNER}/{corner}", _own_connection(info.store))
    # The more ranks ask the store, the less often each does.
    return Across(info, store, recorder, 1 if how == "always" else max(_ONE_OF, info.size))


def _agreed(facts: Facts) -> tuple[int, ...]:
    """Of a call's facts those that must be the same on every rank."""
    op, nbytes, dtype, reduce, root = facts
    agree = OPS[op].agree
    return (
        op,
        nbytes if "bytes" in agree else 0,
        dtype if "dtype" in agree else 0,
        reduce if "reduce" in agree else 0,
        root if "root" in agree else 0,
    )


class Across:
    """One rank's side of one group. Calls come in issue order, from one thread at a time."""

    def __init__(self, info: GroupInfo, store: c10d.Store, recorder: _core.Recorder, one_of: int) -> None:
        self._info = info
        self._store = store
        self._recorder = recorder
        self._one_of = one_of
        self._digest = 0
        self._before = 0
        self._since: list[tuple[Facts, int]] = []
        self._standing: dict[int, str] = {}
        self._off = False

    def compare(self, sequence: int, facts: Facts, token: int) -> None:
        """Counts a call, which the recorder knows by `token`. Raises CollectiveMismatch where ranks have parted."""
        if self._off:
            return
        self._digest = crc32(repr(_agreed(facts)).encode(), self._digest)
        self._since.append((facts, token))
        if sequence >= _FIRST_CALLS and (sequence + 1) % self._one_of:
            return
        own = self._own_side(sequence)
        self._before = self._digest
        self._since.clear()
        try:
            other = self._exchange(sequence, json.dumps(own))
        except Exception as error:  # the collective itself will say what a store that is gone means
            self._off = True
            warnings.warn(
                f"ringway: calls of the group {self._info.name} are no longer compared across hosts: {error}",
                stacklevel=2,
            )
            return
        if other is not None:
            self._judge(sequence, own, other)

    def _own_side(self, sequence: int) -> dict[str, Any]:
        """Calls repeat, so each kind is written once."""
        kinds: dict[str, int] = {}
        calls = []
        for facts, token in self._since:
            row = self._recorder.find(token)
            place = "an unknown line" if row is None or row[8] is None else f"{row[8][0]}:{row[8][1]}"
            calls.append(kinds.setdefault(json.dumps([*facts, place]), len(kinds)))
        return {
            "sequence": sequence,
            "rank": self._info.ranks[self._info.rank],
            "before": self._before,
            "after": self._digest,
            "kinds": [json.loads(kind) for kind in kinds],
            "calls": calls,
        }

    def _exchange(self, sequence: int, own: str) -> dict[str, Any] | None:
        """What another rank said of this call; None where this one is the first, or far behind."""
        slot = sequence % _SLOTS
        expected = self._standing.get(slot, "")
        for _ in range(_TRIES):
            stands = self._store.compare_set(str(slot), expected, own).decode()
            self._standing[slot] = stands
            if stands == own:
                return None
            other: dict[str, Any] = json.loads(stands)
            if other["sequence"] >= sequence:
                return other if other["sequence"] == sequence else None
            expected = stands  # of an earlier call, at which this rank was far behind
        return None

    def _judge(self, sequence: int, own: dict[str, Any], other: dict[str, Any]) -> None:
        if "fault" in other:  # a third rank has parted from those two
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
        """The first call at which the two part."""
        name, last = self._info.name, own["sequence"]
        mine, theirs = _history(own), _history(other)
        if own["before"] != other["before"] or len(mine) != len(theirs):
            sides = {side["rank"]: describe((last, *calls[-1])) for side, calls in ((own, mine), (other, theirs))}
            return CollectiveMismatch(
                f"{parted(name, sides, last)}\n  at call #{last} or before it",
                sides=sides,
                sequence=last,
            )
        for place, (one, another) in enumerate(zip(mine, theirs, strict=True)):
            if _agreed(one[:5]) != _agreed(another[:5]):
                first = last - len(mine) + 1 + place
                sides = {own["rank"]: describe((first, *one)), other["rank"]: describe((first, *another))}
                return parted(name, sides, first)
        raise AssertionError("digests differ where no call does")


def _history(side: dict[str, Any]) -> list[Any]:
    kinds = [tuple(kind) for kind in side["kinds"]]
    return [kinds[number] for number in side["calls"]]
