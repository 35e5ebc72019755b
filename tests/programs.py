"""Runs programs on forked ranks as `python PROGRAM` would, and to the end: forking saves each rank the two seconds that
importing torch takes."""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import handover
from free_ports import free_port
from ringway.launch import run as launcher
from ringway.testing import RankContext, RankPool
from ringway.testing.pool import Outcome


def _run(
    context: RankContext, program: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> NoReturn:
    os.environ.update(environments[context.rank])
    _to_the_end(program, arguments)


def _to_the_end(program: str, arguments: Sequence[str], under_launcher: bool = False) -> NoReturn:
    folder = str(Path(program).parent)
    os.chdir(folder)
    sys.argv, sys.path[0] = [program, *arguments], folder
    code = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        # As the interpreter does; ringway reads what the program ended with when it exits.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    # What the interpreter does at its end, without freeing torch's modules one by one, which takes a second here.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if under_launcher:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()  # as mpi4py does when the interpreter ends
        ctypes.PyDLL(None).exit(code)  # MPICH says goodbye to its launcher in a C exit handler
    os._exit(code)


def run_program(
    pool: RankPool,
    program: Path,
    *arguments: str,
    environments: Sequence[Mapping[str, str]] = ({},),
    timeout: float = 120.0,
) -> list[Outcome]:
    """Run a program with one rank for each environment, and return how each ended. Ranks are in their own processes,
    which have run nothing else, in the program's folder."""
    pool.replace()
    given = [dict(variables) for variables in environments]
    return pool.try_run(_run, str(program), arguments, given, world_size=len(given), timeout=timeout)


def _run_for_launcher(context: RankContext, folder: str, prefix: str, program: str, arguments: Sequence[str]) -> None:
    launched = handover.Launched.accept(folder, context.rank)
    child = os.fork()
    if child == 0:
        launched.replace_this_process()
        sys.prefix = sys.exec_prefix = prefix  # where mpi4py looks for MPI's library
        sys.path += [str(packages) for packages in Path(prefix).glob("lib/python*/site-packages")]
        _to_the_end(program, arguments, under_launcher=True)
    launched.close()
    ended = os.pidfd_open(child)
    waiting = select.poll()
    for descriptor in (ended, launched.connection.fileno()):
        waiting.register(descriptor, select.POLLIN)
    if ended not in dict(waiting.poll()):
        os.kill(child, signal.SIGKILL)  # the launcher has killed the process that it started
    launched.end(os.waitpid(child, 0)[1])


def run_launched(
    pool: RankPool,
    launcher: Sequence[str | Path],
    program: Path,
    *arguments: str,
    ranks: int,
    environment: Mapping[str, str],
    prefix: Path = Path(sys.prefix),
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program on `ranks` ranks under a launcher, and return how the launcher ended. What it starts are stand-ins,
    each of which hands over to a forked rank. `prefix` is the environment whose packages are added to the ranks'."""
    pool.replace()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        launched = thread.submit(
            subprocess.run,
            [*launcher, sys.executable, "-I", "-S", handover.__file__, folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        ended = pool.try_run(
            _run_for_launcher, folder, str(prefix), str(program), arguments, world_size=ranks, timeout=timeout
        )
        run = launched.result()
    assert all(rank.ok for rank in ended), "\n".join([*map(str, ended), run.stdout, run.stderr])
    return run


def run_command(
    pool: RankPool, *arguments: str, folder: Path, environments: Sequence[Mapping[str, str]] = ({},)
) -> list[Outcome]:
    """Run the command `ringway ARGUMENTS` on each rank."""
    program = folder / "ringway_command.py"
    program.write_text("from ringway.cli import main\nmain()\n")
    return run_program(pool, program, *arguments, environments=environments)


def torchrun_variables(ranks: int) -> list[dict[str, str]]:
    """What torchrun tells each rank. Rank 0 hosts the store."""
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@contextmanager
def ringway_run_variables(ranks: int) -> Iterator[list[dict[str, str]]]:
    """What `ringway run` tells each rank. The store is in this process, as it is in the launcher."""
    with launcher.store_of_a_run() as variables:
        local = launcher.LocalRanks(ranks, ranks)
        yield [local.environment(rank) | variables for rank in range(ranks)]


def ended_with(outcome: Outcome, status: int = 0) -> bool:
    """Whether the program's exit status is `status`."""
    return (outcome.kind, outcome.detail) == ("died", f"it left the process with status {status}")
