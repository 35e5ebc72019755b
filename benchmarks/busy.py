"""shm and MPI on a busy machine: calls a second, late calls, and what the other programs get.

    python benchmarks/busy.py [--beside 2] [--seconds 30] [--turn 3] [--peers mpich openmpi] [--ops ...] [--sizes ...]
        [--json FILE]

As many processes as cores count without end while two ranks make calls, all at the same priority. The libraries take
turns of some seconds; `--seconds` is the time of each library for each op and size. The table shows, as medians of the
turns: the calls a second of the slower rank; the 99th percentile of a call; and how far the counting processes came, in
shares of what they reach while no rank runs. `worst` is how far ringway is behind the best peer in any of the three:
above 1.2 misses the goal.

Exits with 0 if nothing is behind by more than 1.2, with 1 otherwise, with 2 if a peer could not take part.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import struct
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from collectives import MPIS, OURS, Absent, Team, team

OPS = ("all_reduce", "broadcast", "barrier", "send_recv")
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
MOST_BEHIND = 1.2


class Neighbors:
    """Processes that count without end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._counters = mmap.mmap(-1, 8 * max(1, count))
        self._processes = [self._fork(8 * number) for number in range(count)]

    def _fork(self, at: int) -> int:
        parent = os.getpid()
        process = os.fork()
        if process == 0:
            done = 0
            while os.getppid() == parent:
                for _ in range(20_000):
                    pass
                done += 1
                struct.pack_into("q", self._counters, at, done)
            os._exit(0)
        return process

    def counted(self) -> int:
        return sum(struct.unpack_from(f"{self._count}q", self._counters))

    def rate(self, seconds: float) -> float:
        before = self.counted()
        time.sleep(seconds)
        return (self.counted() - before) / seconds

    def end(self) -> None:
        for process in self._processes:
            os.kill(process, 9)
            os.waitpid(process, 0)


def measured(teams: list[Team], neighbors: Neighbors, alone: float, given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print(
        f"{'op':<12}{'bytes':>10}", *(f"{one.peer + ': calls/s, p99 us, others':>36}" for one in teams), f"{'worst':>8}"
    )
    for op in given.ops:
        for nbytes in given.sizes if op != "barrier" else [0]:
            turns: dict[str, list[tuple[float, float, float]]] = {one.peer: [] for one in teams}
            for _ in range(max(3, round(given.seconds / given.turn))):
                for one in teams:
                    before, began = neighbors.counted(), time.monotonic()
                    mean, late = one.turn(op, nbytes, given.turn)
                    others = (neighbors.counted() - before) / (time.monotonic() - began) / alone
                    turns[one.peer].append((1 / mean, late, others))
            found = {peer: [statistics.median(each) for each in zip(*of, strict=True)] for peer, of in turns.items()}
            rows.append({"op": op, "bytes": nbytes, "found": found, "behind": behind(found)})
            cells = [f"{calls:>20.0f}{late * 1e6:>10.1f}{others:>6.2f}" for calls, late, others in found.values()]
            print(f"{op:<12}{nbytes:>10}", *cells, f"{max(rows[-1]['behind'].values()):>8.2f}", flush=True)
    return rows


def behind(found: dict[str, list[float]]) -> dict[str, float]:
    """How far ringway is behind the best peer, in each of the three. Below 1 is ahead."""
    ours = found[OURS]
    peers = [values for peer, values in found.items() if peer != OURS]
    return {
        "calls": max(values[0] for values in peers) / ours[0],
        "late calls": ours[1] / min(values[1] for values in peers),
        "others": min(values[2] for values in peers) / ours[2],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--turn", type=float, default=3)
    parser.add_argument("--peers", nargs="+", choices=MPIS, default=list(MPIS))
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        try:
            teams = [ends.enter_context(team(peer, 2, Path(name))) for peer in (OURS, *given.peers)]
        except Absent as reason:
            print(f"a peer does not take part: {reason}")
            return 2
        neighbors = Neighbors(given.beside)
        ends.callback(neighbors.end)
        rows = measured(teams, neighbors, neighbors.rate(given.turn), given)
    if given.json is not None:
        from machine import machine

        given.json.write_text(json.dumps({"facts": machine(), "rows": rows}, indent=1) + "\n")
    missed = [
        f"{row['op']} of {row['bytes']} bytes: {what} {ratio:.2f}"
        for row in rows
        for what, ratio in row["behind"].items()
        if ratio > MOST_BEHIND
    ]
    print("\n".join([f"Behind by more than {MOST_BEHIND}:", *missed]) if missed else "The goals hold.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
