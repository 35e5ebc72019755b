"""All available backends side by side, and a tuned policy next to them.

    python benchmarks/backends.py [--ranks 2] [--mpi mpich|openmpi|none] [--backends shm,gloo] [--ops ...] [--json FILE]

First, `ringway tune` runs on the job and writes a policy. Then new processes load it: their world is mixed by the
policy, and every single backend has its own group. All take turns in one run, on the same memory, each after each other
one equally often. For every size, the table shows each backend's median, and the policy's time relative to the best
single backend: the median of the rounds' ratios with its 95 % interval. If the interval does not show on which side of
the limit the ratio lies, more rounds are added, up to four times as many.

With --mpi, that MPI's mpiexec starts the ranks, in an environment made from PyPI wheels, so that mpi takes part.
--backends leaves some out, to see a policy that mixes the others. Takes about three minutes. Exits with 1 if the policy
takes more than 1.10 times as long as the best single backend.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1.10
TUNED = "policy"
OPS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
SIZES = (8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 4 << 20, 32 << 20)
MOST_TIMES = 4


def started(mpi: str, ranks: int) -> tuple[list[str], str]:
    """The command that starts ranks, and the Python they run."""
    if mpi == "none":
        return [sys.executable, "-m", "ringway.cli", "run", "-n", str(ranks)], ""
    sys.path.insert(0, str(ROOT / "scripts"))
    from mpi_env import mpi_env

    home = mpi_env(mpi) / "bin"
    flags = ["--allow-run-as-root", "--oversubscribe"] if mpi == "openmpi" else []
    return [str(home / "mpiexec"), *flags, "-n", str(ranks)], str(home / "python")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this host (2)")
    parser.add_argument("--mpi", choices=("mpich", "openmpi", "none"), default="mpich", help="their launcher (mpich)")
    parser.add_argument("--backends", default="", help="candidates, separated by commas (all that work here)")
    parser.add_argument("--ops", nargs="+", default=list(OPS), help="collectives to measure")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes of a message")
    parser.add_argument("--rounds", type=int, default=31, help="samples per candidate (31)")
    parser.add_argument("--json", type=Path, help="also write the table and the policy to this file")
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare is not None:
        compare(arguments)
        return 0
    launcher, python = started(arguments.mpi, arguments.ranks)
    with tempfile.TemporaryDirectory() as folder:
        policy, results = Path(folder, "policy.json"), Path(folder, "results.json")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        options = ["--rounds", str(arguments.rounds)]
        if arguments.backends:
            options += ["--backends", arguments.backends]
        wanted = ["--ops", ",".join(arguments.ops), "--sizes", ",".join(map(str, arguments.sizes))]
        tune = ["-m", "ringway.cli", "tune", "-o", str(policy), *wanted, *options]
        program = [str(Path(__file__).resolve()), "--compare", str(results), "--ops", *arguments.ops, *options]
        program += ["--sizes", *map(str, arguments.sizes)]
        for command, extra in ((tune, {}), (program, {"RINGWAY_POLICY": str(policy)})):
            whole = [*launcher, python, *command] if python else [*launcher, sys.executable, *command]
            subprocess.run(whole, env={**environment, **extra}, check=True, timeout=1800)
        rows = json.loads(results.read_text())
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"rows": rows, "policy": json.loads(policy.read_text())}, indent=1))
    return show(rows, arguments)


def compare(arguments: argparse.Namespace) -> None:
    """On every rank of the second job: the mixed world and the single backends, in turns."""
    import torch

    import ringway
    from ringway.backends.several.mixed import MixedBackend
    from ringway.bench import Ranks
    from ringway.bench.tune import CANDIDATES, groups_of
    from ringway.groups.world import world

    torch.set_num_threads(1)
    ringway.init_distributed(verbose=False)
    if not isinstance(ringway.communicator().backend, MixedBackend):
        raise SystemExit("the policy was not loaded")
    world.policy = None  # from here on, groups have a single backend
    control = Ranks(ringway.new_group(backend="gloo"))
    names = arguments.backends.split(",") if arguments.backends else CANDIDATES["cpu"]
    groups: dict[str, Any] = {**groups_of(names)[0], TUNED: None}
    rows = [
        compared(op, nbytes, groups, control, arguments.rounds) for op in arguments.ops for nbytes in arguments.sizes
    ]
    if ringway.get_rank() == 0:
        arguments.compare.write_text(json.dumps(rows))
    ringway.barrier()
    ringway.destroy_process_group()


def compared(op: str, nbytes: int, groups: dict[str, Any], control: Any, rounds: int) -> dict[str, Any]:
    """One row of the table. All ranks see the same times, so they add the same number of rounds."""
    from ringway.bench import measure, paired_ratio
    from ringway.bench.tune import in_one_place

    candidates = in_one_place(op, nbytes, groups)
    measured = measure(candidates, control, rounds=rounds)
    while True:
        by_name = {one.name: one for one in measured}
        best = min((one for one in measured if one.name != TUNED), key=lambda one: one.seconds.median)
        ratio = paired_ratio(by_name[TUNED], best)
        if not ratio.low <= LIMIT <= ratio.high or ratio.count >= MOST_TIMES * rounds:
            break
        more = measure(candidates, control, rounds=rounds, warmup_rounds=1)
        measured = [replace(one, samples=[*one.samples, *new.samples]) for one, new in zip(measured, more, strict=True)]
    return {
        "op": op,
        "bytes": nbytes,
        "seconds": {one.name: asdict(one.seconds) for one in measured},
        "best": best.name,
        "ratio": asdict(ratio),
    }


def show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ringway.bench.table import machine

    names = list(rows[0]["seconds"])
    table = Table(title=f"{arguments.ranks} ranks, started by {arguments.mpi}; median µs of a call")
    for heading in ("op", "bytes", *names, "policy / best", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "op" else "right")
    slow = []
    for row in rows:
        times = [f"{1e6 * row['seconds'][name]['median']:.1f}" for name in names]
        ratio = row["ratio"]
        table.add_row(
            row["op"],
            str(row["bytes"]),
            *times,
            f"{ratio['median']:.2f} × {row['best']}",
            f"{ratio['low']:.2f} to {ratio['high']:.2f}",
        )
        if ratio["median"] > LIMIT:
            slow.append(f"{row['op']} of {row['bytes']} bytes: {ratio['median']:.2f} × {row['best']}")
    console = Console(width=140)
    console.print(table)
    console.print(json.dumps(machine()), highlight=False)
    for text in slow:
        console.print(f"over {LIMIT}: {text}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
