"""What a table of results says, in plain words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from ringway.bench.table import Row, in_bytes, in_time, rounded

_LATENCY_BOUND = 2.0
"""A size is latency-bound if its call takes less than this many times as long as the smallest one."""
_SLOW_LINK = 1.5


def reading(table: Sequence[Row]) -> list[str]:
    """A sentence for each op, and for what stands out."""
    plain = [row for row in table if row.mode == "sync"]
    lines = [line for op in dict.fromkeys(row.op for row in plain) for line in _op([r for r in plain if r.op == op])]
    lines += _asynchronous(table)
    lines += _overlap(table)
    lines += _links([row for row in table if row.mode == "pair"])
    return lines


def _op(table: Sequence[Row]) -> Iterator[str]:
    op = table[0].op
    dtype = table[0].dtype
    table = [row for row in table if row.dtype == dtype]  # the first: the others are in the table
    by_size: dict[int, list[Row]] = {}
    for row in table:
        by_size.setdefault(row.nbytes, []).append(row)
    best = {size: min(rows, key=lambda row: row.seconds.median) for size, rows in sorted(by_size.items())}
    parts = []
    for first, last in _runs(best):
        where = (
            ""
            if len(best) == 1
            else f" from {in_bytes(first)} to {in_bytes(last)}"
            if first != last
            else f" at {in_bytes(first)}"
        )
        lead = _lead([by_size[size] for size in best if first <= size <= last], best[first].candidate)
        parts.append(f"{best[first].candidate} is fastest{where}{lead}")
    text = f"{op}: {'; '.join(parts)}"
    smallest, largest = best[min(best)], best[max(best)]
    if len(best) > 2:
        bound = [s for s in best if best[s].seconds.median < _LATENCY_BOUND * smallest.seconds.median]
        text += f". Up to {in_bytes(max(bound))} latency-bound (about {in_time(smallest.seconds.median)})"
        text += f"; {rounded(largest.bus_bandwidth / 1e9)} GB/s at {in_bytes(largest.nbytes)}"
    elif len(best) == 1:
        text += f": {in_time(smallest.seconds.median)}"
    yield text + "."


def _runs(best: dict[int, Row]) -> Iterator[tuple[int, int]]:
    """Neighbouring sizes with the same winner, as the first and the last of each run."""
    sizes = list(best)
    start = 0
    for place in range(1, len(sizes) + 1):
        if place == len(sizes) or best[sizes[place]].candidate != best[sizes[start]].candidate:
            yield sizes[start], sizes[place - 1]
            start = place


def _lead(run: Sequence[Sequence[Row]], name: str) -> str:
    """How far ahead of the next the fastest is: at the sizes where it leads most, and where it leads least."""
    leads = []
    for rows in run:
        seconds = {row.candidate: row.seconds.median for row in rows}
        best = seconds.pop(name)
        if seconds:
            other = min(seconds, key=lambda candidate: seconds[candidate])
            leads.append((seconds[other] / best, other, rows[0].nbytes))
    if not leads:
        return ""
    ends = sorted({max(leads), min(leads)}, key=lambda lead: lead[2])
    said = [_times(factor, other) for factor, other, _ in ends]
    if len(set(said)) == 1:
        return f" ({said[0]})"
    (_, other, _), (factor, last, _) = ends
    if other == last and "×" in said[0] and "×" in said[1]:
        said[1] = f"{rounded(factor, 2)} ×"
    return f" ({', '.join(f'{one} at {in_bytes(size)}' for one, (_, _, size) in zip(said, ends, strict=True))})"


def _times(factor: float, name: str) -> str:
    return f"{rounded(factor, 2)} × {name}" if factor >= 1.05 else f"about as fast as {name}"


def _asynchronous(table: Sequence[Row]) -> Iterator[str]:
    plain = {(row.op, row.nbytes, row.dtype, row.candidate): row for row in table if row.mode == "sync"}
    extra: dict[str, list[float]] = {}
    for row in table:
        if row.mode == "async":
            name = row.candidate.removesuffix(" async")
            other = plain.get((row.op, row.nbytes, row.dtype, name))
            if other is not None:
                extra.setdefault(name, []).append(row.seconds.median - other.seconds.median)
    for name, seconds in extra.items():
        cost = statistics.median(seconds)
        more = f"{in_time(cost)} more than" if cost > 0 else "no more than"
        yield f"{name}: an asynchronous call costs {more} a synchronous one."


def _overlap(table: Sequence[Row]) -> Iterator[str]:
    done = {(row.nbytes, row.candidate): row.seconds.median for row in table if row.mode == "overlap"}
    for (nbytes, candidate), seconds in done.items():
        if candidate.endswith(" under compute"):
            name = candidate.removesuffix(" under compute")
            alone = done.get((nbytes, f"{name} then compute"))
            if alone:
                hidden = max(0.0, min(1.0, 2 * (1 - seconds / alone)))  # both take about as long
                yield f"{name}: {hidden:.0%} of an all_reduce of {in_bytes(nbytes)} hides under a computation as long."


def _links(pairs: Sequence[Row]) -> Iterator[str]:
    for name, nbytes in dict.fromkeys((row.candidate, row.nbytes) for row in pairs):
        of_size = [row for row in pairs if (row.candidate, row.nbytes) == (name, nbytes)]
        usual = statistics.median(row.seconds.median for row in of_size)
        slow = [row for row in of_size if row.seconds.median > _SLOW_LINK * usual]
        messages = f"messages of {in_bytes(nbytes)} on {name}"
        if len(of_size) < 3 or not slow:
            yield f"{messages}: {in_time(usual)} between {'all' if len(of_size) > 1 else 'the two'} ranks."
        for row in sorted(slow, key=lambda row: -row.seconds.median)[:5] if len(of_size) >= 3 else ():
            factor = row.seconds.median / usual
            yield f"{messages}: ranks {row.op} are {factor:.1f} times slower than the usual {in_time(usual)}."


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))
