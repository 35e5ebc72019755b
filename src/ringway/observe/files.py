"""Writes files atomically, without ever stopping training."""

from __future__ import annotations

import os
import secrets
import stat
import warnings
from collections.abc import Iterable
from contextlib import suppress


def replace_whole(path: str | os.PathLike[str], parts: Iterable[bytes]) -> None:
    """Write to a new file and rename it, so that no reader sees half a file, and no link is followed that another user
    has placed there."""
    target = os.fspath(path)
    aside = f"{target}.{secrets.token_hex(8)}.part"
    try:
        with open(aside, "xb") as file:
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


def _own_link(path: str) -> bool:
    """Whether the path is a link that this user made, or the system, such as /dev/stdout."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(facts.st_mode) and facts.st_uid in (0, os.geteuid())


def append_whole(path: str, text: bytes) -> None:
    """Append all of the text, or nothing if the disk is full. Links of other users are not followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    fd = os.open(path, flags | (0 if _own_link(path) else os.O_NOFOLLOW), 0o666)
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
