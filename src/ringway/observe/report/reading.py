"""What a trace says, in plain words: the first thing on the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ringway.observe.log.summary import size_text
from ringway.observe.report.events import TracedCall
from ringway.observe.report.figures import covered

_MATTERS = 0.05
"""A share of the time below this is not worth a sentence."""


def reading(calls: Sequence[TracedCall]) -> list[str]:
    lines = [*_share(calls), *_late(calls), *_heaviest(calls), *_unfinished(calls)]
    return lines or ["Nothing stands out."]


def _share(calls: Sequence[TracedCall]) -> Iterator[str]:
    """How much of each rank's time is communication. Asynchronous calls count while they are in flight."""
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        spans[call.rank].append((call.start, call.start + call.took))
    length = max(call.start + call.took for call in calls)
    if length <= 0:
        return
    shares = {rank: covered(found) / length for rank, found in spans.items()}
    least, most = min(shares.values()), max(shares.values())
    range_ = f"{most:.0%}" if most - least < 0.01 else f"{least:.0%} to {most:.0%}"
    yield f"A call was in flight for {range_} of the time, of {_time(length)} in all."


def _late(calls: Sequence[TracedCall]) -> Iterator[str]:
    """Ranks that the others waited for, and the line at which they came late."""
    meetings: dict[tuple[str, int, str], list[TracedCall]] = defaultdict(list)
    for call in calls:
        if call.collective:
            meetings[call.group, call.sequence, call.op].append(call)
    waited: dict[tuple[int, str], float] = defaultdict(float)
    total = 0.0
    for came in meetings.values():
        if len(came) > 1:
            last = max(came, key=lambda call: call.start)
            late = last.start - min(call.start for call in came)
            waited[last.rank, last.site] += late
            total += late
    length = max(call.start + call.took for call in calls)
    for (rank, site), late in sorted(waited.items(), key=lambda entry: -entry[1])[:3]:
        if late > _MATTERS * length:
            where = f" at {site}" if site else ""
            yield f"Rank {rank} is late{where}: {_time(late)} of the {_time(total)} of waiting were for it."


def _heaviest(calls: Sequence[TracedCall]) -> Iterator[str]:
    taken: dict[tuple[str, int, str], float] = defaultdict(float)
    for call in calls:
        taken[call.name, call.nbytes, call.site] += call.took
    total = sum(taken.values())
    (name, nbytes, site), took = max(taken.items(), key=lambda entry: entry[1])
    if total > 0 and took > _MATTERS * total and len(taken) > 1:
        where = f" at {site}" if site else ""
        yield f"{name} of {size_text(nbytes)}{where} takes {took / total:.0%} of the time in calls."


def _unfinished(calls: Sequence[TracedCall]) -> Iterator[str]:
    unfinished = [call for call in calls if call.state != "completed"]
    if unfinished:
        first = unfinished[0]
        where = f" at {first.site}" if first.site else ""
        yield f"{len(unfinished)} calls did not complete; the first is {first.name} on rank {first.rank}{where}."


def _time(microseconds: float) -> str:
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * scale:  # else it would be rounded to 1e+03
            return f"{microseconds / scale:.3g} {unit}"
    return f"{microseconds:.3g} µs"
