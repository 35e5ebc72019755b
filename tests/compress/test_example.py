"""The example runs unchanged, learns, and reports what it saved."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_ddp_compressed.py"


def test_the_example_learns_and_reports() -> None:
    command = [sys.executable, "-m", "ringway.cli", "run", "-n", "2", str(EXAMPLE), "--steps", "60"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]
    assert losses[-1] < losses[0] / 2, said
    assert re.search(r"compression: \d+ compressed calls, .* saved", said), said
