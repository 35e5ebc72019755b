"""What the ranks of a group tell each other through its store when a backend is made, and which of them share a
host."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringway.backends.base import GroupInfo
from ringway.errors import BackendUnavailable, RendezvousError

_POLL_FIRST = 0.0005
_POLL_MOST = 0.05


def exchange(info: GroupInfo, topic: str, mine: bytes) -> list[bytes]:
    """What every rank of the group says, in rank order. At the group's timeout, who said nothing is named."""
    keys = [f"ringway/{topic}/{rank}" for rank in range(info.size)]
    info.store.set(keys[info.rank], mine)  # type: ignore[arg-type] # bytes are taken as they are
    await_keys(info, topic, keys)
    return [bytes(value) for value in info.store.multi_get(keys)]


def announced(info: GroupInfo, topic: str, mine: bytes | None) -> bytes:
    """What rank 0 of the group says; it alone passes something."""
    key = f"ringway/{topic}"
    if mine is not None:
        info.store.set(key, mine)  # type: ignore[arg-type]
        return mine
    await_keys(info, topic, [key])
    return bytes(info.store.get(key))


def await_keys(info: GroupInfo, topic: str, keys: list[str]) -> None:
    """Polls rather than blocks, because a wait inside the store is deaf to Ctrl-C. `keys` are by rank."""
    deadline = time.monotonic() + info.timeout
    pause = _POLL_FIRST
    while not info.store.check(keys):
        if time.monotonic() >= deadline:
            missing = [info.ranks[rank] for rank, key in enumerate(keys) if not info.store.check([key])]
            raise RendezvousError(
                f"group {info.name}: rank {', '.join(map(str, missing))} did not come to {topic} "
                f"within {info.timeout:g} s",
                missing=missing,
            )
        time.sleep(pause)
        pause = min(pause * 2, _POLL_MOST)


def host_identity() -> str:
    """This host, as far as sharing memory goes: the kernel's boot and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


@dataclass(frozen=True)
class Layout:
    """Which ranks of the group share a host: `hosts[h][i]` is rank i of host h, in the group's order."""

    hosts: tuple[tuple[int, ...], ...]
    host: int
    place: int

    @classmethod
    def of(cls, identities: Sequence[str], rank: int) -> Layout:
        by_host: dict[str, list[int]] = {}
        for member, identity in enumerate(identities):
            by_host.setdefault(identity, []).append(member)
        hosts = tuple(tuple(members) for members in by_host.values())
        widths = sorted({len(members) for members in hosts})
        if len(hosts) < 2 or len(widths) > 1 or widths[0] < 2:
            raise BackendUnavailable(
                "hierarchical",
                f"it needs two hosts or more with equally many ranks each, two at least; this group has "
                f"{', '.join(str(len(members)) for members in hosts)} ranks on {len(hosts)} host(s)",
                remedy="Use shm on one host, and gloo or mpi otherwise",
            )
        host = next(place for place, members in enumerate(hosts) if rank in members)
        return cls(hosts, host, hosts[host].index(rank))

    @property
    def neighbours(self) -> tuple[int, ...]:
        return self.hosts[self.host]

    @property
    def counterparts(self) -> tuple[int, ...]:
        """The ranks that own the same slice on each host."""
        return tuple(members[self.place] for members in self.hosts)

    @property
    def width(self) -> int:
        return len(self.neighbours)

    def by_place(self) -> list[int]:
        """The group's ranks, ordered by slice and then by host."""
        return [members[place] for place in range(self.width) for members in self.hosts]
