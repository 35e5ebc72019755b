"""Whether `ringway bench` shows the times of small calls that `benchmarks/collectives.py` shows.

    python benchmarks/bench_agrees.py [--rounds 5] [--check]

Both measure shm between two ranks, in turns: a whole run of the tool, then samples of the benchmark. Needs a quiet
machine. With --check, it exits with 1 if the medians of an op and size differ by more than 20 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from collectives import OURS, Team, team

CASES = (("all_reduce", 8), ("all_reduce", 1024), ("broadcast", 8), ("barrier", 0))
LIMIT = 0.2
SAMPLES = 5


def of_the_tool(folder: Path) -> dict[tuple[str, int], float]:
    """Seconds of a call by op and size, from one run of the tool."""
    file = folder / "bench.json"
    ops, sizes = sorted({op for op, _ in CASES}), sorted({size for _, size in CASES if size})
    command = [sys.executable, "-m", "ringway", "bench", "-n", "2", "--backends", "shm,gloo", "--ops", ",".join(ops)]
    command += ["--sizes", ",".join(map(str, sizes)), "--json", "-o", str(file)]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = json.loads(file.read_text())["rows"]
    return {(row["op"], row["nbytes"]): row["seconds"]["median"] for row in rows if row["candidate"] == "shm"}


def of_the_benchmark(ours: Team) -> dict[tuple[str, int], float]:
    return {case: statistics.median(ours.sample(*case) for _ in range(SAMPLES)) for case in CASES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    shown, measured = [], []
    with tempfile.TemporaryDirectory() as name, team(OURS, 2, Path(name)) as ours:
        for _ in range(given.rounds):
            shown.append(of_the_tool(Path(name)))
            measured.append(of_the_benchmark(ours))
    apart = 0
    print(f"{'op':<14}{'bytes':>8}{'ringway bench':>16}{'collectives.py':>16}{'ratio':>8}")
    for op, size in CASES:
        tool, other = (statistics.median(run[op, size] for run in runs) for runs in (shown, measured))
        apart += not 1 - LIMIT <= tool / other <= 1 + LIMIT
        print(f"{op:<14}{size:>8}{tool * 1e6:>13.2f} µs{other * 1e6:>13.2f} µs{tool / other:>8.2f}")
    print(f"{apart} of {len(CASES)} differ by more than {LIMIT:.0%}" if apart else f"all within {LIMIT:.0%}")
    return 1 if given.check and apart else 0


if __name__ == "__main__":
    sys.exit(main())
