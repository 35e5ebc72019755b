"""`trace(path)`: all ranks' calls in one file that Chrome and Perfetto open.

In the file, a rank is a process and a group is a track in it; overlapping calls get tracks of their own. Times are on
rank 0's clock. The size is bounded: after `limit` calls, a rank only counts them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as c10d

from ringway.call import OP_BY_NAME
from ringway.errors import RingwayError, UsageError
from ringway.groups.objects import ObjectChannel
from ringway.groups.world import world
from ringway.observe.files import write_whole
from ringway.observe.log.summary import bus_factor
from ringway.observe.meeting import decline, meet
from ringway.observe.recorder import RecordedCall, recorded, unlogged
from ringway.observe.trace.clock import offset_in_world

LIMIT = 200_000
HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'
"""How the file begins. One event per line follows, then a line `],` and the rest, so a reader can stream it."""
_MAX_TRACKS = 64


@dataclass(frozen=True)
class Part:
    """One rank's part of a trace: rows of the recorder, and the offset to rank 0's clock."""

    rank: int
    host: str
    pid: int
    offset_ns: int
    dropped: int
    rows: Sequence[Sequence[Any]]


_one_at_a_time = threading.Lock()


@contextmanager
def trace(path: str | os.PathLike[str], *, limit: int = LIMIT) -> Iterator[None]:
    """Write all ranks' calls in this context to `path`. Every rank enters and leaves it. If the block raises, or the
    other ranks cannot be reached, each rank writes its own calls to `path.rankN` instead."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit < 2**63:
        raise UsageError(f"limit={limit!r} is not a number of calls")
    if not _one_at_a_time.acquire(blocking=False):
        raise UsageError("a trace is already running: the recorder keeps one at a time")
    try:
        recorder = world.recorder
        recorder.start_trace(limit)
        try:
            yield
        except BaseException:
            rows, dropped = recorder.stop_trace()
            if c10d.is_initialized() and c10d.get_world_size() > 1:
                decline("trace")
            _write_own(path, _own_part(rows, dropped, 0))
            raise
        rows, dropped = recorder.stop_trace()
        _finish(path, rows, dropped)
    finally:
        _one_at_a_time.release()


def _own_part(rows: Sequence[Any], dropped: int, offset: int) -> Part:
    rank = c10d.get_rank() if c10d.is_initialized() else 0
    return Part(rank, socket.gethostname(), os.getpid(), offset, dropped, rows)


def _finish(path: str | os.PathLike[str], rows: Sequence[Any], dropped: int) -> None:
    if not c10d.is_initialized() or c10d.get_world_size() == 1:
        write_whole(path, encoded([_own_part(rows, dropped, 0)]))
        return
    try:
        meeting = meet("trace")
        if meeting is None:
            raise RingwayError("a rank left the trace with an error, or did not come to its end in time")
        offset = offset_in_world(meeting)
        with unlogged():
            channel = ObjectChannel(world.communicator(None), world.max_object_bytes)
            parts = channel.gather(_own_part(rows, dropped, offset), 0)
    except Exception as error:  # every rank still has its own trace if the group is broken
        warnings.warn(
            f"ringway: could not gather the ranks' traces ({type(error).__name__}: {error}); each rank writes its own",
            stacklevel=4,
        )
        _write_own(path, _own_part(rows, dropped, 0))
        return
    if parts is not None:
        write_whole(path, encoded(parts))


def _write_own(path: str | os.PathLike[str], part: Part) -> None:
    write_whole(f"{os.fspath(path)}.rank{part.rank}", encoded([part]))


def encoded(parts: Sequence[Part]) -> Iterator[bytes]:
    """The file's contents, event by event."""
    yield HEAD
    first = True
    for event in events(parts):
        yield (b"" if first else b",\n") + json.dumps(event).encode()
        first = False
    facts = {"made_by": "ringway", "ranks": len(parts), "dropped": sum(part.dropped for part in parts)}
    yield b"\n],\n" + f'"otherData":{json.dumps(facts)}}}\n'.encode()


def events(parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    origin = min((_start(row) + part.offset_ns for part in parts for row in part.rows), default=0)
    for part in parts:
        name = f"rank {part.rank} ({part.host}, pid {part.pid})"
        yield {"ph": "M", "name": "process_name", "pid": part.rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": part.rank, "args": {"sort_index": part.rank}}
        tracks = _Tracks(part.rank)
        for row in sorted(part.rows, key=_start):
            yield from _call_events(recorded(row), part, origin, tracks)


def _start(row: Sequence[Any]) -> int:
    """When the call of a row started on its device, if it was timed there; else when it was issued."""
    started: int = row[13] or row[9]
    return started


class _Tracks:
    """Numbers the tracks of one rank: one per group, and more if its calls overlap."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._busy: dict[str, list[int]] = {}
        self._numbers: dict[tuple[str, int], int] = {}

    def place(self, group: str, start: int, end: int) -> tuple[int, dict[str, Any] | None]:
        """The track for a call, and the event that names the track if it is new."""
        tracks = self._busy.setdefault(group, [])
        track = next((i for i, until in enumerate(tracks) if until <= start), None)
        if track is None:
            track = min(len(tracks), _MAX_TRACKS - 1)
            tracks[track:] = [0]
        tracks[track] = end
        number = self._numbers.get((group, track))
        if number is not None:
            return number, None
        number = self._numbers[group, track] = len(self._numbers)
        name = f"group {group}" + (f", overlapping {track}" if track else "")
        return number, {"ph": "M", "name": "thread_name", "pid": self._rank, "tid": number, "args": {"name": name}}


def _call_events(call: RecordedCall, part: Part, origin: int, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    start = call.started_ns or call.issued_ns
    took = max(call.completed_ns - start, 1)
    where = call.group + (f", stream {call.stream}" if call.stream else "")
    number, named = tracks.place(where, start, call.completed_ns)
    if named is not None:
        yield named
    rate = call.nbytes / took
    yield {
        "ph": "X",
        "name": call.label or call.op,
        "cat": "p2p" if call.op in ("send", "recv") else "collective",
        "pid": part.rank,
        "tid": number,
        "ts": (start + part.offset_ns - origin) / 1e3,
        "dur": took / 1e3,
        "args": {
            "op": call.op,
            "sequence": call.sequence,
            "group": call.group,
            "group_size": call.size,
            "bytes": call.nbytes,
            "dtype": None if call.dtype is None else str(call.dtype).removeprefix("torch."),
            "algbw_GBps": float(f"{rate:.6g}"),
            "busbw_GBps": float(f"{rate * bus_factor(OP_BY_NAME[call.op].code, '', call.size):.6g}"),
            "site": call.place,
            "state": call.state,
            **({"stream": call.stream, "beside": call.beside} if call.stream else {}),
        },
    }
