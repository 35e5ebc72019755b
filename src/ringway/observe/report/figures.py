"""Computes the numbers behind the page's charts from a trace's calls. Each is bounded, however long the trace."""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ringway.observe.log.summary import CallTotals, size_text
from ringway.observe.report.events import TracedCall

_MAX_CALLS = 400_000
_NEIGHBOURS = 16
_MAX_COLUMNS = 60
_MAX_POINTS = 100
_MAX_ROWS = 500
_BINS_AN_OCTAVE = 2


def timeline(calls: Sequence[TracedCall]) -> dict[str, Any]:
    """The calls of each rank in the order of their start, as columns of numbers, which are short and quick to read.
    Times are nanoseconds. Starts and sequence numbers count from the call before. What many calls have in common is a
    kind: an index into `kinds`, whose texts are indices into `words`."""
    by_rank: dict[int, list[TracedCall]] = defaultdict(list)
    for call in calls:
        by_rank[call.rank].append(call)
    kinds: dict[tuple[str, str, str, str, str, int], int] = {}
    ranks = []
    columns: dict[str, list[int]] = {"start": [], "took": [], "lane": [], "sequence": [], "kind": []}
    for rank, own in sorted(by_rank.items()):
        shown = _longest_everywhere(own, len(calls))
        lanes = {track: lane for lane, track in enumerate(sorted({call.track for call in shown}))}
        ranks.append({"rank": rank, "lanes": len(lanes), "calls": len(shown)})
        starts, sequences = [round(call.start * 1e3) for call in shown], [call.sequence for call in shown]
        columns["start"] += _steps(starts)
        columns["took"] += [round(call.took * 1e3) for call in shown]
        columns["lane"] += [lanes[call.track] for call in shown]
        columns["sequence"] += _steps(sequences)
        for call in shown:
            kind = (call.name, call.op, call.group, call.site, call.state, call.nbytes)
            columns["kind"].append(kinds.setdefault(kind, len(kinds)))
    words: dict[str, int] = {}
    return {
        "ranks": ranks,
        "end": max((call.start + call.took for call in calls), default=1.0),
        "shown": len(columns["start"]),
        "of": len(calls),
        "kinds": [[*(words.setdefault(text, len(words)) for text in texts), nbytes] for *texts, nbytes in kinds],
        "words": list(words),
        **columns,
    }


def _longest_everywhere(own: Sequence[TracedCall], total: int) -> Sequence[TracedCall]:
    """The calls of one rank. If those of all ranks are too many, the longest of each run of neighbours, so that no rank
    and no time is left out. Calls that did not complete come first."""
    run = math.ceil(_NEIGHBOURS * total / _MAX_CALLS)
    if run <= _NEIGHBOURS:
        return own
    found: list[TracedCall] = []
    for at in range(0, len(own), run):
        found += heapq.nlargest(
            _NEIGHBOURS, own[at : at + run], key=lambda call: (call.state != "completed", call.took)
        )
    return sorted(found, key=lambda call: call.start)


def _steps(numbers: Sequence[int]) -> list[int]:
    return [number - before for before, number in pairwise([0, *numbers])]


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
