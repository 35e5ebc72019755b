"""The short cuts of one group: for each op what its backends offer, device by device (`Backend.quick`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ringway._core as _core
from ringway.backends.base import Backend, either
from ringway.call import (
    ALL_GATHER,
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_SINGLE,
    SCATTER,
    SEND,
)

ShortCut = Callable[..., int]

_SHORT = (
    ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, ALL_GATHER_SINGLE, GATHER, SCATTER, REDUCE_SCATTER,
    REDUCE_SCATTER_SINGLE, ALL_TO_ALL_SINGLE, BARRIER, SEND, RECV,
)  # fmt: skip
"""The ops that a backend may have a short cut for."""


class ShortCuts:
    """What was offered is kept: a backend is asked once."""

    def __init__(self, lane: _core.Lane, failed: Callable[[BaseException], None]) -> None:
        self._lane = lane
        self._failed = failed
        self._quick: dict[Backend, Any] = {}

    def of(self, first: Backend, others: Iterable[Backend]) -> tuple[dict[str, ShortCut], dict[int, ShortCut]]:
        """By op; and by the `id` of a short cut what to ask when it has not taken the call: its tensors may be another
        device's. So the first device's costs nothing more. What has no tensors is for the first backend only."""
        found: dict[str, ShortCut] = {}
        instead: dict[int, ShortCut] = {}
        for backend in dict.fromkeys((first, *others)):
            quick = self._offered(backend)
            for op in _SHORT:
                cut = getattr(quick, op.name, None)
                if cut is None or (op is BARRIER and backend is not first):
                    continue
                asked_first = id(found.setdefault(op.name, cut))
                if found[op.name] is not cut:
                    instead[asked_first] = either(instead[asked_first], cut) if asked_first in instead else cut
        return found, instead

    def _offered(self, backend: Backend) -> Any:
        if backend not in self._quick:
            self._quick[backend] = quick = backend.quick(self._lane)
            if hasattr(quick, "failed"):
                quick.failed = self._failed
        return self._quick[backend]

    def clear(self) -> None:
        self._quick.clear()
