"""Threads of C++ that ask a job's store, which may be written in Python, until the process ends."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from exits import run_alone
from programs import ended_with
from ringway.testing import RankPool

SOURCE = Path(__file__).with_name("monitor.cpp")
PROGRAM = """
import ctypes, time
from ringway.groups.world import world
from ringway.keys import Key
from ringway.store import KeyedStore

world.store = KeyedStore(HashStore(), Key.from_text("5" * 64, "here"))
library = ctypes.PyDLL({library!r})
library.watch.argtypes = [ctypes.py_object]
library.watch(world.store)

class Slow:  # deleted while the interpreter is finalized
    def __del__(self, sleep=time.sleep):
        sleep(0.2)

slow = Slow()
raise SystemExit(3)
"""


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_monitor_that_asks_a_python_store_does_not_crash_the_exit(pool: RankPool, tmp_path: Path) -> None:
    """Before it was left behind, this ended with SIGABRT in one of three runs."""
    library = tmp_path / "monitor.so"
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([*compiler, SOURCE, "-o", library], check=True, timeout=100)
    for _ in range(3):
        ended = run_alone(pool, PROGRAM.format(library=str(library)), "shm")
        assert ended_with(ended, 3), ended
