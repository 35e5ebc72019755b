"""The `ringway` command. Each subcommand is a file here, which imports what it needs when it runs."""

from __future__ import annotations

import sys

import typer

from ringway.cli import bench, demo, env, run, tune
from ringway.cli import observe as watching
from ringway.errors import RingwayError

app = typer.Typer(
    name="ringway",
    help="One communication layer for PyTorch: start ranks, see what was discovered, watch and measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(name="run", context_settings={"allow_interspersed_args": False})(run.run)
app.command(name="env")(env.env)
app.command(name="demo")(demo.demo)
app.command(name="bench")(bench.bench)
app.command(name="tune")(tune.tune)
app.command(name="top")(watching.top)
app.command(name="report")(watching.report)


def main() -> None:
    """Print ringway's own errors as one line, without a traceback."""
    try:
        app()
    except RingwayError as error:
        print(f"ringway: {error}", file=sys.stderr)
        sys.exit(2)
