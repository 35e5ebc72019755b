"""benchmarks/collectives.py whose peers run in forks of this process, which has imported torch: `python
forked_collectives.py OPTIONS`. Only the process that measures copies is a new interpreter."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import collectives

from ringway.testing.forkserver import die_with_parent


class Forked:
    """What the benchmark uses of a subprocess.Popen of `python PROGRAM ARGUMENTS`."""

    def __init__(self, program: Sequence[str], environment: Mapping[str, str], output: IO[str]) -> None:
        self.returncode: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                die_with_parent(parent)
                os.environ.update(environment)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.argv = list(program)
                runpy.run_path(program[0], run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._reap(0)  # the test limits the time, and this process ends with it

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def start(command: list[str], *, env: Mapping[str, str], stdout: IO[str], **options: Any) -> Any:
    interpreter, *program = command
    if interpreter != sys.executable or program[1] == collectives.COPY:
        return subprocess.Popen(command, env=env, stdout=stdout, **options)
    return Forked(program, env, stdout)


if __name__ == "__main__":
    collectives.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": start})  # type: ignore[assignment]
    sys.exit(collectives.main())
