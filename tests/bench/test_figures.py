"""The charts of the README are drawn from measurements: those in the tree, and those that the benchmarks write."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"


def _drawn(folder: Path) -> dict[str, str]:
    script = ROOT / "scripts" / "figures.py"
    subprocess.run([sys.executable, script, "--folder", folder], check=True, timeout=60, capture_output=True)
    return {chart.name: chart.read_text() for chart in folder.glob("*.svg")}


def test_the_charts_are_those_of_the_measurements(tmp_path: Path) -> None:
    for measured in FIGURES.glob("*.json"):
        (tmp_path / measured.name).write_text(measured.read_text())
    assert _drawn(tmp_path) == {chart.name: chart.read_text() for chart in FIGURES.glob("*.svg")}


def test_names_are_apart_and_text_is_escaped(tmp_path: Path) -> None:
    facts = {"machine": "<b>&", "torch": "2.13.0", "ringway": "0.1.0", "measured": "today"}
    seconds = {"ringway": 1e-6, "mpich": 1.01e-6, "openmpi": 1.02e-6, "copy": 1e-7}
    rows = [{"op": "all_reduce", "bytes": size, "ranks": 2, "seconds": seconds} for size in (8, 64)]
    (tmp_path / "collectives.json").write_text(json.dumps({"facts": facts, "rows": rows}))
    results = {"plain": {"seconds": 0.5, "sent": 64e6}, "auto says": "words", "onebit": {"seconds": 0.05, "sent": 2e6}}
    link = {"facts": facts, "rate": "1gbit", "megabytes": 67.1, "results": results}
    (tmp_path / "slow_link.json").write_text(json.dumps(link))
    charts = {name: ET.fromstring(text) for name, text in _drawn(tmp_path).items()}
    texts = {name: list(chart.iter("{http://www.w3.org/2000/svg}text")) for name, chart in charts.items()}
    ends = [text for text in texts["collectives.svg"] if text.text in ("ringway shm", "MPICH", "Open MPI")]
    heights = sorted(float(text.attrib["y"]) for text in ends)
    assert all(below - above >= 15 for above, below in pairwise(heights))
    assert any("<b>&" in (text.text or "") for text in texts["collectives.svg"])
    assert "50 ms, 2 MB sent" in [text.text for text in texts["slow_link.svg"]]
    assert "all_reduce of 67 MB of fp32 over 1 Gbit/s, 2 ranks" in [text.text for text in texts["slow_link.svg"]]
