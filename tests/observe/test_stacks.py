"""Stacks are read with the GIL and without: whatever the threads do at that moment, the process survives and
answers."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ringway._core as _core

CHURN = """
import faulthandler, os, signal, sys, threading, time
from ringway import _core
from ringway.observe.stall.watch import stacks_text
faulthandler.enable()
by_signal = ()
if not _core.dumps_stacks():
    by_signal = signal.SIGRTMAX - 2, os.memfd_create("stacks")
    faulthandler.register(by_signal[0], file=by_signal[1], all_threads=True)
ended = False

def deep(left):
    return sum(deep(left - 1) for _ in range(1)) if left else 0

def churn():
    while not ended:
        threads = [threading.Thread(target=deep, args=(30,)) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()

sys.setswitchinterval(1e-5)
busy = [threading.Thread(target=churn) for _ in range(2)]
for thread in busy: thread.start()
texts = []
until = time.monotonic() + 60
while len(texts) < 150 and time.monotonic() < until:
    texts.append(READ)
ended = True
for thread in busy: thread.join()
try:
    left = os.waitpid(-1, os.WNOHANG | 0x40000000)
except ChildProcessError:
    left = None
print(len(texts), sum("in churn" in text for text in texts), left)
"""


@pytest.mark.processes
@pytest.mark.parametrize("reader", ["_core.stacks_of_a_copy(*by_signal)", "stacks_text()"])
def test_threads_that_come_and_go_do_not_crash_the_reader(reader: str) -> None:
    churn = CHURN.replace("READ", reader)
    ended = subprocess.run([sys.executable, "-c", churn], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    read, whole, left = ended.stdout.split()
    assert int(read) >= 10
    assert int(whole) >= int(read) // 10
    assert left == "None", "a copy was not reaped"


@contextmanager
def _by_signal() -> Iterator[tuple[int, ...]]:
    """The signal and the file that a copy needs where the interpreter does not export its stack dump (from 3.13 on)."""
    if _core.dumps_stacks():
        yield ()
        return
    number, fd = signal.SIGRTMAX - 3, os.memfd_create("stacks")
    faulthandler.register(number, file=fd, all_threads=True)
    yield number, fd
    faulthandler.unregister(number)
    os.close(fd)


def test_the_stack_of_each_thread_is_reported() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    text = ""
    with _by_signal() as how:
        for _ in range(10):  # a copy that takes longer than two seconds is killed
            text = _core.stacks_of_a_copy(*how)
            if "in test_the_stack_of_each_thread_is_reported" in text:
                break
    release.set()
    thread.join()
    assert text.count("Thread 0x") + text.count("Current thread 0x") >= 2
    assert Path(__file__).name in text
    assert "in test_the_stack_of_each_thread_is_reported" in text
