"""Our own traffic is not part of what we measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ringway._core as _core


@contextmanager
def quiet() -> Iterator[None]:
    """Calls that this thread issues meanwhile are recorded, but not logged."""
    before = _core.is_quiet()
    _core.set_quiet(True)
    try:
        yield
    finally:
        _core.set_quiet(before)
