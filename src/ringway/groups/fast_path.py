"""The fast paths of one group: what its backends offer, op by op."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import ringway._core as _core
from ringway.backends.base import Backend, Health
from ringway.call import BARRIER, OPS
from ringway.work import Work

Run = Callable[[int, Any, Any, int, bool, int, int], Work | bool]


class FastPaths(_core.PathTable):
    """A backend is asked for its paths once. They are open while the group is healthy and no listener sees calls."""

    def __init__(self, record: _core.GroupRecord) -> None:
        super().__init__()
        self._record = record
        self._offered: dict[Backend, list[_core.FastPath]] = {}
        self.streams: dict[int, _core.FastPath] = {}
        """By the op's code: the path that takes a bridge's calls, with torch's options."""
        self.changed: Callable[[], object] = lambda: None
        """Called when `streams` has changed."""

    def open(self, backends: Iterable[Backend], health: Health) -> None:
        """Opens the paths of these backends, the first device's first. A barrier has no device: it is the first's."""
        # By the op's code: the `run` of each path to try, in order. The first device's come first, so a group of
        # several devices costs them nothing more.
        by_op: list[list[Run]] = [[] for _ in OPS]
        async_by_op: list[list[Run]] = [[] for _ in OPS]
        streams: dict[int, _core.FastPath] = {}
        for number, backend in enumerate(backends):
            if backend not in self._offered:
                # Weakly: the group's health holds its paths.
                self._offered[backend] = list(backend.fast_paths(self._record, weakref.proxy(health)))
            for path in self._offered[backend]:
                for op in OPS:
                    if path.has(op.code) and not (op is BARRIER and number):
                        by_op[op.code].append(path.run)
                        if path.has_async(op.code):
                            async_by_op[op.code].append(path.run)
                        if path.takes_options:
                            streams.setdefault(op.code, path)
        self.set(tuple(tuple(paths) for paths in by_op), tuple(tuple(paths) for paths in async_by_op))
        self._set_streams(streams)

    def _set_streams(self, streams: dict[int, _core.FastPath]) -> None:
        if streams != self.streams:
            self.streams = streams
            self.changed()

    def close(self) -> None:
        self.clear()
        self._set_streams({})

    def forget(self) -> None:
        """The group is over: the paths go with its backends."""
        self.close()
        self._offered.clear()
