"""benchmarks/overhead.py runs, checks itself against the recorder, and writes its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from programs import ended_with, run_program
from ringway.testing import RankPool

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"


def test_overhead_runs_and_reports(pool: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    (ended,) = run_program(pool, SCRIPT, "--rounds", "3", "--json", str(out), timeout=250)
    assert ended_with(ended), ended
    assert "recorder:" in ended.output
    report = json.loads(out.read_text())
    assert 0 < report["recorder_seconds"] < 1e-3
    found = {(row["ranks"], row["candidate"]): row for row in report["rows"]}
    assert set(found) == {(size, name) for size in (1, 2) for name in ("torch.distributed", "ringway")}
    for (_, name), row in found.items():
        assert row["verified"]
        assert (row["ratio"] is None) == (name == "torch.distributed")
