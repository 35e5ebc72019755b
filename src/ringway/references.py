"""References with unusual lifetimes."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any


def weak_method(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Holds the method weakly: the caller may outlive its object. Does nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        found = reference()
        if found is not None:
            found(argument)

    return call


def never_destroy(what: object) -> None:
    """For objects whose destructor would wait for threads that never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))
