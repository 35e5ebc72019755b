"""The numbers behind the page's pictures, out of a trace's events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ringway.observe.books import Line, size_text

_MAX_BARS = 6000
_MAX_COLUMNS = 60


def calls_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The trace's calls, in the order they were issued."""
    kept = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "sequence" in event.get("args", {})]
    return sorted(kept, key=lambda event: event["ts"])


def timeline(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Bars by rank. Of too many the longest are shown, which are what one looks for."""
    shown = sorted(calls, key=lambda call: -call["dur"])[:_MAX_BARS]
    ranks = sorted({call["pid"] for call in calls})
    lanes = {rank: max((call["tid"] for call in shown if call["pid"] == rank), default=0) + 1 for rank in ranks}
    return {
        "ranks": [{"rank": rank, "lanes": lanes[rank]} for rank in ranks],
        "end": max((call["ts"] + call["dur"] for call in calls), default=1.0),
        "shown": len(shown),
        "of": len(calls),
        "bars": [
            [
                call["pid"],
                call["tid"],
                round(call["ts"], 3),
                round(call["dur"], 3),
                call["name"],
                call["args"]["op"],
                call["args"]["sequence"],
                str(call["args"]["group"]),
                call["args"]["bytes"],
                str(call["args"]["site"]),
                call["args"]["state"],
            ]
            for call in sorted(shown, key=lambda call: call["ts"])
        ],
    }


def bandwidth(calls: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bus bandwidth in GB/s by op and size of message: bytes over all the time they took."""
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for call in calls:
        args = call["args"]
        if args["bytes"] > 0 and args["state"] == "completed":
            factor = args["busbw_GBps"] / args["algbw_GBps"] if args["algbw_GBps"] else 0.0
            part = sums[args["op"], args["bytes"]]
            part[0] += args["bytes"] * factor
            part[1] += call["dur"] * 1e3
            part[2] += 1
    series: dict[str, list[list[float]]] = defaultdict(list)
    for (op, nbytes), (moved, took, count) in sorted(sums.items()):
        series[op].append([nbytes, moved / took if took else 0.0, count])
    return [{"op": op, "points": points} for op, points in sorted(series.items())]


def lateness(calls: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """How long the first rank waited for each rank: by rank and, in columns of equal time, along the trace."""
    meetings: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for call in calls:
        if call["cat"] == "collective":
            key = (str(call["args"]["group"]), call["args"]["sequence"], call["args"]["op"])
            meetings[key][call["pid"]] = call
    shared = [sides for sides in meetings.values() if len(sides) > 1]
    ranks = sorted({rank for sides in shared for rank in sides})
    end = max((call["ts"] for sides in shared for call in sides.values()), default=0.0) or 1.0
    columns = max(min(_MAX_COLUMNS, len(shared)), 1)
    sums = {rank: [[0.0, 0] for _ in range(columns)] for rank in ranks}
    last: dict[int, list[float]] = {rank: [0, 0.0] for rank in ranks}
    for sides in shared:
        first = min(call["ts"] for call in sides.values())
        latest = max(sides, key=lambda rank: sides[rank]["ts"])
        last[latest][0] += 1
        last[latest][1] += sides[latest]["ts"] - first
        for rank, call in sides.items():
            cell = sums[rank][min(int(call["ts"] / end * columns), columns - 1)]
            cell[0] += call["ts"] - first
            cell[1] += 1
    return {
        "ranks": ranks,
        "meetings": len(shared),
        "end": end,
        "cells": [[round(total / n, 1) if n else None for total, n in sums[rank]] for rank in ranks],
        "last": [[rank, int(last[rank][0]), round(last[rank][1] / 1e3, 3)] for rank in ranks],
    }


def table(calls: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """One row for each name and size, over all ranks."""
    lines: dict[tuple[str, int], tuple[Line, list[float]]] = {}
    for call in calls:
        args = call["args"]
        line, durations = lines.setdefault((call["name"], args["bytes"]), (Line(call["name"], args["bytes"]), []))
        took = int(call["dur"] * 1e3)
        line.count += 1
        line.total_ns += took
        line.max_ns = max(line.max_ns, took)
        line.moved += args["bytes"]
        line.moved_on_bus += args["busbw_GBps"] * took
        durations.append(call["dur"] / 1e3)
    rows = []
    for (name, nbytes), (line, durations) in sorted(lines.items(), key=lambda item: -item[1][0].total_ns):
        durations.sort()
        rows.append(
            [
                name,
                size_text(nbytes),
                line.count,
                round(line.total_ns / 1e6, 3),
                round(line.mean_ms, 4),
                round(durations[len(durations) // 2], 4),
                round(durations[min(int(len(durations) * 0.99), len(durations) - 1)], 4),
                round(line.max_ns / 1e6, 4),
                round(line.bus_gbps / 8, 4),
            ]
        )
    return rows
