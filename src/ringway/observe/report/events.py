"""Reads the calls of a trace event by event: a trace of many ranks is far larger than what is drawn of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from sys import intern
from typing import Any, BinaryIO, NamedTuple

from ringway.errors import UsageError
from ringway.observe.trace.writer import HEAD

_LINES_TOGETHER = 1000


class TracedCall(NamedTuple):
    """One call of one rank. Times are microseconds from the start of the trace."""

    rank: int
    track: int
    start: float
    took: float
    name: str
    op: str
    sequence: int
    group: str
    nbytes: int
    site: str
    state: str
    collective: bool
    bus_gigabytes_a_second: float
    bus_factor: float
    stream: int = 0
    """The device's stream; 0 if the call was timed on the host."""
    beside: bool = False
    """Whether that was not the program's own stream."""
    size: int = 0
    """The number of ranks in the group."""


@dataclass(frozen=True)
class Events:
    """The calls in the order they were issued, and how many the trace dropped."""

    calls: list[TracedCall]
    dropped: int

    def in_one_folder(self) -> tuple[Events, str]:
        """The same with sites relative to the folder that all of them are in, and that folder; "" if there is none."""
        sites = {call.site for call in self.calls}
        folders = {os.path.dirname(site) for site in sites if site}
        if not folders or not all(map(os.path.isabs, folders)):
            return self, ""
        folder = os.path.commonpath(folders)
        if folder == os.sep:
            return self, ""
        start = len(folder) + len(os.sep)
        short = {site: intern(site[start:]) for site in sites}
        # _replace would take twice as long, which counts for hundreds of thousands of calls.
        place = TracedCall._fields.index("site")
        calls = [TracedCall._make((*call[:place], short[call.site], *call[place + 1 :])) for call in self.calls]
        return Events(calls, self.dropped), folder


def read(path: str | os.PathLike[str]) -> Events:
    """Read a trace that `ringway.trace` wrote."""
    name = os.fspath(path)
    rest: dict[str, Any] = {}
    try:
        with open(name, "rb") as file:
            calls = [call for event in _events(file, rest) if (call := _call(event)) is not None]
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"{name} is not a ringway trace: {error}") from None
    if not calls:
        raise UsageError(f"{name} contains no ringway calls")
    calls.sort(key=lambda call: call.start)
    dropped = rest.get("otherData", {}).get("dropped", 0) if isinstance(rest.get("otherData"), dict) else 0
    return Events(calls, dropped if isinstance(dropped, int) else 0)


def _events(file: BinaryIO, rest: dict[str, Any]) -> Iterator[Any]:
    """Each event. The rest of the file's contents go into `rest`."""
    head = file.read(len(HEAD))
    if head == HEAD:
        yield from _by_line(file, rest)
        return
    whole = json.loads(head + file.read())  # another program has rewritten it
    if not isinstance(whole, dict) or not isinstance(whole.get("traceEvents"), list):
        raise ValueError("it has no traceEvents")
    rest.update(whole)
    yield from whole["traceEvents"]


def _by_line(lines: BinaryIO, rest: dict[str, Any]) -> Iterator[Any]:
    together: list[bytes] = []
    for line in lines:
        if line.strip() == b"],":
            yield from _decoded(together)
            rest.update(json.loads(b"{" + lines.read()))
            return
        together.append(line.strip().rstrip(b","))
        if len(together) == _LINES_TOGETHER:
            yield from _decoded(together)
            together.clear()
    raise ValueError("its end is missing")


def _decoded(lines: Iterable[bytes]) -> list[Any]:
    """The events of some lines at once, which takes half as long as one by one."""
    events: list[Any] = json.loads(b"[" + b",".join(filter(None, lines)) + b"]")
    return events


def _call(event: Any) -> TracedCall | None:
    """None for anything but a ringway call: track names, or other programs' events in a merged trace."""
    args = event.get("args") if isinstance(event, dict) else None
    if not isinstance(args, dict) or event.get("ph") != "X" or "sequence" not in args:
        return None
    rate = float(args["algbw_GBps"])
    return TracedCall(
        rank=int(event["pid"]),
        track=int(event["tid"]),
        start=float(event["ts"]),
        took=float(event["dur"]),
        name=intern(str(event["name"])),
        op=intern(str(args["op"])),
        sequence=int(args["sequence"]),
        group=intern(str(args["group"])),
        nbytes=int(args["bytes"]),
        site=intern(str(args["site"])),
        state=intern(str(args["state"])),
        collective=event["cat"] == "collective",
        bus_gigabytes_a_second=float(args["busbw_GBps"]),
        bus_factor=float(args["busbw_GBps"]) / rate if rate else 0.0,
        stream=int(args.get("stream", 0)),
        beside=bool(args.get("beside", False)),
        size=int(args.get("group_size", 0)),
    )
