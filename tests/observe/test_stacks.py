"""Stacks are read with the GIL and without: whatever the threads do at that moment, the process survives and
answers."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ringway._core as _core

CHURN = """
import faulthandler, os, sys, threading, time
from ringway import _core
from ringway.observe.stall.watch import stacks_text
faulthandler.enable()
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
    texts.append(READ())
ended = True
for thread in busy: thread.join()
try:
    left = os.waitpid(-1, os.WNOHANG | 0x40000000)
except ChildProcessError:
    left = None
print(len(texts), sum("in churn" in text for text in texts), left)
"""


@pytest.mark.processes
@pytest.mark.parametrize("reader", ["_core.stacks_of_a_copy", "stacks_text"])
def test_threads_that_come_and_go_do_not_crash_the_reader(reader: str) -> None:
    churn = CHURN.replace("READ", reader)
    ended = subprocess.run([sys.executable, "-c", churn], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    read, whole, left = ended.stdout.split()
    assert int(read) >= 10
    assert int(whole) >= int(read) // 4
    assert left == "None", "a copy was not reaped"


def test_the_stack_of_each_thread_is_reported() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    text = ""
    for _ in range(10):  # a copy that takes longer than two seconds is killed
        text = _core.stacks_of_a_copy()
        if "in test_the_stack_of_each_thread_is_reported" in text:
            break
    release.set()
    thread.join()
    assert text.count("Thread 0x") + text.count("Current thread 0x") >= 2
    assert Path(__file__).name in text
    assert "in test_the_stack_of_each_thread_is_reported" in text
