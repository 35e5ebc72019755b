"""The recorder's contents as values: the latest calls, and the state of each group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import ringway._core as _core
from ringway.call import DTYPE_CODE, DTYPES, OP_BY_NAME, OPS, UNKNOWN_DTYPE, Reduce, describe_call
from ringway.errors import UsageError
from ringway.groups.world import world
from ringway.observe.log.summary import printable

_STATES = ("issued", "completed", "failed")


@dataclass(frozen=True)
class RecordedCall:
    """One call as the recorder kept it.

    `peer` is the global rank of the root, the destination or the source. Times are nanoseconds of the host's monotonic
    counter, as `_core.monotonic_ns()` returns them; `completed_ns` is 0 while the call is in flight. `site` is (file,
    line, function), or None if no Python frame of the program was on the stack (on the autograd engine's threads).
    """

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
    started_ns: int = 0
    """When it started on its device, if that was asked: while the logger or a trace is on. `completed_ns` is then the
    device's too."""
    stream: int = 0
    """The device's stream, numbered from 1, if it has `started_ns`."""
    beside: bool = False
    """Whether that is a stream of its own: the program's stream could run something else at the same time."""

    @property
    def duration(self) -> float | None:
        """Seconds from its start on the device, or else from its issue, to completion; None while in flight."""
        return None if not self.completed_ns else (self.completed_ns - (self.started_ns or self.issued_ns)) / 1e9

    @property
    def place(self) -> str:
        """The line of the program that made the call."""
        return "an unknown line" if self.site is None else f"{self.site[0]}:{self.site[1]}"

    def signature(self) -> int:
        """One word for all that the ranks must agree on: two ranks made the same call if their words are equal."""
        return _core.signature(
            OP_BY_NAME[self.op].code,
            self.nbytes,
            UNKNOWN_DTYPE if self.dtype is None else DTYPE_CODE.get(self.dtype, UNKNOWN_DTYPE),
            Reduce.SUM if self.reduce is None else Reduce[self.reduce],
            -1 if self.peer is None else self.peer,
        )

    def describe(self) -> str:
        """The call in words: `all_reduce #12 (float32, 4096 bytes, SUM, group dp) at train.py:88`."""
        return describe_call(
            OP_BY_NAME[self.op],
            self.sequence,
            dtype=self.dtype,
            nbytes=self.nbytes,
            reduce=None if self.reduce is None else Reduce[self.reduce],
            peer=self.peer,
            group=self.group,
            label=printable(self.label),
            place=self.place,
        )


def recorded(row: Sequence[Any]) -> RecordedCall:
    """A call from a row of the recorder, of this process or from another rank's reply."""
    sequence, op, nbytes, dtype, reduce, peer, group, label, site, issued, completed, state, size = row[:13]
    started, stream, beside = row[13:]
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
        started_ns=started,
        stream=stream,
        beside=bool(beside),
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
                "collectives": each.record.collectives,
                "messages": each.record.messages,
                "completed": each.record.completed,
                "fault": None if each.fault is None else str(each.fault),
            }
            for each in world.communicators()
        ],
    }


@contextmanager
def profiled() -> Iterator[None]:
    """Calls that this thread issues in this context are logged even if their op is not chosen: `prof=True`."""
    before = _core.is_profiled()
    _core.set_profiled(True)
    try:
        yield
    finally:
        _core.set_profiled(before)


@contextmanager
def unlogged() -> Iterator[None]:
    """Calls that this thread issues in this context are recorded, but not logged: they are ringway's own."""
    before = _core.is_quiet()
    _core.set_quiet(True)
    try:
        yield
    finally:
        _core.set_quiet(before)
