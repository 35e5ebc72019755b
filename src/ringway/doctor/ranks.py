"""The ranks of one host together: what each of them found, and how they share its CPUs and GPUs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ringway.doctor.finding import Finding, Findings, ok, warning
from ringway.doctor.place import Place

OF_A_PROCESS = frozenset(
    {"CPU quota", "descriptors", "locked memory", "host name", "gloo", "NCCL", "MPI", "MPI network"}
    | {"GPUs", "peer access"}
)
"""Subjects on which the ranks of a host may differ, as they depend on a process and its environment. Others are looked
at by the first rank of a host for all of them."""
_MOST_NAMED = 8
Thing = TypeVar("Thing", int, str)


def merge(found: Mapping[int, Sequence[Finding]], leader: int) -> list[Finding]:
    """What the ranks of a host found. A finding that not all of them have says whose it is."""
    ranks_of: dict[Finding, set[int]] = {}
    for rank in sorted(found, key=lambda rank: (rank != leader, rank)):
        for finding in found[rank]:
            if rank == leader or finding.subject in OF_A_PROCESS:
                ranks_of.setdefault(finding, set()).add(rank)
    subjects = list(dict.fromkeys(finding.subject for finding in ranks_of))
    merged = [
        finding
        if finding.subject not in OF_A_PROCESS or len(ranks) == len(found)
        else replace(finding, says=f"{_named(ranks)}: {finding.says}")
        for finding, ranks in ranks_of.items()
    ]
    return sorted(merged, key=lambda finding: subjects.index(finding.subject))


def sharing(places: Sequence[Place], environ: Mapping[str, str] = os.environ) -> Findings:
    """`places` are those of one host."""
    yield _cpus(places)
    yield from _gpus(places, environ)


def _cpus(places: Sequence[Place]) -> Finding:
    ranks, allowed = len(places), {cpu for place in places for cpu in place.cpus}
    usable: float = len(allowed)
    says = f"{len(allowed)} of {os.cpu_count() or 1}"
    quota = _quota(places)
    if quota is not None and quota < usable:
        usable = quota
        says += f", {quota:g} by the quota"
    if ranks == 1:
        return ok("CPUs", says)
    says += f", for {ranks} ranks"
    if ranks > usable:
        advice = "Start fewer ranks a host, or widen the affinity (taskset, Slurm: --cpus-per-task) or the quota"
        return warning("CPUs", f"{says}: ranks take turns and sleep instead of spin", advice)
    crowded = _sharers({place.rank: place.cpus for place in places})
    if crowded:
        listed = "; ".join(f"{_named(sharers)} may use CPU {cpu} only" for cpu, sharers in crowded.items())
        advice = "Bind each rank to CPUs of its own (ringway run --bind core), or none"
        return warning("CPUs", f"{says}: {listed}, and take turns", advice)
    return ok("CPUs", says)


def _quota(places: Sequence[Place]) -> float | None:
    """How many CPUs the ranks may use together; None if the time of one of them is not limited."""
    by_cgroup: dict[float, float] = {}
    for place in places:
        if place.quota is None:
            return None
        by_cgroup[place.quota[0]] = place.quota[1]
    return sum(by_cgroup.values())


def _gpus(places: Sequence[Place], environ: Mapping[str, str]) -> Findings:
    seen = {place.rank: place.gpus for place in places if place.gpus}
    count = len({gpu for gpus in seen.values() for gpu in gpus})
    if len(seen) > count:
        says = f"{len(seen)} ranks share {count}"
    else:
        says = "; ".join(f"{_named(ranks)} share GPU {gpu}" for gpu, ranks in _sharers(seen).items())
    mps = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()
    if says and mps:
        yield ok("GPU sharing", f"{says}, through MPS")
    elif says:
        advice = "Give each rank a GPU of its own, or start nvidia-cuda-mps-control -d before the job"
        yield warning("GPU sharing", f"{says}, and their kernels take turns", advice)
    elif mps and seen:
        yield ok("GPU sharing", "MPS runs")


def _sharers(usable: Mapping[int, Collection[Thing]]) -> dict[Thing, list[int]]:
    """The ranks that may use one thing only, and have it in common with others, by that thing."""
    bound: dict[Thing, list[int]] = {}
    for rank, things in usable.items():
        if len(things) == 1:
            bound.setdefault(next(iter(things)), []).append(rank)
    return {thing: ranks for thing, ranks in bound.items() if len(ranks) > 1}


def _named(ranks: Collection[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
