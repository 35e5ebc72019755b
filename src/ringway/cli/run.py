"""`ringway run -n 4 script.py ...`: several ranks of one program on this host."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from ringway.errors import UsageError


def run(
    command: Annotated[list[str], typer.Argument(help="A Python script, or any program, and its arguments.")],
    wanted: Annotated[
        str | None,
        typer.Option(
            *("-n", "--ranks", "--nproc-per-node", "--nproc_per_node"),
            metavar="N|gpu|cpu",
            help="Number of ranks, or one for each GPU or CPU. Needed on a host without GPUs.",
            show_default="one for each GPU",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="The script is a module name.")] = False,
    on_death: Annotated[
        str, typer.Option(help="When a rank fails: stop the others, or keep them running.", metavar="stop|keep")
    ] = "stop",
    elastic: Annotated[
        bool, typer.Option("--elastic", help="The program uses ElasticJob: start ranks that fail again.")
    ] = False,
    fewest: Annotated[int, typer.Option("--min", min=1, help="With --elastic: end if fewer ranks are left.")] = 1,
    restarts: Annotated[int, typer.Option(min=0, help="With --elastic: how often each rank starts again.")] = 3,
    replace: Annotated[
        str | None, typer.Option(help="Run a program that names gloo on shared memory.", metavar="gloo=shm")
    ] = None,
    join: Annotated[
        int | None, typer.Option(help="Join the elastic run of the launcher with this pid.", metavar="PID")
    ] = None,
) -> None:
    """Start several ranks of a program on this host. The store is in this launcher, so it survives any rank."""
    from ringway.launch import run as launcher

    if on_death not in launcher.ON_DEATH:
        raise UsageError(f"--on-death is '{on_death}'; use stop or keep")
    ranks = _ranks(wanted)
    if join is not None and elastic:
        raise UsageError("--join joins an elastic run, and --elastic starts one; use one of them")
    if fewest > ranks:
        raise UsageError(f"--min {fewest} is more than the {ranks} ranks of -n")
    if replace is not None:
        from ringway.groups import replacement

        os.environ[replacement.VARIABLE] = replacement.checked(replace, "--replace")  # the ranks inherit it
    if join is not None:
        outcome = launcher.join(_command(command, module), ranks, join)
    else:
        plan = launcher.Elastic(fewest, restarts) if elastic else None
        outcome = launcher.run(_command(command, module), ranks, on_death=on_death, elastic=plan)
    print(f"ringway run: {outcome.summary}", file=sys.stderr, flush=True)
    raise typer.Exit(outcome.code)


def _ranks(wanted: str | None) -> int:
    """The number of ranks: as given, or one for each GPU."""
    from ringway.launch.cpus import usable_cpus

    if wanted is not None and wanted.isascii() and wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if wanted == "cpu":
        return usable_cpus()
    if wanted not in (None, "gpu", "auto"):
        raise UsageError(f"-n is '{wanted}'; use a number above 0, gpu or cpu")
    gpus = _gpus()
    if gpus:
        print(f"ringway run: {gpus} ranks, one for each GPU", file=sys.stderr, flush=True)
        return gpus
    if wanted == "auto":
        return usable_cpus()
    cpus = usable_cpus()
    raise UsageError(
        f"how many ranks? This host has no GPU that torch sees, and {cpus} CPU{'s' if cpus > 1 else ''} for this "
        f"process: pass -n, as in ringway run -n {max(cpus, 2)} train.py"
    )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _command(command: list[str], module: bool) -> list[str]:
    if module:
        return [sys.executable, "-m", *command]
    if command[0].endswith(".py"):
        if not Path(command[0]).exists():
            raise UsageError(f"there is no script '{command[0]}' in {Path.cwd()}")
        return [sys.executable, *command]
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program '{command[0]}'; name a script ending in .py, or a program")
    return command
