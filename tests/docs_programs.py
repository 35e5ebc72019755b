"""Runs programs on ranks that are forked from one process that has imported torch.

`python docs_programs.py` reads a list of jobs from stdin, one line of JSON, and answers each with a line. A rank is a
child process that runs the program as `__main__`. Forking saves each rank the two seconds that importing torch takes.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch  # noqa: F401 - imported for the ranks

import ringway.compress
import ringway.parallel  # noqa: F401
from free_ports import free_port

LIMIT = 120.0
"""Seconds that a program may take."""
AT_ONCE = 2
"""Programs that run at the same time: some of them only wait."""


def run_rank(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    """Run the program in this forked process as `python PROGRAM` would, with its output in `output.RANK`."""
    os.chdir(job["folder"])
    out = os.open(f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.environ["OMP_NUM_THREADS"] = "1"
    if job["ranks"] > 1:  # otherwise the program is started without a launcher
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    sys.argv, sys.path[0] = [job["program"]], job["folder"]
    code = 0
    try:
        runpy.run_path(job["program"], run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What the interpreter does at its end, without freeing torch's modules one by one, which takes a second here.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


class Running:
    """A program whose ranks have been forked."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self._deadline = time.monotonic() + LIMIT
        self._codes: dict[int, int | None] = {}
        port = free_port()
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                run_rank(job, rank, port)
            self._codes[pid] = None

    def has_ended(self) -> bool:
        """Whether all ranks have exited. Kills those that are still running at the limit."""
        for pid in [pid for pid, code in self._codes.items() if code is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > self._deadline:
                os.kill(pid, signal.SIGKILL)
        return None not in self._codes.values()

    def answer(self) -> str:
        outputs = [Path(self.job["folder"], f"output.{rank}").read_text() for rank in range(self.job["ranks"])]
        return json.dumps({"label": self.job["label"], "codes": list(self._codes.values()), "outputs": outputs})


def main() -> None:
    gc.collect()
    gc.freeze()  # so that a collection in a rank does not copy the pages that it shares with this process
    waiting = json.loads(sys.stdin.readline())
    running: list[Running] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(Running(waiting.pop(0)))
        time.sleep(0.01)
        for program in [program for program in running if program.has_ended()]:
            running.remove(program)
            print(program.answer(), flush=True)
    os._exit(0)  # the frozen objects would be reported as leaks


if __name__ == "__main__":
    main()
