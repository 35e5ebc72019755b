"""Computes the numbers behind the page's charts from a trace's calls. Each is bounded, however long the trace."""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ringway.observe.log.summary import CallTotals, size_text
from ringway.observe.report.events import TracedCall

_MAX_BARS = 6000
_MAX_COLUMNS = 60
_MAX_POINTS = 100
_MAX_ROWS = 500
_BINS_AN_OCTAVE = 2


def timeline(calls: Sequence[TracedCall]) -> dict[str, Any]:
    """Bars by rank. If there are too many, the longest are shown, since those are the interesting ones."""
    shown = heapq.nlargest(_MAX_BARS, calls, key=lambda call: call.took)
    ranks = sorted({call.rank for call in calls})
    lanes = dict.fromkeys(ranks, 1)
    for call in shown:
        lanes[call.rank] = max(lanes[call.rank], call.track + 1)
    return {
        "ranks": [{"rank": rank, "lanes": lanes[rank]} for rank in ranks],
        "end": max((call.start + call.took for call in calls), default=1.0),
        "shown": len(shown),
        "of": len(calls),
        "bars": [
            [
                call.rank,
                call.track,
                round(call.start, 3),
                round(call.took, 3),
                call.name,
                call.op,
                call.sequence,
                call.group,
                call.nbytes,
                call.site,
                call.state,
            ]
            for call in sorted(shown, key=lambda call: call.start)
        ],
    }


def bandwidth(calls: Sequence[TracedCall]) -> list[dict[str, Any]]:
    """Bus bandwidth in GB/s by op and message size: bytes over the total time. If an op has too many sizes,
    neighbouring ones share a point."""
    done = [call for call in calls if call.nbytes > 0 and call.state == "completed"]
    sizes: dict[str, set[int]] = defaultdict(set)
    for call in done:
        sizes[call.op].add(call.nbytes)
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for call in done:
        nbytes = call.nbytes if len(sizes[call.op]) <= _MAX_POINTS else _bin(call.nbytes)
        part = sums[call.op, nbytes]
        part[0] += call.nbytes * call.bus_factor
        part[1] += call.took * 1e3
        part[2] += 1
    series: dict[str, list[list[float]]] = defaultdict(list)
    for (op, nbytes), (moved, took, count) in sorted(sums.items()):
        series[op].append([nbytes, moved / took if took else 0.0, count])
    return [{"op": op, "points": points} for op, points in sorted(series.items())]


def _bin(nbytes: int) -> int:
    return round(2 ** (round(math.log2(nbytes) * _BINS_AN_OCTAVE) / _BINS_AN_OCTAVE))


def lateness(calls: Sequence[TracedCall]) -> dict[str, Any]:
    """How long the first rank waited for each rank: by rank, and over time in columns of equal length."""
    meetings: dict[tuple[str, int, str], dict[int, float]] = defaultdict(dict)
    for call in calls:
        if call.collective:
            meetings[call.group, call.sequence, call.op][call.rank] = call.start
    shared = [came for came in meetings.values() if len(came) > 1]
    ranks = sorted({rank for came in shared for rank in came})
    end = max((max(came.values()) for came in shared), default=0.0) or 1.0
    columns = max(min(_MAX_COLUMNS, len(shared)), 1)
    sums = {rank: [[0.0, 0] for _ in range(columns)] for rank in ranks}
    last: dict[int, list[float]] = {rank: [0, 0.0] for rank in ranks}
    for came in shared:
        first = min(came.values())
        latest = max(came, key=lambda rank: came[rank])
        last[latest][0] += 1
        last[latest][1] += came[latest] - first
        for rank, start in came.items():
            cell = sums[rank][min(int(start / end * columns), columns - 1)]
            cell[0] += start - first
            cell[1] += 1
    return {
        "ranks": ranks,
        "meetings": len(shared),
        "end": end,
        "cells": [[round(total / n, 1) if n else None for total, n in sums[rank]] for rank in ranks],
        "last": [[rank, int(last[rank][0]), round(last[rank][1] / 1e3, 3)] for rank in ranks],
    }


def group_name(generation: int) -> str:
    """The name of the group of all ranks in one generation of an elastic job."""
    return f"generation {generation}"


_GENERATION = re.compile(group_name(0).replace("0", r"(\d{1,9})"))


def generations(calls: Sequence[TracedCall]) -> list[list[Any]]:
    """For each generation of an elastic job: its number, the size of its group, when its first call was issued and its
    last one ended, the milliseconds since the last call of the generation before, and its calls. Ranks that were lost
    left no trace, so the calls are those of the ranks that came to its end."""
    found: dict[int, list[TracedCall]] = defaultdict(list)
    for call in calls:
        match = _GENERATION.fullmatch(call.group)
        if match is not None:
            found[int(match.group(1))].append(call)
    rows: list[list[Any]] = []
    ended: float | None = None
    for number, members in sorted(found.items()):
        began, last = members[0].start, max(call.start + call.took for call in members)
        pause = None if ended is None else round((began - ended) / 1e3, 3)
        size = max(call.size for call in members)
        rows.append([number, size, round(began / 1e3, 3), round(last / 1e3, 3), pause, len(members)])
        ended = last
    return rows[-_MAX_ROWS:]


def streams(calls: Sequence[TracedCall]) -> list[list[Any]]:
    """For each rank and stream of its device: the number of calls, the milliseconds in which at least one ran, and
    whether compute could run at the same time. Calls on a stream of their own leave the program's stream free; calls on
    the program's stream hold up what comes behind them."""
    spans: dict[tuple[int, int, bool], list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        if call.stream:
            spans[call.rank, call.stream, call.beside].append((call.start, call.start + call.took))
    return [
        [rank, stream, len(found), round(covered(found) / 1e3, 3), beside]
        for (rank, stream, beside), found in sorted(spans.items())
    ][:_MAX_ROWS]


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def places(calls: Sequence[TracedCall]) -> list[list[Any]]:
    """Calls, bytes and milliseconds by group and line of code, over all ranks, the longest first."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for call in calls:
        part = sums[call.site, call.group]
        part[0] += 1
        part[1] += call.nbytes
        part[2] += call.took
    longest = heapq.nlargest(_MAX_ROWS, sums.items(), key=lambda entry: entry[1][2])
    return [
        [site, group, count, size_text(int(nbytes)), round(took / 1e3, 3)]
        for (site, group), (count, nbytes, took) in longest
    ]


def table(calls: Sequence[TracedCall]) -> dict[str, Any]:
    """One row per name and size, over all ranks: those with the longest total time."""
    lines: dict[tuple[str, int], tuple[CallTotals, list[float]]] = {}
    for call in calls:
        line, durations = lines.setdefault((call.name, call.nbytes), (CallTotals(call.name, call.nbytes), []))
        took = int(call.took * 1e3)
        line.count += 1
        line.total_ns += took
        line.max_ns = max(line.max_ns, took)
        line.moved += call.nbytes
        line.moved_on_bus += call.bus_gigabytes_a_second * took
        durations.append(call.took / 1e3)
    longest = heapq.nlargest(_MAX_ROWS, lines.values(), key=lambda entry: entry[0].total_ns)
    return {"of": len(lines), "rows": [_row(line, sorted(durations)) for line, durations in longest]}


def _row(line: CallTotals, durations: Sequence[float]) -> list[Any]:
    return [
        line.name,
        size_text(line.nbytes),
        line.count,
        round(line.total_ns / 1e6, 3),
        round(line.mean_ms, 4),
        round(durations[len(durations) // 2], 4),
        round(durations[min(int(len(durations) * 0.99), len(durations) - 1)], 4),
        round(line.max_ns / 1e6, 4),
        round(line.bus_gbps / 8, 4),
    ]
