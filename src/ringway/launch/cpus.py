"""Which CPUs this process may use, and how they are arranged: cores with their hardware threads, in NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import ringway._core as _core

ROOT = Path("/")
"""The root of the file system. Tests pass one of their own."""


def usable_cpus() -> int:
    """Those of its affinity, or fewer if its container has a quota (docker's --cpus)."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many CPUs the container may use at a time; None without a quota."""
    quota = _core.cpu_quota("" if root == ROOT else str(root))
    return None if quota is None else quota[1]


@dataclass(frozen=True)
class Core:
    """A core: its NUMA node, and those of its hardware threads that may be used."""

    node: int
    cpus: tuple[int, ...]


def cores(allowed: Collection[int], root: Path = ROOT) -> list[Core]:
    """The cores with these CPUs, node by node. Without sysfs, each CPU is a core, and there is one node."""
    node_of = {cpu: node for node, cpus in numa_nodes(root).items() for cpu in cpus}
    found: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _cpu_list(topology / "thread_siblings_list") or {cpu}
        found.setdefault((node_of.get(cpu, 0), min(siblings)), []).append(cpu)
    return [Core(node, tuple(cpus)) for (node, _), cpus in sorted(found.items())]


def numa_nodes(root: Path = ROOT) -> dict[int, set[int]]:
    """The NUMA nodes and their CPUs. Nodes that are only memory have none."""
    paths = (root / "sys/devices/system/node").glob("node[0-9]*")
    return {int(path.name.removeprefix("node")): _cpu_list(path / "cpulist") for path in paths}


def _cpu_list(path: Path) -> set[int]:
    """A list like `0-3,8`, as the kernel writes it. Empty if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    ends = [part.partition("-")[::2] for part in text.split(",") if part]
    return {cpu for first, last in ends for cpu in range(int(first), int(last or first) + 1)}
