"""Which ranks of a group share a host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ringway.errors import BackendUnavailable
from ringway.launch.processes import boot_id


def host_identity() -> str:
    """Equal for processes that can share memory: the kernel's boot id and the network namespace."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"


@dataclass(frozen=True)
class HostGrid:
    """Which ranks of the group share a host: `hosts[h][i]` is rank i of host h, in the group's order."""

    hosts: tuple[tuple[int, ...], ...]
    host: int
    place: int

    @classmethod
    def of(cls, identities: Sequence[str], rank: int) -> HostGrid:
        by_host: dict[str, list[int]] = {}
        for member, identity in enumerate(identities):
            by_host.setdefault(identity, []).append(member)
        hosts = tuple(tuple(members) for members in by_host.values())
        widths = sorted({len(members) for members in hosts})
        if len(hosts) < 2 or len(widths) > 1 or widths[0] < 2:
            raise BackendUnavailable(
                "hierarchical",
                "it needs two hosts or more with equally many ranks each, two at least; this group has "
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
