"""The output of the ranks of `ringway run`: whole lines, each with its rank, as they come. Nothing is kept."""

from __future__ import annotations

import codecs
import io
import os
import sys
import threading
import time
from contextlib import suppress
from typing import IO, TextIO

from ringway.threads import start

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
"""A longer line is shown in pieces."""
_PATIENCE = 5.0


class Output:
    """Shows the output of all ranks."""

    def __init__(self) -> None:
        self._streams = _Shared(sys.stdout), _Shared(sys.stderr)
        self._threads: list[threading.Thread] = []

    def show(self, rank: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Show what a rank writes to these pipes until they end."""
        for pipe, stream in zip((stdout, stderr), self._streams, strict=True):
            self._threads.append(start(f"ringway-output-{rank}", _pass_on, pipe, f"[rank {rank}] ", stream))

    def close(self) -> None:
        """Wait for the rest of the output. A process that escaped its run may hold a pipe open: do not wait for it."""
        end = time.monotonic() + _PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


class _Shared:
    """A stream that several threads write to, one whole line at a time."""

    def __init__(self, stream: TextIO) -> None:
        if isinstance(stream, io.TextIOWrapper):
            # A rank may print characters that the terminal's encoding lacks: escape them instead of failing.
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        # If nobody reads the launcher's output any more, the ranks go on, and their pipes must not fill up.
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(text)


def _pass_on(pipe: IO[bytes], prefix: str, stream: _Shared) -> None:
    # A read may end in the middle of a character, or between \r and \n. A lone \r ends a line too (progress bars).
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    begun = ""
    with pipe:
        while data := os.read(pipe.fileno(), _CHUNK):
            *lines, begun = (begun + decoder.decode(data)).split("\n")
            if len(begun) >= _LONGEST_LINE:
                lines.append(begun)
                begun = ""
            stream.write("".join(f"{prefix}{line}\n" for line in lines))
    begun += decoder.decode(b"", final=True)
    if begun:
        stream.write("".join(f"{prefix}{line}\n" for line in begun.removesuffix("\n").split("\n")))
