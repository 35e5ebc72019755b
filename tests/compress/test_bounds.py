"""No pack kernel touches a byte outside its buffers: checked with inaccessible pages on either side, and with
sanitizers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]


def built(folder: Path, flags: list[str]) -> Path:
    """Build the program with these flags, compiling its sources in parallel."""
    sources = {"pack/pack": [], "pack/base": KERNELS, "pack/avx2": KERNELS}
    if platform.machine() in ("x86_64", "AMD64"):
        sources["pack/avx2"] = [*KERNELS, "-mavx2"]
    files = {ROOT / "csrc" / f"{name}.cpp": extra for name, extra in sources.items()}
    files[Path(__file__).with_name("pack_bounds.cpp")] = []
    compiler = os.environ.get("CXX", "g++")
    common = [compiler, "-std=c++17", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}", *flags]
    jobs = [
        subprocess.Popen([*common, *extra, "-c", str(file), "-o", str(folder / f"{file.stem}.o")])
        for file, extra in files.items()
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    program = folder / "bounds"
    objects = [str(folder / f"{file.stem}.o") for file in files]
    subprocess.run([compiler, *flags, *objects, "-o", str(program), "-pthread"], check=True)
    return program


@pytest.mark.processes
def test_kernels_stay_within_their_buffers() -> None:
    script = Path(__file__).with_name("pack_bounds.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr[-6000:]}"
    assert "ok:" in done.stdout


@pytest.mark.sanitizers
@pytest.mark.timeout(900)
def test_no_sanitizer_objects_to_the_kernels(tmp_path: Path) -> None:
    program = built(tmp_path, ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"])
    done = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr[-6000:]}"
    assert "ok:" in done.stdout
