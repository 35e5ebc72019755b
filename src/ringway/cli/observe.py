"""The commands `ringway top` and `ringway report`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

_RATE_SECONDS = 0.3
_WHOLE_LINES = 140


def top(
    interval: Annotated[float, typer.Option(help="Seconds between updates.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option(help="Show the ranks once and exit.")] = False,
) -> None:
    """Show the ranks that run on this host: each one's current call, for how long, how fast, and which are behind."""
    from rich.console import Console
    from rich.live import Live

    from ringway.observe.top import snapshot, table

    console = Console()
    ranks = snapshot()
    if once:
        before = {status.pid: (status.now_ns, status.total) for status in ranks}
        if ranks:
            time.sleep(min(interval, _RATE_SECONDS))  # rates need two looks
        # A file or a pipe has no width: show whole lines.
        whole = console if console.is_terminal else Console(width=max(console.width, _WHOLE_LINES))
        whole.print(table(snapshot(), before))
        return
    try:
        with Live(table(ranks, width=console.width), console=console, auto_refresh=False) as live:
            while True:
                before = {status.pid: (status.now_ns, status.total) for status in ranks}
                time.sleep(interval)
                ranks = snapshot()
                live.update(table(ranks, before, console.width), refresh=True)
    except KeyboardInterrupt:
        return


def report(
    trace: Annotated[Path, typer.Argument(help="A trace file written by ringway.trace.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("report.html"),
) -> None:
    """Turn a trace into one page: timeline, bandwidth by size, which ranks others wait for, and a table."""
    from ringway.observe.report import report as write

    write(trace, output)
    typer.echo(f"{output}: open it in a browser; it needs no network")
