"""Between hosts: names, connections in both directions, clocks and versions. Every rank of a job takes part.

One rank on each host examines it and tries to connect to the others. What the ranks say reaches rank 0 through the
job's store, whose ranks have proved that they belong to the job.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

from ringway.doctor.finding import Finding, error, ok, warning
from ringway.launch.info import LaunchInfo
from ringway.launch.ports import address_towards
from ringway.launch.processes import boot_id
from ringway.observe.trace.clock import answer, ask
from ringway.version import VERSION

_CONNECT_SECONDS = 3.0
_AT_ONCE = 64
_CLOCK_SECONDS = 0.5
_LONGEST_TEXT = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where one rank is, as it says itself."""

    rank: int
    host: str
    network: str
    """Equal for ranks that share a kernel and a network namespace."""
    address: str
    port: int
    versions: dict[str, str]


def compare_hosts(store: c10d.Store, info: LaunchInfo, own: Sequence[Finding], seconds: float) -> list[Finding] | None:
    """All findings, on rank 0; None on the others. `own` are those about this host."""
    shared = c10d.PrefixStore("ringway/doctor", store)
    limit = timedelta(seconds=seconds)
    with _listening(info) as (address, port):
        here = Place(info.rank, socket.gethostname(), _network(), address, port, _versions())
        shared.set(f"place/{info.rank}", json.dumps(asdict(here)))
        shared.wait([f"place/{rank}" for rank in range(info.size)], limit)
        places = [Place(**_read(shared, f"place/{rank}")) for rank in range(info.size)]
        leaders = _leaders(places)
        if info.rank in leaders:
            others = [places[rank] for rank in leaders if rank != info.rank]
            # At the same time: a firewall or a name server may let each wait for seconds.
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                reached = list(pool.map(lambda other: _reach(here, other), others))
            found = [replace(finding, host=here.host) if len(leaders) > 1 else finding for finding in (*own, *reached)]
            shared.set(f"findings/{info.rank}", json.dumps([asdict(finding) for finding in found]))
        # Ends only after all have tried to connect, so the listeners stay open until then.
        shared.wait([f"findings/{rank}" for rank in leaders], limit)
        offsets = _clock_offsets(shared, info.rank, leaders, limit)
    if info.rank != 0:
        return None
    findings = [Finding(**entry) for rank in leaders for entry in _read(shared, f"findings/{rank}")]
    findings.append(_ranks_by_host(places, leaders))
    findings += _clocks(places, offsets)
    findings += _different_versions(places)
    return findings


def _network() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = socket.gethostname()
    return f"{boot_id()} {namespace}"


def _versions() -> dict[str, str]:
    return {"ringway": VERSION, "torch": torch.__version__}


def _read(shared: c10d.Store, key: str) -> Any:
    text = shared.get(key)
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"{key} has {len(text)} bytes")
    return json.loads(text)


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
    for package in sorted(places[0].versions):
        by_version: dict[str, list[str]] = {}
        for place in places:
            by_version.setdefault(place.versions.get(package, "none"), []).append(f"rank {place.rank} on {place.host}")
        if len(by_version) > 1:
            listed = "; ".join(f"{version}: {', '.join(where[:4])}" for version, where in by_version.items())
            yield error("versions", f"{package} differs. {listed}", f"Install the same {package} everywhere")
