"""Runs programs until their interpreter exits, in processes that have already imported torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from ringway.testing import RankContext, RankPool
from ringway.testing.pool import Outcome

_ALONE = (
    "import os, sys, torch, ringway as dist; from torch.distributed import HashStore\n"
    "dist.init_process_group({backend!r}, store=HashStore(), rank=0, world_size=1)\n"
)


def _to_the_end(context: RankContext, code: str, backend: str | None) -> None:
    """Runs a program in `__main__` and exits as the interpreter does: atexit, finalization, exit status."""
    main: dict[str, Any] = sys.modules["__main__"].__dict__
    status = 0
    try:
        if backend is not None:
            context.start(backend)
        exec(compile(code, "program", "exec"), main)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(status)


def run_alone(pool: RankPool, code: str, backend: str = "gloo") -> Outcome:
    """The result of a program with one rank."""
    pool.replace()  # its process is in no group yet
    return pool.try_run(_to_the_end, _ALONE.format(backend=backend) + code, None, world_size=1)[0]


def run_together(pool: RankPool, code: str, backend: str, world_size: int) -> list[Outcome]:
    """The results of a program on several ranks."""
    start = "import torch, ringway as dist\n"
    return pool.try_run(_to_the_end, start + code, backend, world_size=world_size)


def in_child(work: Callable[[], None]) -> int:
    """The wait status of a forked child that does this and ends within a minute: 0 if nothing was raised."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            torch.set_num_threads(1)  # a fork has none of OpenMP's threads, and would wait for them
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    return os.waitpid(child, 0)[1]
