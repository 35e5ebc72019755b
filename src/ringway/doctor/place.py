"""Where a rank is and what it may use, as it says itself. Ranks send it to each other, with what they found."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import ringway._core as _core
from ringway.doctor.finding import LEVELS, Finding
from ringway.doctor.gpus import Card, nccl_version, visible_gpus
from ringway.errors import RingwayError
from ringway.launch.processes import boot_id
from ringway.version import VERSION

_LONGEST_MESSAGE, _LONGEST_TEXT, _MOST_ENTRIES = 1 << 20, 4096, 1 << 13


class NotUnderstood(RingwayError):
    """A rank sent something that this version of ringway does not send."""


@dataclass(frozen=True)
class Place:
    rank: int
    host: str
    network: str
    """Equal for ranks that share a kernel and a network namespace."""
    address: str
    port: int
    cpus: list[int]
    """Those of its affinity."""
    quota: list[float] | None
    """The cgroup that limits its CPU time most, as an inode, and how many CPUs it allows."""
    gpus: list[str]
    """The UUIDs of those that it sees."""
    versions: dict[str, str]

    def as_text(self) -> str:
        return json.dumps(asdict(self))


def own_place(rank: int, cards: Sequence[Card], address: str = "", port: int = 0) -> Place:
    """`address` and `port` are where this rank listens, if it does."""
    quota = _core.cpu_quota()
    return Place(
        rank=rank,
        host=socket.gethostname(),
        network=_network(),
        address=address,
        port=port,
        cpus=sorted(os.sched_getaffinity(0)),
        quota=None if quota is None else list(quota),
        gpus=visible_gpus(),
        versions=_versions(cards),
    )


def read_place(text: bytes, rank: int) -> Place:
    """What `rank` sent. Raises `NotUnderstood` unless every part has its type and a bounded size."""
    entry = _parsed(text, rank)
    try:
        place = Place(**entry)
        valid = (
            place.rank == rank
            and _are_texts(place.host, place.network, place.address)
            and isinstance(place.port, int)
            and 0 <= place.port < 1 << 16
            and _is_list(place.cpus)
            and all(isinstance(cpu, int) for cpu in place.cpus)
            and (place.quota is None or (len(place.quota) == 2 and all(map(_is_number, place.quota))))
            and _is_list(place.gpus)
            and _are_texts(*place.gpus)
            and isinstance(place.versions, dict)
            and _are_texts(*place.versions, *place.versions.values())
        )
    except TypeError:  # a name is missing or unknown, or a part has no length
        valid = False
    if not valid:
        raise _not_understood(rank)
    return place


def findings_as_text(findings: Sequence[Finding]) -> str:
    return json.dumps([{name: _shown(text) for name, text in asdict(finding).items()} for finding in findings])


def read_findings(text: bytes, rank: int) -> list[Finding]:
    """What `rank` sent, checked like a place."""
    entries = _parsed(text, rank)
    if not _is_list(entries):
        raise _not_understood(rank)
    findings = []
    for entry in entries:
        try:
            found = Finding(**entry)
        except TypeError:  # a name is missing or unknown
            raise _not_understood(rank) from None
        if found.level not in LEVELS or not _are_texts(*asdict(found).values()):
            raise _not_understood(rank)
        findings.append(found)
    return findings


def _shown(text: str) -> str:
    """Without what could control a terminal: names of interfaces and processes may hold anything."""
    return "".join(each if each.isprintable() else "?" for each in text)[:_LONGEST_TEXT]


def _network() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = socket.gethostname()
    return f"{boot_id()} {namespace}"


def _versions(cards: Sequence[Card]) -> dict[str, str]:
    return {
        "ringway": VERSION,
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "NCCL": nccl_version(),
        "NVIDIA driver": cards[0]["driver_version"] if cards else "none",
    }


def _parsed(text: bytes, rank: int) -> Any:
    if len(text) > _LONGEST_MESSAGE:
        raise _not_understood(rank)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _not_understood(rank) from None


def _not_understood(rank: int) -> NotUnderstood:
    return NotUnderstood(f"rank {rank} sent something that ringway {VERSION} does not understand")


def _are_texts(*values: object) -> bool:
    """Whether they are texts that a terminal may show, and not too many."""
    return len(values) <= _MOST_ENTRIES and all(
        isinstance(value, str) and len(value) <= _LONGEST_TEXT and value.isprintable() for value in values
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 1 << 63


def _is_list(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_ENTRIES
