"""`ringway bench` with one more backend: shm, with a part of each collective's own time added to it.

    RINGWAY_BENCHMARK_DELAY=0.2 ringway run -n 2 benchmarks/delayed_bench.py bench --backends delayed --ops all_reduce

`compare_agrees.py` uses it to plant a delay. Without the variable there is none.
"""

from __future__ import annotations

import math
import os
import time

import ringway
from ringway.backends.base import GroupInfo
from ringway.backends.shm.backend import ShmBackend
from ringway.call import Call
from ringway.cli import main
from ringway.work import Handle

NAME, DELAY = "delayed", "RINGWAY_BENCHMARK_DELAY"
SHARE = float(os.environ.get(DELAY, "0"))


class DelayedBackend(ShmBackend):
    name = NAME

    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self._own_times: dict[tuple[str, int], float] = {}
        """The shortest by op and size: longer ones contain the delays of other ranks, and of other programs."""

    def fast_paths(self, record: object, health: object) -> tuple[()]:
        """They would pass by the delay."""
        return ()

    def _start(self, call: Call) -> Handle:
        began = time.perf_counter()
        handle = super()._start(call)
        end = time.perf_counter()
        what = call.op.name, sum(tensor.nbytes for tensor in call.inputs)
        own = self._own_times[what] = min(end - began, self._own_times.get(what, math.inf))
        until = end + SHARE * own
        while time.perf_counter() < until:
            pass
        return handle


if __name__ == "__main__":
    ringway.register_backend(NAME, DelayedBackend)
    main()
