"""The example runs on two sites, learns, and says what it sent. Two of them run at the same time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slow_link

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_two_sites.py"


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_example_trains_on_two_sites() -> None:
    slow_link.needed()
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("the relay between the sites needs /dev/net/tun")
    command = [sys.executable, str(EXAMPLE)]
    command += ["--method", "streaming", "--mbit", "100", "--delay", "5", "--steps", "24", "--every", "8"]
    command += ["--width", "32", "--blocks", "1", "--batch", "4", "--context", "32", "--rate", "0.01", "--show", "4"]
    beside = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    told = beside.communicate(timeout=290)[0]
    assert done.returncode == 0, done.stdout + done.stderr
    assert beside.returncode == 0, told
    lines = re.findall(r"loss (\d+\.\d+)  sent +(\d+\.\d+) MB \( *(\d+) x fewer .* utilization (\d\.\d+)", done.stdout)
    assert len(lines) == 6, done.stdout
    losses, sent = [float(line[0]) for line in lines], [float(line[1]) for line in lines]
    assert losses[-1] < 0.9 * losses[0]
    assert sent[0] < sent[-1]
    assert int(lines[-1][2]) > 30
