"""The engine under sanitizers: ranks as threads over one mapping, so that the sanitizer sees all of them."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = [
    f"shm/{name}" for name in ("algorithms", "all_to_all", "collectives", "membership", "peer_memory", "progress")
]
ENGINE += [f"shm/{name}" for name in ("messages", "message_offers", "messages_move", "segment", "wait")]
ENGINE += ["cgroup", "reduce/reduce", "reduce/plain"]
pytestmark = pytest.mark.sanitizers
PROGRAMS = 200 if os.environ.get("RINGWAY_SOAK") else 2
SECONDS = 3000 if os.environ.get("RINGWAY_SOAK") else 280


def _flags_of_sanitizer(name: str) -> list[str]:
    return [f"-fsanitize={name}", "-O1", "-g", "-fno-omit-frame-pointer"]


def _object(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '_')}.o"


def _built(folder: Path, flags: list[str]) -> Path:
    """The stress program built with these flags. The sources are compiled in parallel."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    widths = {"reduce/avx2": ["-mavx2"], "reduce/avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]}
    names = [*ENGINE, *(widths if x86 else ())]
    common = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", *flags]
    sources = {name: ROOT / "csrc" / f"{name}.cpp" for name in names} | {"stress": ROOT / "tests/native/stress.cpp"}
    compiler = os.environ.get("CXX", "g++")
    jobs = [
        subprocess.Popen([compiler, *common, *widths.get(name, []), "-c", str(source), "-o", _object(folder, name)])
        for name, source in sources.items()
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    program = folder / "stress"
    subprocess.run(
        [compiler, *flags, *(_object(folder, name) for name in sources), "-o", program, "-pthread"], check=True
    )
    return program


def _run(program: Path, ranks: int, programs: int, seed: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    command = [program, str(ranks), str(programs), str(seed)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("sanitizer", "dawdling"),
    [("thread", []), ("address,undefined", ["-DRINGWAY_DAWDLE"])],  # widens a narrow race window
    ids=["thread", "address"],
)
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str, dawdling: list[str]) -> None:
    program = _built(tmp_path, [*_flags_of_sanitizer(sanitizer), *dawdling])
    for ranks in (2, 4):
        done = _run(program, ranks, PROGRAMS, seed=100 * ranks)
        assert done.returncode == 0, f"{ranks} ranks\n{done.stdout}{done.stderr[-6000:]}"
        assert "ok:" in done.stdout
        assert "runtime error" not in done.stderr, done.stderr[-6000:]


@pytest.mark.timeout(2 * SECONDS)
def test_a_missing_acquire_is_found(tmp_path: Path) -> None:
    """Shows that the test above can fail: ThreadSanitizer sees the race without one acquire in
    `Collectives::compare_with`."""
    program = _built(tmp_path, [*_flags_of_sanitizer("thread"), "-DRINGWAY_BREAK_ACQUIRE"])
    done = _run(program, 2, 2, seed=1)
    assert done.returncode != 0
    assert "data race" in done.stderr
    assert "Collectives::compare_with" in done.stderr
