"""How long things live: not longer for being told something, and beyond the interpreter where that is safer."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """The method, as long as its object lives: whoever tells may live longer."""
    known = weakref.WeakMethod(method)

    def tell(what: Any) -> None:
        found = known()
        if found is not None:
            found(what)

    return tell


def keep_for_ever(what: object) -> None:
    """For what must not be destroyed in this process: its end would wait for threads that do not come."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))
