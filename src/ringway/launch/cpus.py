"""How many CPUs this process may use."""

from __future__ import annotations

import os

import ringway._core as _core


def usable_cpus() -> int:
    """Those of its affinity, or fewer if its container has a quota (docker's --cpus)."""
    allowed, quota = len(os.sched_getaffinity(0)), _core.cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota[1])))
