"""Whether `ringway bench` shows the times of small calls that `benchmarks/collectives.py` shows.

    python benchmarks/bench_agrees.py [--rounds 5] [--check] [--output docs/proofs/bench_agrees.md]

Both measure shm between two ranks, in turns: a whole run of the tool, then samples of the benchmark. Needs a quiet
machine. With --check, it exits with 1 if the medians of an op and size differ by more than 20 %. With --output, it
writes the table to that page too.
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
from machine import machine

CASES = (("all_reduce", 8), ("all_reduce", 1024), ("broadcast", 8), ("barrier", 0))
LIMIT = 0.2
SAMPLES = 5
PROVES = (
    "benchmarks/bench_agrees.py",
    "benchmarks/collectives.py",
    "benchmarks/collectives_rank.py",
    "src/ringway/bench/cases.py",
    "src/ringway/bench/runner.py",
    "src/ringway/bench/session.py",
)


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
    parser.add_argument("--output", type=Path, help="the page to write")
    parser.add_argument("--commit", help="the commit of a tree without git history")
    given = parser.parse_args()
    shown, measured = [], []
    with tempfile.TemporaryDirectory() as name, team(OURS, 2, Path(name)) as ours:
        for _ in range(given.rounds):
            shown.append(of_the_tool(Path(name)))
            measured.append(of_the_benchmark(ours))
    apart = 0
    lines = ["| op | bytes | ringway bench, µs | collectives.py, µs | ratio |", "|---|---|---|---|---|"]
    for op, size in CASES:
        tool, other = (statistics.median(run[op, size] for run in runs) for runs in (shown, measured))
        apart += not 1 - LIMIT <= tool / other <= 1 + LIMIT
        lines.append(f"| {op} | {size} | {tool * 1e6:.2f} | {other * 1e6:.2f} | {tool / other:.2f} |")
    outcome = f"{apart} of {len(CASES)} differ by more than {LIMIT:.0%}." if apart else f"All are within {LIMIT:.0%}."
    print("\n".join([*lines, "", outcome]))
    if given.output is not None:
        _write_page(given.output, [*lines, "", outcome], given.rounds, given.commit)
    return 1 if given.check and apart else 0


def _write_page(path: Path, found: list[str], rounds: int, commit: str | None) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    import proofs

    text = [
        f"`python benchmarks/{Path(__file__).name} {proofs.arguments()}` on {machine()['machine']}, "
        f"torch {machine()['torch']}.",
        "",
        f"Medians of {rounds} runs of each, in turns, on shm between two ranks.",
        "",
        *found,
    ]
    proofs.write(
        path, "Whether ringway bench agrees with the benchmark of collectives", PROVES, "\n".join(text), commit
    )


if __name__ == "__main__":
    sys.exit(main())
