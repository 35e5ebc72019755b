"""`ringway bench`: how fast each backend is here, by op and size. Results are checked before they are timed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringway.launch.cpus import usable_cpus

if TYPE_CHECKING:
    from ringway.bench.table import Row

OPS = ("all_reduce", "all_gather_into_tensor", "broadcast")
SIZES = (8, 64 << 10, 4 << 20)


def bench(
    ranks: Annotated[
        int | None,
        typer.Option(
            *("-n", "--ranks"),
            min=1,
            help="Start this many ranks here. Omit under a launcher.",
            show_default="one for each CPU, from 2 to 8",
        ),
    ] = None,
    backends: Annotated[
        str, typer.Option(help="Backends to compare, separated by commas; by default, all that work here.")
    ] = "",
    ops: Annotated[str, typer.Option(help="Ops, separated by commas.", show_default=", ".join(OPS))] = ",".join(OPS),
    sizes: Annotated[
        str,
        typer.Option(help="Sizes in bytes, separated by commas.", show_default=", ".join(map(str, SIZES))),
    ] = ",".join(map(str, SIZES)),
    rounds: Annotated[int, typer.Option(min=3, help="Samples per candidate.")] = 21,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the table to a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure collectives on this job's backends, in alternation, with medians and their intervals.

    It starts ranks on this host, or runs as a whole job: mpiexec -n 8 ringway bench, or under Slurm or torchrun.
    """
    if ranks is None and not _is_launched():
        ranks = min(max(usable_cpus(), 2), 8)
        print(f"ringway bench: {ranks} ranks on this host (-n chooses)", file=sys.stderr, flush=True)
    if ranks is None:
        _bench_here(_split(backends), _split(ops), [int(size) for size in _split(sizes)], rounds, output, as_json)
        return
    from ringway.launch import run as launcher

    with tempfile.TemporaryDirectory(prefix="ringway-bench-") as folder:
        file = output or Path(folder, "table")
        arguments = ["--backends", backends, "--ops", ops, "--sizes", sizes, "--rounds", str(rounds)]
        command = [sys.executable, "-m", "ringway.cli", "bench", *arguments, "--output", str(file)]
        outcome = launcher.run([*command, "--json"] if as_json else command, ranks)
        if outcome.code == 0 and output is None:
            print(file.read_text(), end="")
    if outcome.code:
        print(f"ringway bench: {outcome.summary}", file=sys.stderr, flush=True)
    raise typer.Exit(outcome.code)


def _is_launched() -> bool:
    """Whether a launcher started this process."""
    from ringway.launch.discover import explore
    from ringway.launch.sources import NO_LAUNCHER

    found = explore()
    return found.info.source != NO_LAUNCHER or found.mpi_launcher is not None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _bench_here(
    backends: list[str], ops: list[str], sizes: list[int], rounds: int, output: Path | None, as_json: bool
) -> None:
    import ringway
    from ringway.bench import CASES, Place, Ranks, measure, rows
    from ringway.bench import tune as candidates

    candidates.check_ops(ops)
    ringway.init_distributed("gloo", verbose=False, config={"ringway": {"policy": None}})
    rank, size = ringway.get_rank(), ringway.get_world_size()
    groups, left_out = candidates.groups_of(backends or candidates.CANDIDATES)
    table: list[Row] = []
    for op in ops:
        for nbytes in sizes if op != "barrier" else (0,):
            places = {name: Place(rank, size, nbytes, group) for name, group in groups.items()}
            timed = [CASES[op].candidate(name, ringway, place) for name, place in places.items()]
            measured = measure(timed, Ranks(ringway.get_world_group()), rounds=rounds)
            table += rows(CASES[op], next(iter(places.values())), measured)
    if rank == 0:
        _show(table, left_out, output, as_json)
    ringway.barrier()
    ringway.destroy_process_group()


def _show(table: list[Row], left_out: dict[str, str], output: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from ringway.bench import print_table, to_json

    for name, reason in left_out.items():
        print(f"ringway bench: skipped {name}: {reason}", file=sys.stderr)
    if as_json:
        text = to_json(table, left_out=left_out) + "\n"
        print(text, end="") if output is None else output.write_text(text)
    elif output is None:
        print_table(table)
    else:
        with output.open("w") as file:
            print_table(table, console=Console(file=file, width=140))
