"""The `ringway` command. Each subcommand is a file here, which imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ringway.cli import bench, demo, doctor, env, run, tune
from ringway.cli import observe as watching
from ringway.errors import RingwayError
from ringway.version import VERSION

app = typer.Typer(
    name="ringway",
    help="One communication layer for PyTorch: start ranks, see what was discovered, watch and measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ringway {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """One communication layer for PyTorch: start ranks, see what was discovered, watch and measure."""


app.command(name="run", context_settings={"allow_interspersed_args": False})(run.run)
app.command(name="env")(env.env)
app.command(name="doctor")(doctor.doctor)
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
