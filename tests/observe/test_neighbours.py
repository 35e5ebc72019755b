"""Which processes a rank can look up in its own process table."""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from ringway.observe.stall.peers import Address


def _address(pid: int) -> Address:
    return Address(1, "host", "127.0.0.1", 1, "token", pid)


def _ended() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_only_processes_of_this_kernel_are_looked_up() -> None:
    assert _address(_ended()).seems_gone()
    assert not _address(os.getpid()).seems_gone()
    # Another host: its first PID namespace has the same number as this one's, and its name may be the same.
    elsewhere = replace(_address(_ended()), namespace="another-boot " + os.readlink("/proc/self/ns/pid"))
    assert not elsewhere.seems_gone()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOENT])
def test_a_process_that_cannot_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """No descriptor is left, or /proc hides the processes of other users."""

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("builtins.open", refuse)
    assert not _address(os.getpid()).seems_gone()
