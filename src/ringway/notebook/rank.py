"""One rank of a notebook: runs cells until the notebook ends. `ringway run` starts it.

Its arguments are the path of the notebook's socket and, if the user named one, the backend.
"""

from __future__ import annotations

import ast
import io
import linecache
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

import ringway as dist
from ringway.groups.world import world
from ringway.notebook.channel import TOKEN, Channel, Unreadable, introduce


class _Interrupt:
    """Ctrl-C in a cell. A message that is being sent is completed first: half of one would end the connection."""

    def __init__(self) -> None:
        self.in_cell = self._sending = self._held_back = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        # Python may call this after the cell has ended, for a signal that came before.
        if self.in_cell and not self._sending:
            raise KeyboardInterrupt
        self._held_back = self.in_cell

    @contextmanager
    def after_this(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # signals do not reach it
            yield
            return
        self._sending = True
        try:
            yield
        finally:
            self._sending = False
            if self._held_back:
                self._held_back = False
                raise KeyboardInterrupt


_interrupt = _Interrupt()


class _Stream(io.TextIOBase):
    """Sends what the cell prints to the notebook, line by line."""

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self._name, self._line = channel, name, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        lines = (self._line + text).splitlines(keepends=True)
        self._line = lines.pop() if lines and not lines[-1].endswith("\n") else ""
        if lines:
            with _interrupt.after_this():
                self._channel.send("text", self._name, "".join(lines))
        return len(text)

    def end_line(self) -> None:
        if self._line:
            self.write("\n")


def main() -> None:
    signal.signal(signal.SIGINT, _interrupt.handle)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(sys.argv[1])
        token = bytes.fromhex(os.environ.pop(TOKEN))
        channel = introduce(connection, token, int(os.environ["RANK"]))
        streams = _Stream(channel, "stdout"), _Stream(channel, "stderr")
        sys.stdout, sys.stderr = streams
        try:
            channel.send("started", os.getpid(), _join())
            _serve(channel, streams)
        except OSError:
            pass  # the notebook has ended


def _join() -> str | None:
    """Joins a group of all ranks, instead of an earlier one. The traceback if that fails."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_distributed(*sys.argv[2:], verbose=False)
    except Exception:
        return traceback.format_exc()
    names = {"dist": dist, "torch": torch, "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    sys.modules["__main__"].__dict__.update(names)
    return None


def _is_in_order(error: BaseException | None) -> bool:
    """Whether the group of all ranks can go on after a cell that ended with this error. An interrupted call ends its
    group, which its rank may learn at the next call only."""
    if isinstance(error, KeyboardInterrupt) or not dist.is_initialized():
        return False
    return world.communicator(None).health.fault is None


def _serve(channel: Channel, streams: tuple[_Stream, _Stream]) -> None:
    namespace = sys.modules["__main__"].__dict__
    actions: dict[str, Callable[..., Any]] = {
        "run": lambda code, name: _run(code, name, namespace),
        "pull": lambda expression: eval(expression, namespace),
        "push": namespace.update,
        "join": _join,
        "refuse": _refuse,
    }
    while True:
        try:
            what, *arguments = channel.receive()
        except Unreadable as error:
            what, arguments = "refuse", [error]
        failed: BaseException | None = None
        value = None
        try:
            signal.signal(signal.SIGINT, _interrupt.handle)  # the last cell may have changed it
            _interrupt.in_cell = True
            try:
                value = actions[what](*arguments)
            finally:
                _interrupt.in_cell = False
        except BaseException as error:
            failed = error
        _interrupt.in_cell = False  # again, because Ctrl-C may have come just before it was set
        for stream in streams:
            stream.end_line()
        in_order = _is_in_order(failed)
        try:
            channel.send("done", failed and _told(failed), value, in_order)
        except OSError:
            raise  # the notebook has ended
        except Exception as error:  # whatever pickling the value raises
            channel.send("done", _told(error), None, in_order)


def _refuse(error: Exception) -> None:
    raise error


def _run(code: str, name: str, namespace: dict[str, Any]) -> str | None:
    """The text of the last expression's value, if the cell ends with one."""
    lines = code.splitlines(keepends=True)
    linecache.cache[name] = (len(code), None, lines, name)  # so that tracebacks show the lines
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec"), namespace)
        return None
    del tree.body[-1]
    exec(compile(tree, name, "exec"), namespace)
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None if value is None else repr(value)


def _told(error: BaseException) -> str:
    """The traceback without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


if __name__ == "__main__":
    main()
