"""`ringway tune`: which backend is fastest for which op and size on this job, as a file that the next run loads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ringway.backends.policy import Policy
    from ringway.bench.tune import Progress


def tune(
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Start so many ranks here. Leave out under a launcher.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("ringway-policy.json"),
    backends: Annotated[
        str, typer.Option(help="Candidates, separated by commas; all that work here if left out.")
    ] = "",
    ops: Annotated[str, typer.Option(help="Ops, separated by commas; the common ones if left out.")] = "",
    sizes: Annotated[str, typer.Option(help="Sizes in bytes, separated by commas.")] = "",
    rounds: Annotated[int, typer.Option(min=3, help="Samples of each candidate.")] = 15,
) -> None:
    """Measure the backends of a job against each other and write the fastest of each op and size down.

    Alone it needs -n; or start it on a whole job: mpiexec -n 8 ringway tune, or under Slurm, or torchrun.
    """
    if ranks is not None:
        from ringway.launch import run as launcher

        arguments = ["--output", str(output), "--backends", backends, "--ops", ops, "--sizes", sizes]
        command = [sys.executable, "-m", "ringway.cli", "tune", *arguments, "--rounds", str(rounds)]
        outcome = launcher.run(command, ranks)
        if outcome.code:
            print(f"ringway tune: {outcome.summary}", file=sys.stderr, flush=True)
        raise typer.Exit(outcome.code)
    _tune_here(output, _names(backends), _names(ops), [int(size) for size in _names(sizes)], rounds)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _tune_here(output: Path, backends: list[str], ops: list[str], sizes: list[int], rounds: int) -> None:
    import ringway
    from ringway.bench import tune as bench

    bench.check_ops(ops)
    ringway.init_distributed("gloo", verbose=False, config={"ringway": {"policy": None}})
    first = ringway.get_rank() == 0
    groups, left_out = bench.groups_of(backends or bench.CANDIDATES)
    if first:
        for name, reason in left_out.items():
            print(f"ringway tune: without {name}: {reason}", file=sys.stderr)
    chosen_ops, chosen_sizes = ops or list(bench.OPS), sizes or list(bench.SIZES)
    steps = sum(1 if op == "barrier" else len(chosen_sizes) for op in chosen_ops)
    with _progress(steps, first) as progress:
        found = bench.medians(groups, chosen_ops, chosen_sizes, rounds, progress)
    policy = bench.tuned(found, str(output))
    if first:
        _write(policy, output)
    ringway.barrier()
    ringway.destroy_process_group()


def _write(policy: Policy, output: Path) -> None:
    """Whole or not at all: a run that starts meanwhile never reads half a table."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + f".{os.getpid()}")
    unfinished.write_text(json.dumps(policy.document(), indent=1) + "\n")
    unfinished.replace(output)
    for rule in policy.rules:
        print(f"{rule.op:24} {rule.in_words()}")
    print(f"wrote {output}; the next run loads it with RINGWAY_POLICY={output}")


@contextmanager
def _progress(steps: int, shown: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), disable=not shown) as bar:
        task: Any = bar.add_task("measuring", total=steps)

        def advance(op: str, nbytes: int) -> None:
            bar.update(task, description=f"{op} {nbytes} B", advance=1)

        yield advance
