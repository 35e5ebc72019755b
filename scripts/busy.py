"""Run a command while other processes keep the CPUs busy, and exit with its status.

python scripts/busy.py 2 make unit        two processes that only compute, while `make unit` runs
"""

from __future__ import annotations

import os
import subprocess
import sys

_COMPUTE = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"  # and end with this process


def main() -> int:
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} PROCESSES COMMAND...")
    compute = [sys.executable, "-c", _COMPUTE, str(os.getpid())]
    busy = [subprocess.Popen(compute) for _ in range(int(sys.argv[1]))]
    try:
        return subprocess.run(sys.argv[2:], check=False).returncode
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
