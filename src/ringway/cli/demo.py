"""`ringway demo`: real ranks on this host, real collectives, some training, one table."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from ringway.errors import RingwayError


def demo(
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of ranks.")] = 2,
    backend: Annotated[str | None, typer.Option(help="The backend; by default, ringway picks one.")] = None,
) -> None:
    """Start real ranks, run real collectives and a few steps of data-parallel training, and show the result."""
    from ringway.launch.run import run

    with tempfile.TemporaryDirectory(prefix="ringway-demo-") as folder:
        results = Path(folder, "results.json")
        command = [sys.executable, "-m", "ringway.cli.demo_rank", str(results), *([backend] if backend else [])]
        outcome = run(command, ranks)
        if outcome.code != 0:
            raise RingwayError(f"the demo did not finish: {outcome.summary}")
        _print(json.loads(results.read_text()))
    print(f"ringway demo: {outcome.summary}")


def _print(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    title = f"{facts['ranks']} ranks, backend {facts['backend']}, torch {facts['torch']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("what", "on every rank", "median time", "bus bandwidth"):
        table.add_column(column, justify="left" if column in ("what", "on every rank") else "right")
    for row in facts["rows"]:
        table.add_row(*(Text(row[column]) for column in ("what", "result", "time", "bandwidth")))
    console.print(table)
    losses = ", ".join(f"{loss:.3f}" for loss in facts["losses"])
    console.print(f"DistributedDataParallel, {len(facts['losses'])} steps: loss {losses}")
    console.print(
        f"weights are {'equal' if facts['weights_equal'] else 'DIFFERENT'} on all ranks; "
        f"ringway recorded {facts['calls']} calls, {facts['ddp_calls']} of them made by DDP"
    )
