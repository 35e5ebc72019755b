"""Writes files atomically, without ever stopping training."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import suppress


def replace_whole(path: str | os.PathLike[str], parts: Iterable[bytes]) -> None:
    """Write to a temporary file and rename it, so that no reader sees half a file."""
    target = os.fspath(path)
    aside = f"{target}.{os.getpid()}.part"
    try:
        with open(aside, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise


def write_whole(path: str | os.PathLike[str], parts: Iterable[bytes]) -> bool:
    """The same from inside a job: a failure is only a warning, because a full disk must not stop training. Returns
    whether the file was written."""
    try:
        replace_whole(path, parts)
    except OSError as error:
        warnings.warn(f"ringway could not write {os.fspath(path)}: {error.strerror or error}", stacklevel=3)
        return False
    return True


def append_whole(path: str, text: bytes) -> None:
    """Append all of the text, or nothing if the disk is full."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        before, left = os.fstat(fd).st_size, memoryview(text)
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            os.ftruncate(fd, before)
            raise
    finally:
        os.close(fd)


def filled(path: str, rank: int) -> str:
    """The user's path with this process's `{rank}` and `{pid}` filled in; other braces are left alone."""
    return path.replace("{rank}", str(rank)).replace("{pid}", str(os.getpid()))
