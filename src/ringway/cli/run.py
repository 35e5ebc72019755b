"""`ringway run -n 4 script.py ...`: several ranks of one program."""

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
    bind: Annotated[
        str,
        typer.Option(
            help="Pin each rank to cores of its own, to the cores of its NUMA node, or to none.",
            metavar="core|numa|none",
        ),
    ] = "none",
    listen: Annotated[
        str | None,
        typer.Option(help="Let other hosts join, at this address of this host. Needs a secret.", metavar="HOST[:PORT]"),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="With --listen: the number of hosts, each with -n ranks.")] = 1,
    join: Annotated[
        str | None,
        typer.Option(
            help="Join the run that listens there, or the elastic run of the launcher with this pid.",
            metavar="HOST:PORT|PID",
        ),
    ] = None,
) -> None:
    """Start several ranks of a program on this host, or on several. The store is in the launcher, so it survives any
    rank.

    On two hosts, with the same RINGWAY_JOB_SECRET_FILE on both: `ringway run -n 4 --hosts 2 --listen 10.0.0.1:29400
    train.py` on the first, and `ringway run -n 4 --join 10.0.0.1:29400 train.py` on the second.
    """
    from ringway.launch import run as launcher
    from ringway.launch.binding import BINDINGS, bindings

    if on_death not in launcher.ON_DEATH:
        raise UsageError(f"--on-death is '{on_death}'; use stop or keep")
    if bind not in BINDINGS:
        raise UsageError(f"--bind is '{bind}'; use core, numa or none")
    ranks = _ranks(wanted)
    if join is not None and (elastic or listen is not None):
        raise UsageError("--join joins a run, and --elastic and --listen start one; use one of them")
    if hosts > 1 and listen is None:
        raise UsageError(f"--hosts {hosts}: pass --listen with an address of this host that the other hosts reach")
    if listen is not None and hosts == 1 and not elastic:
        raise UsageError("--listen: pass --hosts with the number of hosts, or --elastic")
    if fewest > ranks:
        raise UsageError(f"--min {fewest} is more than the {ranks} ranks of -n")
    if replace is not None:
        from ringway.groups import replacement

        os.environ[replacement.VARIABLE] = replacement.checked(replace, "--replace")  # the ranks inherit it
    places = bindings(bind, ranks)
    if join is not None:
        outcome = launcher.join(_command(command, module), ranks, join, on_death=on_death, bindings=places)
    else:
        from ringway.job.elastic.roster import standing

        terms = launcher.Elastic(fewest, restarts, standing) if elastic else None
        where = launcher.Listen(listen, hosts) if listen is not None else None
        outcome = launcher.run(
            _command(command, module), ranks, on_death=on_death, elastic=terms, listen=where, bindings=places
        )
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
