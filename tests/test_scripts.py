"""Each script and benchmark that reads a command line answers `--help`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARSER = "argparse.ArgumentParser("

# One process imports what many of them need, and has a child for each script. A child ends without Python's own end,
# which would take most of its time.
ASK = """
import os, runpy, sys, traceback
import torch.distributed.tensor, ringway.testing.conformance
failed = []
for script in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = [script, "--help"]
        sys.path[0] = os.path.dirname(script)
        code = 1
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = 0 if end.code in (0, None) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if os.wait()[1] != 0:
        failed.append(script)
sys.exit(", ".join(failed) or 0)
"""


@pytest.mark.processes
def test_scripts_and_benchmarks_answer_help() -> None:
    files = sorted(file for folder in ("scripts", "benchmarks") for file in (ROOT / folder).glob("*.py"))
    asked = [str(file) for file in files if PARSER in file.read_text(encoding="utf-8")]
    done = subprocess.run([sys.executable, "-c", ASK, *asked], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answered = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("usage: ")]
    assert sorted(answered) == sorted(Path(file).name for file in asked)
