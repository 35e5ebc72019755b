"""The fast paths of one group: what its backends offer, op by op."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import ringway._core as _core
from ringway.backends.base import Backend, Health
from ringway.call import BARRIER, OPS, Reduce

Run = Callable[[int, Any, Any, int, int, bool], bool]
Start = Callable[[int, Any, Any, int, Reduce, int], Any]
_NO_RUNS: tuple[tuple[Run, ...], ...] = ((),) * len(OPS)
_NO_STARTS: tuple[tuple[Start, ...], ...] = ((),) * len(OPS)


class FastPaths:
    """A backend is asked for its paths once. They are open while the group is healthy and no listener sees calls."""

    def __init__(self, record: _core.GroupRecord) -> None:
        self._record = record
        self._offered: dict[Backend, list[_core.FastPath]] = {}
        self.by_op = _NO_RUNS
        """By the op's code: the `run` of each path to try, in order. The first device's come first, so a group of
        several devices costs them nothing more."""
        self.starts = _NO_STARTS
        """By the op's code: the `start` of each path that takes asynchronous calls."""
        self.streams: dict[int, _core.StreamFastPath] = {}
        """By the op's code: the path that takes a bridge's calls."""
        self.changed: Callable[[], object] = lambda: None
        """Called when `streams` has changed."""

    def open(self, backends: Iterable[Backend], health: Health) -> None:
        """Opens the paths of these backends, the first device's first. A barrier has no device: it is the first's."""
        by_op: list[list[Run]] = [[] for _ in OPS]
        starts: list[list[Start]] = [[] for _ in OPS]
        streams: dict[int, _core.StreamFastPath] = {}
        for number, backend in enumerate(backends):
            if backend not in self._offered:
                # Weakly: the group's health holds its paths.
                self._offered[backend] = list(backend.fast_paths(self._record, weakref.proxy(health)))
            for path in self._offered[backend]:
                for op in OPS:
                    if path.has(op.code) and not (op is BARRIER and number):
                        by_op[op.code].append(path.run)
                        if type(path).start is not _core.FastPath.start:
                            starts[op.code].append(path.start)
                        if isinstance(path, _core.StreamFastPath):
                            streams.setdefault(op.code, path)
        self.by_op = tuple(tuple(paths) for paths in by_op)
        self.starts = tuple(tuple(paths) for paths in starts)
        self._set_streams(streams)

    def _set_streams(self, streams: dict[int, _core.StreamFastPath]) -> None:
        if streams != self.streams:
            self.streams = streams
            self.changed()

    def close(self) -> None:
        self.by_op, self.starts = _NO_RUNS, _NO_STARTS
        self._set_streams({})

    def clear(self) -> None:
        """The group is over: the paths go with its backends."""
        self.close()
        self._offered.clear()
