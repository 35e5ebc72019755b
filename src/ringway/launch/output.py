"""The output of the ranks of `ringway run`: whole lines, each with its rank, as they come. Nothing is kept."""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import IO, TextIO

from ringway.threads import start

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
"""A longer line is shown in pieces."""
_POLL = 0.05


class Output:
    """Shows the output of all ranks. Lines begin with their rank if they are `labelled`."""

    def __init__(self, labelled: bool = True, aside: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`aside` is entered while a line is written to a terminal."""
        self._labelled = labelled
        self._streams = _Shared(sys.stdout, aside), _Shared(sys.stderr, aside)
        self._threads: list[threading.Thread] = []
        self._ended = os.eventfd(0)
        """Readable once the ranks have ended."""

    def show(self, rank: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Show what a rank writes to these pipes until they end."""
        for pipe, stream in zip((stdout, stderr), self._streams, strict=True):
            arguments = pipe, self._ended, f"[rank {rank}] " if self._labelled else "", stream
            self._threads.append(start(f"ringway-output-{rank}", _pass_on, *arguments))

    def close(self, give_up: Callable[[], bool]) -> None:
        """The ranks have ended: show the rest of their output. The reader of the launcher's own output, such as a
        pager, may take its time, until `give_up` returns True."""
        os.eventfd_write(self._ended, 1)
        for thread in self._threads:
            while thread.is_alive():
                if give_up():
                    return
                thread.join(_POLL)
        os.close(self._ended)


class _Shared:
    """A stream that several threads write to, one whole line at a time."""

    def __init__(self, stream: TextIO, aside: Callable[[], AbstractContextManager[None]]) -> None:
        if isinstance(stream, io.TextIOWrapper):
            # A rank may print characters that the terminal's encoding lacks: escape them instead of failing.
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
        self._stream = stream
        self._aside = aside if stream.isatty() else nullcontext
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        # If nobody reads the launcher's output any more, the ranks go on, and their pipes must not fill up.
        with self._lock, self._aside(), suppress(OSError, ValueError):
            self._stream.write(text)


def _read(pipe: int, ended: int) -> Iterator[bytes]:
    """What is written to the pipe until it ends, or until the ranks have ended. A process that escaped its run may hold
    the pipe open, and even write to it: what the pipe holds at that time is the rest."""
    watched = select.poll()
    watched.register(pipe, select.POLLIN)
    watched.register(ended, select.POLLIN)
    while ended not in dict(watched.poll()):
        data = os.read(pipe, _CHUNK)
        if not data:
            return
        yield data
    rest = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
    while rest:
        data = os.read(pipe, min(rest, _CHUNK))
        rest -= len(data)
        yield data


def _pass_on(pipe: IO[bytes], ended: int, prefix: str, stream: _Shared) -> None:
    # A read may end in the middle of a character, or between \r and \n. A lone \r ends a line too (progress bars).
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    begun = ""
    with pipe:
        for data in _read(pipe.fileno(), ended):
            *lines, begun = (begun + decoder.decode(data)).split("\n")
            if len(begun) >= _LONGEST_LINE:
                lines.append(begun)
                begun = ""
            stream.write("".join(f"{prefix}{line}\n" for line in lines))
    begun += decoder.decode(b"", final=True)
    if begun:
        stream.write("".join(f"{prefix}{line}\n" for line in begun.removesuffix("\n").split("\n")))
