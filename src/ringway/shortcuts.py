"""The short cuts of one group: for each op what its backends offer, device by device (`Backend.quick`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ringway import _core
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

    def of(self, first: Backend, others: Iterable[Backend]) -> dict[str, ShortCut]:
        """By op: that of the tensors' device takes the call; what has no tensors is for the first backend only."""
        found: dict[str, ShortCut] = {}
        for backend in dict.fromkeys((first, *others)):
            quick = self._offered(backend)
            for op in _SHORT:
                cut = getattr(quick, op.name, None)
                if cut is not None and (op is not BARRIER or backend is first):
                    found[op.name] = either(found[op.name], cut) if op.name in found else cut
        return found

    def _offered(self, backend: Backend) -> Any:
        if backend not in self._quick:
            self._quick[backend] = quick = backend.quick(self._lane)
            if hasattr(quick, "failed"):
                quick.failed = self._failed
        return self._quick[backend]

    def clear(self) -> None:
        self._quick.clear()
