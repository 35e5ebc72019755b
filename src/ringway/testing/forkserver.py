"""The process that ranks are forked from.

It imports torch once, so that a new rank costs a fork instead of two seconds. It has one thread and starts none,
answers one request at a time on a socket, and ends with its ranks when that socket closes: nothing is left behind,
however the parent dies.

Requests are pickled tuples, one message each:

    ("fork", None), with two file descriptors (control socket, output file)  ->  the rank's pid
    ("reap", pid)                                                            ->  its wait status
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
from collections.abc import Sequence
from typing import NoReturn

MESSAGE_BYTES = 65536
_PR_SET_PDEATHSIG = 1


def main(parent_fd: int, preload: Sequence[str]) -> NoReturn:
    """Serve until the parent is gone."""
    parent = socket.socket(fileno=parent_fd)
    for name in preload:
        importlib.import_module(name)
    importlib.import_module("ringway.testing.rank")
    gc.collect()
    gc.freeze()  # so that garbage collection in a rank does not copy the pages shared with this process
    parent.send(pickle.dumps("ready"))
    children: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(parent, MESSAGE_BYTES, 2)
        if not message:
            break
        kind, argument = pickle.loads(message)
        if kind == "fork":
            answer = _fork(parent, fds)
            children.add(answer)
        else:
            _, answer = os.waitpid(argument, 0)
            children.discard(argument)
        parent.send(pickle.dumps(answer))
    for pid in children:
        os.killpg(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)  # extension modules would report the frozen objects as leaks


def _fork(parent: socket.socket, fds: list[int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        _join_own_process_group(pid)
        for fd in fds:
            os.close(fd)
        return pid
    try:
        die_with_parent(server)
        _join_own_process_group(0)
        parent.close()
        from ringway.testing.rank import serve

        serve(socket.socket(fileno=fds[0]), fds[1])
    finally:
        os._exit(70)  # reached only after an error; a rank exits through its own os._exit


def _join_own_process_group(pid: int) -> None:
    """Called on both sides of the fork, so that it takes effect whichever side runs first."""
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        return


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(71)
