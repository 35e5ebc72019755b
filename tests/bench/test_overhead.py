"""benchmarks/overhead.py runs, checks itself against the recorder, and writes its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"


def test_overhead_runs_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    command = [sys.executable, SCRIPT, "--rounds", "3", "--json", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "recorder:" in done.stdout
    report = json.loads(out.read_text())
    assert 0 < report["recorder_seconds"] < 1e-3
    found = {(row["ranks"], row["candidate"]): row for row in report["rows"]}
    assert set(found) == {(size, name) for size in (1, 2) for name in ("torch.distributed", "ringway")}
    for (_, name), row in found.items():
        assert row["verified"]
        assert (row["ratio"] is None) == (name == "torch.distributed")
