"""This checkout compared with an earlier one, in one run: what a change costs, or gains, call by call.

    git worktree add /tmp/before COMMIT && sh /tmp/before/scripts/build_in_place.sh && sh scripts/build_in_place.sh
    python benchmarks/before_after.py /tmp/before [--ranks 2] [--starts 5] [--rounds 9] [--json FILE]

Both checkouts have ranks of their own and take turns, sample by sample; which goes first alternates. A sample's time
is that of its slowest rank. Measured are all ops on shm, the paths that a plain call does not take (another reduction,
an asynchronous call), what ringway adds to gloo (overhead.py's call), and a call that the comms logger counts
(observe_cost.py's). All ranks are started again several times: samples of one start have more in
common than samples of several, so the interval of a single start is too narrow. The table shows how many times longer
this checkout takes, with the interval of the median over all rounds of all starts.

Exits with 0 if the geometric mean of all ratios is at most 1.01 and no interval lies wholly above 1.05, else with 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from collectives import MORE_OPS, OPS, ROOT, Absent, Team, team

from ringway.bench.runner import median_interval
from ringway.bench.table import machine

Cell = tuple[str, str, int]
"""Peer, op and bytes."""

BEFORE, AFTER = "before", "after"
SHM, GLOO, LOGGED = "ringway", "ringway-gloo", "ringway-logged"
ALL_REDUCE_SIZES = (8, 1 << 10, 64 << 10, 4 << 20, 64 << 20)
OTHER_SIZES = (8, 64 << 10, 4 << 20)
CELLS: list[Cell] = [
    *((SHM, "all_reduce", nbytes) for nbytes in ALL_REDUCE_SIZES),
    *((SHM, op, nbytes) for op in (*OPS[1:], *MORE_OPS) for nbytes in (OTHER_SIZES if op != "barrier" else [0])),
    *((SHM, op, nbytes) for op in ("all_reduce_max", "all_reduce_async") for nbytes in (8, 64 << 10)),
    (GLOO, "all_reduce", 32),
    (LOGGED, "all_reduce", 8),
]
MOST_MEAN, MOST_CELL = 1.01, 1.05


def ratios(teams: dict[str, Team], op: str, nbytes: int, rounds: int) -> list[float]:
    """How many times longer the later checkout takes, round by round."""
    found = []
    for number in range(rounds):
        order = (BEFORE, AFTER) if number % 2 else (AFTER, BEFORE)
        seconds = {name: teams[name].sample(op, nbytes) for name in order}
        found.append(seconds[AFTER] / seconds[BEFORE])
    return found


def one_start(peer: str, arguments: argparse.Namespace) -> dict[Cell, list[float]]:
    """All cells of one peer, on ranks of both checkouts that are started for it."""
    sources = {BEFORE: arguments.before.resolve() / "src", AFTER: ROOT / "src"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        try:
            teams = {
                name: ends.enter_context(
                    team(peer, arguments.ranks, Path(folder), name=name, environment={"BENCH_SOURCE": str(source)})
                )
                for name, source in sources.items()
            }
        except Absent as reason:
            raise SystemExit(f"a checkout cannot take part: {reason}") from None
        return {cell: ratios(teams, cell[1], cell[2], arguments.rounds) for cell in CELLS if cell[0] == peer}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the earlier commit, its core built in place")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=5, help="how often all ranks are started (5)")
    parser.add_argument("--rounds", type=int, default=9, help="samples per cell, checkout and start (9)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[Cell, list[float]] = {cell: [] for cell in CELLS}
    for start in range(arguments.starts):
        print(f"start {start + 1} of {arguments.starts}", file=sys.stderr, flush=True)
        for peer in (SHM, GLOO, LOGGED):
            for cell, samples in one_start(peer, arguments).items():
                found[cell] += samples
    rows: list[dict[str, Any]] = []
    print(f"{'through':<16}{'op':<24}{'bytes':>10}{'after / before':>16}{'interval':>20}")
    for (peer, op, nbytes), samples in found.items():
        estimate = median_interval(samples)
        rows.append({"through": peer, "op": op, "bytes": nbytes, **vars(estimate)})
        interval = f"{estimate.low:.3f} to {estimate.high:.3f}"
        print(f"{peer:<16}{op:<24}{nbytes:>10}{estimate.median:>16.3f}{interval:>20}")
    mean = math.exp(sum(math.log(row["median"]) for row in rows) / len(rows))
    slower = [f"{row['through']} {row['op']} of {row['bytes']} bytes" for row in rows if row["low"] > MOST_CELL]
    print(f"geometric mean of {len(rows)} cells: {mean:.4f}; wholly above {MOST_CELL}: {', '.join(slower) or 'none'}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "mean": mean, "rows": rows}, indent=1))
    return 1 if mean > MOST_MEAN or slower else 0


if __name__ == "__main__":
    sys.exit(main())
