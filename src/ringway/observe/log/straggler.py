"""Finds the ranks that others wait for.

Every rank keeps the times at which it arrived at each collective (the latest 16384). Compared call by call, they show
which rank came last, how long the first one waited for it, and which line of the program it came from. Ranks may have
kept different calls, and groups may be parts of the world: a call counts if at least two of its ranks know it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as c10d

from ringway.errors import RingwayError
from ringway.groups.objects import ObjectChannel
from ringway.groups.world import world
from ringway.observe.log.summary import printable, record_name, size_text
from ringway.observe.meeting import meet
from ringway.observe.recorder import unlogged
from ringway.observe.trace.clock import offset_in_world

Site = tuple[str, int, str] | None
Arrival = tuple[str, int, int, int, int, int, Site, str, int]
"""group, sequence, op, bytes, issued, completed, site, label, size of the group: the columns of `Recorder.arrivals`."""


@dataclass
class Late:
    """How others waited for one rank."""

    rank: int
    calls: int = 0
    """Calls of this rank that others know too."""
    last: int = 0
    """How often it came last."""
    waited_ns: int = 0
    """How long the first rank waited for it, over all calls at which it came last."""
    worst_ns: int = 0
    worst: str = ""
    sites: Counter[str] = field(default_factory=Counter)
    """Nanoseconds that others waited, by the line it came from."""

    @property
    def mean_ms(self) -> float:
        return self.waited_ns / self.last / 1e6 if self.last else 0.0


@dataclass
class Breakdown:
    """DeepSpeed's two parts of a latency: the minimum over all ranks, and this rank's excess over it."""

    count: int = 0
    communication_ns: int = 0
    straggler_ns: int = 0


@dataclass
class Analysis:
    """What the ranks' arrivals show, from the perspective of one rank."""

    ranking: list[Late]
    breakdown: dict[str, dict[int, Breakdown]]
    compared: int
    note: str = ""

    def breakdown_dict(self) -> dict[str, dict[int, dict[str, Any]]]:
        return {
            name: {
                size: {
                    "count": part.count,
                    "total_comm_lat_ms": part.communication_ns / 1e6,
                    "total_straggler_ms": part.straggler_ns / 1e6,
                    "avg_comm_lat_ms": part.communication_ns / part.count / 1e6,
                    "avg_straggler_ms": part.straggler_ns / part.count / 1e6,
                    "msg_size_bytes": size,
                    "msg_size_str": size_text(size),
                }
                for size, part in sorted(sizes.items())
            }
            for name, sizes in sorted(self.breakdown.items())
        }

    def ranking_dict(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": late.rank,
                "calls": late.calls,
                "last": late.last,
                "waited_ms": late.waited_ns / 1e6,
                "mean_ms": late.mean_ms,
                "worst_ms": late.worst_ns / 1e6,
                "worst_call": late.worst,
                "site": late.sites.most_common(1)[0][0] if late.sites else None,
            }
            for late in self.ranking
        ]


def place_text(site: Site) -> str:
    return "(no Python frame)" if site is None else f"{site[0]}:{site[1]}"


def compare(arrivals: dict[int, Sequence[Arrival]], offsets: dict[int, int], rank: int) -> Analysis:
    """Compare `arrivals`, with clock offsets by rank. `rank` is the one whose breakdown is computed."""
    calls: dict[tuple[str, int, int], dict[int, Arrival]] = defaultdict(dict)
    for member, rows in arrivals.items():
        for row in rows:
            # Ranks of one call agree on its group, number and op; otherwise they are different calls.
            calls[row[0], row[1], row[2]][member] = row
    lates = {member: Late(member) for member in arrivals}
    breakdown: dict[str, dict[int, Breakdown]] = {}
    compared = 0
    for sides in calls.values():
        if len(sides) < 2:
            continue
        compared += 1
        came = {member: row[4] + offsets.get(member, 0) for member, row in sides.items()}
        last = max(came, key=lambda member: came[member])
        _count_late(lates[last], sides[last], came[last] - min(came.values()))
        for member in sides:
            lates[member].calls += 1
        if rank in sides:
            row = sides[rank]
            name = record_name(row[2], row[7], None)
            part = breakdown.setdefault(name, {}).setdefault(row[3], Breakdown())
            least = min(side[5] - side[4] for side in sides.values())
            part.count += 1
            part.communication_ns += least
            part.straggler_ns += (row[5] - row[4]) - least
    ranking = sorted(lates.values(), key=lambda late: -late.waited_ns)
    return Analysis(ranking, breakdown, compared)


def _count_late(late: Late, row: Arrival, waited: int) -> None:
    place = place_text(row[6])
    late.last += 1
    late.waited_ns += waited
    late.sites[place] += waited
    if waited > late.worst_ns:
        late.worst_ns = waited
        late.worst = f"{record_name(row[2], row[7], None)} #{row[1]} (group {row[0]}) at {place}"


def analyse() -> Analysis:
    """Gather every rank's arrivals; all ranks of the job call this. If they cannot be gathered, a note says so."""
    own = world.recorder.arrivals()
    if not c10d.is_initialized() or c10d.get_world_size() == 1:
        return compare({0: own}, {}, 0)
    rank = c10d.get_rank()
    try:
        meeting = meet("straggler")
        if meeting is None:
            raise RingwayError("not all ranks came to the summary in time")
        offset = offset_in_world(meeting)
        with unlogged():
            everyone = ObjectChannel(world.communicator(None), world.max_object_bytes).all_gather((offset, own))
    except Exception as error:  # a summary must not stop a job whose group is broken
        alone = compare({rank: own}, {}, rank)
        alone.note = f"the other ranks could not be reached ({str(error).splitlines()[0]})"
        return alone
    arrivals = {member: rows for member, (_, rows) in enumerate(everyone)}
    return compare(arrivals, {member: offset for member, (offset, _) in enumerate(everyone)}, rank)


def text(analysis: Analysis) -> str:
    """DeepSpeed's breakdown, and the ranking."""
    heads = (
        "Comm. Op",
        "Message Size",
        "Count",
        "Total comm lat(ms)",
        "Total straggler(ms)",
        "Avg comm lat(ms)",
        "Avg straggler(ms)",
    )
    out = [
        "_______________________________",
        "Breakdown with straggler effect",
        "-------------------------------",
        "".join(f"{head: <20}" for head in heads).rstrip(),
    ]
    for name, sizes in analysis.breakdown_dict().items():
        out.append(printable(name, 120))
        for line in sizes.values():
            numbers = [line[key] for key in list(line)[1:5]]
            row = f"{' ': <20}{line['msg_size_str']: <20}{line['count']: <20}"
            out.append((row + "".join(f"{number: <20.2f}" for number in numbers)).rstrip())
    out.append(
        f"Ranks that others waited for, over {analysis.compared} calls{': ' if analysis.note else ''}{analysis.note}"
    )
    out.append(f"{'Rank': <6}{'Came last': <16}{'Waited for(ms)': <16}{'Mean(ms)': <12}{'Worst(ms)': <12}At")
    for late in analysis.ranking_dict():
        if late["last"]:
            share = f"{late['last']} of {late['calls']}"
            out.append(
                f"{late['rank']: <6}{share: <16}{late['waited_ms']: <16.2f}{late['mean_ms']: <12.2f}"
                f"{late['worst_ms']: <12.2f}{late['site']}"
            )
    return "\n".join(out)
