"""Run a command while other processes keep the CPUs busy, and exit with its status.

python scripts/busy.py 2 make unit        two processes that only compute, while `make unit` runs
"""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} PROCESSES COMMAND...")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(int(sys.argv[1]))]
    try:
        return subprocess.run(sys.argv[2:], check=False).returncode
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
