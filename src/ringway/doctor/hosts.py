"""Between hosts: names, connections in both directions, clocks and versions. Every rank of a job takes part.

Every rank examines its process, and the first on each host examines the host and tries to connect to the others. What
the ranks say reaches rank 0 through the job's store, whose ranks have proved that they belong to the job.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch.distributed as c10d

from ringway.doctor.finding import Finding, error, ok, warning
from ringway.doctor.gpus import Card
from ringway.doctor.place import Place, findings_as_text, own_place, read_findings, read_place
from ringway.doctor.ranks import merge, sharing
from ringway.launch.info import LaunchInfo
from ringway.launch.ports import address_towards
from ringway.observe.trace.clock import answer, ask

_CONNECT_SECONDS = 3.0
_AT_ONCE = 64
_CLOCK_SECONDS = 0.5
_VERSIONS = {"ringway": error, "torch": error, "NCCL": error, "Python": warning, "NVIDIA driver": warning}
"""Of what all ranks should have the same, and how bad it is if they have not."""


def compare_hosts(
    store: c10d.Store, info: LaunchInfo, own: Sequence[Finding], cards: Sequence[Card], seconds: float
) -> list[Finding] | None:
    """All findings, on rank 0; None on the others. `own` are those of this rank, `cards` the GPUs of this host."""
    shared = c10d.PrefixStore("ringway/doctor", store)
    limit = timedelta(seconds=seconds)
    with _listening(info) as (address, port):
        here = own_place(info.rank, cards, address, port)
        shared.set(f"own/{info.rank}", findings_as_text(own))
        shared.set(f"place/{info.rank}", here.as_text())  # after what the leader reads when it has the places
        shared.wait([f"place/{rank}" for rank in range(info.size)], limit)
        places = [read_place(shared.get(f"place/{rank}"), rank) for rank in range(info.size)]
        leaders = _leaders(places)
        if info.rank in leaders:
            neighbours = [place for place in places if place.network == here.network]
            found = {place.rank: read_findings(shared.get(f"own/{place.rank}"), place.rank) for place in neighbours}
            others = [places[rank] for rank in leaders if rank != info.rank]
            # At the same time: a firewall or a name server may let each wait for seconds.
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                reached = list(pool.map(lambda other: _reach(here, other), others))
            of_host = [*merge(found, info.rank), *sharing(neighbours), *reached]
            if len(leaders) > 1:
                of_host = [replace(finding, host=here.host) for finding in of_host]
            shared.set(f"findings/{info.rank}", findings_as_text(of_host))
        # Ends only after all have tried to connect, so the listeners stay open until then.
        shared.wait([f"findings/{rank}" for rank in leaders], limit)
        offsets = _clock_offsets(shared, info.rank, leaders, limit)
    if info.rank != 0:
        return None
    findings = [each for rank in leaders for each in read_findings(shared.get(f"findings/{rank}"), rank)]
    findings.append(_ranks_by_host(places, leaders))
    findings += _clocks(places, offsets)
    findings += _different_versions(places)
    return findings


def _leaders(places: Sequence[Place]) -> list[int]:
    """The first rank on each host."""
    first: dict[str, int] = {}
    for place in places:
        first.setdefault(place.network, place.rank)
    return sorted(first.values())


@contextmanager
def _listening(info: LaunchInfo) -> Iterator[tuple[str, int]]:
    """A port on the interface that leads to the job's store, where the other hosts try to connect."""
    address = "127.0.0.1"
    if info.address is not None and info.socket is None:
        address = address_towards(info.address) or address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(128)  # a queued connection counts: nothing has to accept it
        yield address, int(listener.getsockname()[1])


def _reach(here: Place, other: Place) -> Finding:
    subject = f"to {other.host}"
    try:
        numbers = {str(found[4][0]) for found in socket.getaddrinfo(other.host, None)}
        known = f"its name resolves to {', '.join(sorted(numbers))}"
    except (OSError, UnicodeError):
        known = "its name does not resolve here, and ringway does not need it"
    began = time.monotonic()
    try:
        with socket.create_connection((other.address, other.port), timeout=_CONNECT_SECONDS):
            took = time.monotonic() - began
    except OSError as failed:
        says = f"{here.address} cannot connect to {other.address}:{other.port} ({failed.strerror or failed})"
        advice = "Open the ports from 1024 up between the hosts: gloo, NCCL and MPI choose theirs freely"
        return error(subject, says, advice)
    return ok(subject, f"connected to {other.address} in {took * 1e3:.1f} ms; {known}")


def _clock_offsets(shared: c10d.Store, rank: int, leaders: list[int], limit: timedelta) -> dict[int, float]:
    """How many seconds each leader's wall clock is behind rank 0's. Complete on rank 0."""
    others = [leader for leader in leaders if leader != 0]
    if rank == 0:
        for leader in others:
            answer(shared, leader, limit, time.time_ns)
        return {leader: float(shared.get(f"behind/{leader}")) for leader in others}
    if rank in others:
        shared.set(f"behind/{rank}", str(ask(shared, rank, limit, time.time_ns) / 1e9))
    return {}


def _clocks(places: Sequence[Place], offsets: dict[int, float]) -> Iterator[Finding]:
    off = {rank: behind for rank, behind in offsets.items() if abs(behind) > _CLOCK_SECONDS}
    for rank, behind in off.items():
        says = f"{places[rank].host} is {abs(behind):.1f} s {'behind' if behind > 0 else 'ahead of'} {places[0].host}"
        advice = "Synchronize the clocks (chrony): logs and certificates go by them. ringway's traces do not"
        yield warning("clocks", says, advice)
    if offsets and not off:
        yield ok("clocks", f"at most {max(map(abs, offsets.values())) * 1e3:.0f} ms apart")


def _ranks_by_host(places: Sequence[Place], leaders: list[int]) -> Finding:
    counts = Counter(place.network for place in places)
    listed = ", ".join(f"{counts[places[rank].network]} on {places[rank].host}" for rank in leaders)
    if len(set(counts.values())) > 1:
        says = f"{len(places)}: {listed}; hosts with different numbers of ranks use hierarchical less well"
        return warning("ranks", says, "Start the same number of ranks on every host")
    return ok("ranks", f"{len(places)}: {listed}")


def _different_versions(places: Sequence[Place]) -> Iterator[Finding]:
    for package, bad in _VERSIONS.items():
        by_version: dict[str, list[str]] = {}
        for place in places:
            by_version.setdefault(place.versions.get(package, "none"), []).append(f"rank {place.rank} on {place.host}")
        if len(by_version) > 1:
            listed = "; ".join(f"{version}: {', '.join(where[:4])}" for version, where in by_version.items())
            yield bad("versions", f"{package} differs. {listed}", f"Install the same {package} everywhere")
