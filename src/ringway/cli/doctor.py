"""`ringway doctor`: what is wrong with this machine, or between the hosts of a job, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringway.doctor import Finding

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    seconds: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the other ranks of a job.")] = 60.0,
) -> None:
    """Look for what would break or slow down a job: limits, interfaces, names, ports, GPUs, versions, leftovers.

    Alone, it examines this host. Started as a job, it also examines the connections between the hosts:

        srun ringway doctor          torchrun --no-python ... ringway doctor          ringway run -n 2 -- ringway doctor

    Exits with 1 if something is red, otherwise with 0.
    """
    from ringway.doctor import examine, worst

    findings = examine(seconds)
    if findings is None:  # rank 0 shows them
        return
    if as_json:
        print(json.dumps({"worst": worst(findings), "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings)
    if worst(findings) == "error":
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    several = any(finding.host for finding in findings)
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for finding in findings:
        color = _COLORS[finding.level]
        words = Text(finding.says)
        if finding.advice:
            words.append(f"\n{finding.advice}", style="bold")
        mark = Text({"ok": "ok", "warning": "look", "error": "bad"}[finding.level], style=color)
        table.add_row(mark, *([Text(finding.host)] if several else []), Text(finding.subject), words)
    console = Console(highlight=False, markup=False)
    console.print(table)
    count = {level: sum(finding.level == level for finding in findings) for level in _COLORS}
    if count["error"]:
        console.print(
            Text(
                f"Problems that break jobs: {count['error']}; that may: {count['warning']}. See the bold lines.", "red"
            )
        )
    elif count["warning"]:
        console.print(Text(f"Jobs run. Things that slow them down or break some: {count['warning']}.", style="yellow"))
    else:
        console.print(Text("All is well.", style="green"))
