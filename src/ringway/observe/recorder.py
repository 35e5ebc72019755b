"""The recorder's contents as values: the latest calls, and the state of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ringway._core as _core
from ringway.call import DTYPES, OP_BY_NAME, OPS, Reduce
from ringway.errors import UsageError
from ringway.groups.world import world
from ringway.observe.log.summary import printable, size_text

_STATES = ("issued", "completed", "failed")


@dataclass(frozen=True)
class RecordedCall:
    """One recorded call. Times are nanoseconds of the host's monotonic clock (`_core.monotonic_ns()`); `completed_ns`
    is 0 while the call is in flight. `site` is (file, line, function), or None if the stack held no Python frame of the
    program, as in the autograd engine's threads."""

    sequence: int
    op: str
    nbytes: int
    dtype: torch.dtype | None
    reduce: str | None
    peer: int | None
    group: str
    label: str
    site: tuple[str, int, str] | None
    issued_ns: int
    completed_ns: int
    state: str
    size: int = 1
    """Number of ranks in the group."""

    @property
    def duration(self) -> float | None:
        """Seconds from issue to completion; None while in flight."""
        return None if not self.completed_ns else (self.completed_ns - self.issued_ns) / 1e9

    @property
    def place(self) -> str:
        """The line of the program that made the call."""
        return "an unknown line" if self.site is None else f"{self.site[0]}:{self.site[1]}"

    def describe(self) -> str:
        """all_reduce #12 (float32, 4.0 KB, SUM, group dp, train.py:88)"""
        facts = []
        if self.dtype is not None:
            facts.append(str(self.dtype).removeprefix("torch."))
        if self.op != "barrier":
            facts.append(size_text(self.nbytes))
        if self.reduce is not None:
            facts.append(self.reduce)
        if self.peer is not None:
            facts.append(f"{'root' if OP_BY_NAME[self.op].collective else 'peer'} {self.peer}")
        facts += [f"group {self.group}", self.place]
        label = f" '{printable(self.label)}'" if self.label else ""
        return f"{self.op}{label} #{self.sequence} ({', '.join(facts)})"


def recorded(row: Sequence[Any]) -> RecordedCall:
    """A call from a row of the recorder, of this process or from another rank's reply."""
    sequence, op, nbytes, dtype, reduce, peer, group, label, site, issued, completed, state, size = row
    facts = OPS[op]
    return RecordedCall(
        sequence=sequence,
        op=facts.name,
        nbytes=nbytes,
        dtype=DTYPES[dtype] if dtype < len(DTYPES) else None,
        reduce=Reduce(reduce).name if "reduce" in facts.agree else None,
        peer=peer if "root" in facts.agree or not facts.collective else None,
        group=group,
        label=label,
        site=None if site is None else (site[0], site[1], site[2]),
        issued_ns=issued,
        completed_ns=completed,
        state=_STATES[state],
        size=size,
    )


def recent_calls(n: int = 100) -> list[RecordedCall]:
    """The latest `n` calls of this process, oldest first. The recorder is always on and keeps a fixed number."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise UsageError(f"n={n!r} is not a number of calls")
    return [recorded(row) for row in world.recorder.recent(n)]


def status() -> dict[str, Any]:
    """The state of this process: its groups, how many calls each has issued and completed, and the calls in flight."""
    now = _core.monotonic_ns()
    under_way = [
        {
            "op": call.op,
            "sequence": call.sequence,
            "group": call.group,
            "nbytes": call.nbytes,
            "label": call.label,
            "site": call.site,
            "seconds": (now - call.issued_ns) / 1e9,
        }
        for call in recent_calls(world.recorder.capacity)
        if call.state == "issued"
    ]
    return {
        "calls": world.recorder.total,
        "backend_reason": world.backend_reason,
        "under_way": under_way,
        "groups": [
            {
                "name": each.name,
                "rank": each.rank,
                "ranks": list(each.ranks),
                "backend": each.backend.name,
                "collectives": each.lane.collectives,
                "messages": each.lane.messages,
                "completed": each.lane.completed,
                "fault": None if each.fault is None else str(each.fault),
            }
            for each in world.communicators()
        ],
    }
