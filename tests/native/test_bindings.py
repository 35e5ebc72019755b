"""The extension under AddressSanitizer: tests in Python, run once more on a core that is built with it.

They end groups on their own threads, with messages pending and on several threads at once, and call groups in signal
handlers. ThreadSanitizer would need a Python and a torch that are built with it, so it sees the engine alone
(`test_stress.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "address"
TESTS = ("tests/backends/test_shm_ends.py", "tests/backends/test_shm_signals.py")
FLAGS = "-fsanitize=address -O1 -g -fno-omit-frame-pointer"
pytestmark = [pytest.mark.sanitizers, pytest.mark.timeout(2400)]

# An editable install finds ringway before PYTHONPATH does.
_NOT_THE_EDITABLE_ONE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""


def _library(name: str) -> str:
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return os.path.realpath(found.stdout.strip())


def _built() -> Path:
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None"]
    configure += [f"-DCMAKE_CXX_FLAGS={FLAGS}", f"-DPython_EXECUTABLE={sys.executable}"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in (configure, ["cmake", "--build", str(BUILD)]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (core,) = BUILD.glob("_core*.so")
    return core


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which Python imports this ringway, on a core with AddressSanitizer."""
    folder = tmp_path_factory.mktemp("address")
    package = folder / "ringway"
    package.mkdir()
    for part in (ROOT / "src" / "ringway").iterdir():
        if not part.name.startswith("_core.c"):
            (package / part.name).symlink_to(part)
    core = _built()
    shutil.copy(core, package)
    (folder / "sitecustomize.py").write_text(_NOT_THE_EDITABLE_ONE)
    options = "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:abort_on_error=1"
    # The C++ runtime is named, too: exceptions are intercepted only if it is there when the sanitizer starts.
    preloaded = f"{_library('libasan.so')}:{_library('libstdc++.so.6')}"
    return {**os.environ, "PYTHONPATH": str(folder), "LD_PRELOAD": preloaded, "ASAN_OPTIONS": options}


def _run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )


def test_the_ends_of_groups_and_signal_handlers(environment: dict[str, str]) -> None:
    done = _run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "AddressSanitizer" not in done.stdout + done.stderr


def test_a_read_past_the_end_is_found(environment: dict[str, str]) -> None:
    """Shows that the test above can fail: the core reads one element more than there is."""
    program = (
        "import array, torch\n"
        "import ringway._core as core\n"
        "from ringway.call import DTYPE_CODE\n"
        "values, code = array.array('f', [1.0] * 1000), DTYPE_CODE[torch.float32]\n"
        "core.pack_measure((0, 0, 0), (values.buffer_info()[0], code), (0, code), 1001, 1)\n"
    )
    done = _run(environment, "-c", program)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]
