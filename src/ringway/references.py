"""References with unusual lifetimes."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def weak_method(method: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    """Holds the method weakly: the caller may outlive its object. Does nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result | None:
        found = reference()
        return None if found is None else found(*arguments, **named)

    return call


def never_destroy(what: object) -> None:
    """For objects whose destructor would wait for threads that never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))
