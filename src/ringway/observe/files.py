"""Files of ours: whole or not at all, and never the end of a training."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import suppress


def write_whole(path: str | os.PathLike[str], parts: Iterable[bytes]) -> bool:
    """Writes aside and renames, so that nobody reads half a file. What cannot be written is a warning: a full disk
    must not end a job. Whether it was written."""
    target = os.fspath(path)
    aside = f"{target}.{os.getpid()}.part"
    try:
        with open(aside, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except OSError as error:
        warnings.warn(f"ringway could not write {target}: {error.strerror or error}", stacklevel=3)
        with suppress(OSError):
            os.unlink(aside)
        return False
    return True
