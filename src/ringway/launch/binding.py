"""`ringway run --bind`: which CPUs each rank of this host runs on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from ringway.launch.cpus import ROOT, Core, cores, cpu_quota

BINDINGS = ("core", "numa", "none")


@dataclass(frozen=True)
class Binding:
    """The CPUs of one rank, and how many threads they have room for: one for each core."""

    cpus: frozenset[int]
    threads: int


def bindings(how: str, ranks: int, allowed: Collection[int] | None = None, root: Path = ROOT) -> list[Binding] | None:
    """The binding of each rank of this host, or None if `how` is none.

    A rank never spans two NUMA nodes unless it gets whole ones. `core`: the ranks of a node divide its cores, each with
    all its hardware threads. If there are fewer cores than ranks, they divide the hardware threads, and if there are
    fewer of those, they share them. `numa`: all ranks of a node use all its cores. `allowed` are the CPUs to divide:
    those of this process.
    """
    if how == "none":
        return None
    found = cores(os.sched_getaffinity(0) if allowed is None else allowed, root)
    shares = [
        share
        for node, members in _ranks_by_nodes(found, ranks)
        for share in (_divided(node, members) if how == "core" else [_cpus(node)] * members)
    ]
    together = Counter(shares)
    quota = cpu_quota(root)
    most = len(found) if quota is None else quota / ranks
    return [
        Binding(share, max(1, int(min(most, sum(not share.isdisjoint(core.cpus) for core in found) / together[share]))))
        for share in shares
    ]


def _ranks_by_nodes(found: Sequence[Core], ranks: int) -> Iterator[tuple[list[Core], int]]:
    """The cores of a node, or of several, and how many ranks get them. Nodes get ranks in proportion to their cores."""
    nodes = [list(members) for _, members in groupby(found, key=lambda core: core.node)]
    if ranks < len(nodes):
        for rank in range(ranks):
            share = nodes[rank * len(nodes) // ranks : (rank + 1) * len(nodes) // ranks]
            yield [core for node in share for core in node], 1
        return
    numbers = [number for number, node in enumerate(nodes) for _ in node]
    members = Counter(numbers[(2 * rank + 1) * len(numbers) // (2 * ranks)] for rank in range(ranks))
    yield from ((nodes[number], members[number]) for number in sorted(members))


def _divided(node: Sequence[Core], ranks: int) -> list[frozenset[int]]:
    threads = [Core(core.node, (cpu,)) for core in node for cpu in core.cpus]
    units = node if len(node) >= ranks else threads
    first = [rank * len(units) // ranks for rank in range(ranks + 1)]
    return [_cpus(units[start : max(end, start + 1)]) for start, end in pairwise(first)]


def _cpus(some: Sequence[Core]) -> frozenset[int]:
    return frozenset(cpu for core in some for cpu in core.cpus)


@contextmanager
def bound(binding: Binding | None) -> Iterator[None]:
    """Processes that this thread starts inside run on these CPUs."""
    if binding is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, binding.cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
