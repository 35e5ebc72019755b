"""The watch of CUDA streams under sanitizers, on the stand-in for the CUDA driver."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ("call_board", "group_record", "ledger", "record_file", "recorder")
SOURCES = ["csrc/cgroup.cpp", *(f"csrc/record/{name}.cpp" for name in RECORD)]
SOURCES += ["csrc/device/driver.cpp", "csrc/device/stream_watch.cpp"]
ROUNDS = 300 if os.environ.get("RINGWAY_SOAK") else 20
pytestmark = pytest.mark.sanitizers


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str) -> None:
    """Every call ends once, groups may be freed with calls in flight, and a forked child can drop the watch."""
    build = [os.environ.get("CXX", "g++"), "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    build += [f"-fsanitize={sanitizer}", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread"]
    if sanitizer == "thread":
        build += ["-Wno-tsan"]  # the recorder's fences: the data that they order is atomic
    library, program = tmp_path / "libcuda_stand_in.so", tmp_path / "streams"
    subprocess.run(
        [*build, "-fPIC", "-shared", ROOT / "tests/backends/cuda_stand_in.cpp", "-o", library], check=True, timeout=120
    )
    sources = [ROOT / name for name in (*SOURCES, "tests/native/streams.cpp")]
    subprocess.run([*build, "-rdynamic", *sources, "-o", program, "-ldl"], check=True, timeout=300)
    options = {"TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [program, library, str(ROUNDS)],
        capture_output=True,
        text=True,
        env={**os.environ, **options},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert "ok:" in done.stdout
    assert "runtime error" not in done.stderr, done.stderr[-6000:]
