"""Telling somebody whom that must not keep alive."""

from __future__ import annotations

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
