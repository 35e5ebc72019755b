"""Whether `ringway bench --compare` takes a rerun of the same code for the same, and finds a delay of 20 %.

    python benchmarks/compare_agrees.py [--turns 10] [--check] [--output docs/proofs/compare.md]

Each turn runs the tool twice, on a backend that is shm with an adjustable delay (`delayed_bench.py`): once without
the delay, compared with the same of the turn before, and once with it, compared with the one without. A rerun is right
if no op is called changed; a delay is found if every op is called slower. Needs a quiet machine and 3 minutes. With
--check, it exits with 1 if less than 9 of 10 of either kind are right. With --output, it writes a page too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from delayed_bench import DELAY, NAME
from machine import machine

OPS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
SIZES = "256K,1M,4M"
PLANTED = 0.2
RIGHT = 0.9
PROVES = (
    "benchmarks/compare_agrees.py",
    "benchmarks/delayed_bench.py",
    "src/ringway/bench/compare.py",
    "src/ringway/bench/runner.py",
    "src/ringway/bench/session.py",
)


def run(file: Path, delay: float = 0.0, compare: Path | None = None) -> dict[str, str]:
    """Runs the tool, and returns what changed."""
    program = Path(__file__).with_name("delayed_bench.py")
    command = [sys.executable, "-m", "ringway", "run", "-n", "2", str(program), "bench", "--backends", NAME]
    command += ["--ops", ",".join(OPS), "--sizes", SIZES, "--json", "-o", str(file)]
    command += ["--compare", str(compare)] if compare is not None else []
    done = subprocess.run(
        command, env={**os.environ, DELAY: str(delay)}, check=False, timeout=300, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"ringway bench failed:\n{done.stdout}{done.stderr}")
    return changed(json.loads(file.read_text())["changes"])


def changed(said: list[str]) -> dict[str, str]:
    """By op, how it changed: '1.21 times slower'."""
    changes = {}
    for line in said:
        found = re.match(r"(\w+) on \w+ is ([\d.]+ times \w+)", line)
        if found is not None:
            changes[found[1]] = found[2]
        elif not line.startswith("nothing changed"):
            raise SystemExit(f"ringway bench says what this program does not understand: {line}")
    return changes


def finds_the_delay(changes: dict[str, str]) -> bool:
    return set(changes) == set(OPS) and all(change.endswith("slower") for change in changes.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--output", type=Path, help="the page to write")
    parser.add_argument("--commit", help="the commit of a tree without git history")
    given = parser.parse_args()
    lines = ["| turn | the same code again | 20 % slower |", "|---|---|---|"]
    same = found = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = folder / "first.json"
        run(before)
        for turn in range(given.turns):
            now = folder / f"{turn}.json"
            again = run(now, compare=before)
            delayed = run(folder / "delayed.json", PLANTED, now)
            same += not again
            found += finds_the_delay(delayed)
            told = ["; ".join(f"{op} {how}" for op, how in each.items()) or "the same" for each in (again, delayed)]
            lines.append(f"| {turn + 1} | {' | '.join(told)} |")
            print(lines[-1], flush=True)
            before = now
    outcome = f"{same} of {given.turns} reruns are called the same, {found} of {given.turns} delays are found."
    print(outcome)
    if given.output is not None:
        _write_page(given.output, [*lines, "", outcome], given.commit)
    return 1 if given.check and min(same, found) < RIGHT * given.turns else 0


def _write_page(path: Path, found: list[str], commit: str | None) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    import proofs

    text = [
        f"`python benchmarks/{Path(__file__).name} {proofs.arguments()}` on {machine()['machine']}, "
        f"torch {machine()['torch']}.",
        "",
        f"Each comparison is between two whole runs of `ringway bench` on {', '.join(OPS)} of {SIZES},",
        f"2 ranks. The delay is {PLANTED:.0%} of the time of each call inside the backend.",
        "",
        *found,
    ]
    proofs.write(path, "Whether ringway bench --compare tells a change from noise", PROVES, "\n".join(text), commit)


if __name__ == "__main__":
    sys.exit(main())
