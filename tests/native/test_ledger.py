"""The logger's histograms after more calls than 32 bits can count."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_a_bucket_counts_beyond_32_bits(tmp_path: Path) -> None:
    program = tmp_path / "ledger"
    sources = [ROOT / "tests/native/ledger.cpp", ROOT / "csrc/record/ledger.cpp"]
    command = [os.environ.get("CXX", "g++"), "-std=c++17", f"-I{ROOT / 'csrc'}", *sources, "-o", program]
    subprocess.run(command, check=True, timeout=200)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    count, bucket, p50, p99 = map(int, printed.split())
    assert (count, bucket) == (2**32 + 12, 2**32 + 2)
    assert (p50, p99) == (5, 5)  # a bucket that starts again at 0 would leave only the ten long calls
