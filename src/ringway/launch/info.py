"""A process's place in the job, as a value, and the parsing of launchers' variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringway.errors import DiscoveryError

LOOPBACK = "127.0.0.1"
"""The address at which ranks that are all on one host meet."""
MAX_RANKS = 1 << 24
"""More ranks than any machine has: a larger number is a mistake."""


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """This process's place in the job, and the launcher that gave it.

    `None` means that the launcher does not say. `address` and `port` are the store's; without a port, ringway chooses
    one. `hosted_by_launcher` means that the store runs in the launcher, not in rank 0; `socket` is the path of its
    socket if it is private. `job` distinguishes this job from others and is equal on all ranks; `attempt` counts the
    launcher's restarts of it, if all ranks have the same count. `notes` are remarks for `ringway env`.
    """

    rank: int
    size: int
    source: str
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    address: str | None = None
    port: int | None = None
    socket: str | None = None
    job: str = ""
    attempt: int = 0
    hosted_by_launcher: bool = False
    notes: tuple[str, ...] = ()

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are on this host, according to the launcher."""
        return self.size == 1 or self.local_size == self.size


class Variables:
    """The variables that one source reads. It remembers them, so that an error can print them."""

    def __init__(self, environ: Mapping[str, str], source: str) -> None:
        self._environ = environ
        self.source = source
        self.seen: dict[str, str] = {}

    def text(self, *names: str) -> str | None:
        """The first of these variables that is set and not empty."""
        for name in names:
            value = self._environ.get(name, "").strip()
            if value:
                self.seen[name] = value
                return value
        return None

    def number(self, *names: str, least: int = 0, most: int = MAX_RANKS) -> int | None:
        value = self.text(*names)
        if value is None:
            return None
        name = next(name for name in names if self.seen.get(name) == value)
        # ASCII digits only: int() also accepts '1_0' and digits of other scripts.
        if not (value.isascii() and value.isdigit()) or len(value) > 9:
            raise self.error(f"{name}={value!r} is not a valid number")
        if not least <= int(value) <= most:
            raise self.error(f"{name}={value} is not between {least} and {most}")
        return int(value)

    def port(self, *names: str) -> int | None:
        return self.number(*names, least=1, most=65535)

    def needed(self, value: int | None, *names: str) -> int:
        if value is None:
            raise self.error(f"{' or '.join(names)} is not set, so the launcher's variables are incomplete")
        return value

    def error(self, what: str) -> DiscoveryError:
        listed = ", ".join(f"{name}={_shown(value)}" for name, value in sorted(self.seen.items()))
        return DiscoveryError(f"{self.source}: {what} (seen: {listed})", source=self.source, seen=self.seen)

    def info(
        self,
        *,
        rank: int,
        size: int,
        local_rank: int | None = None,
        local_size: int | None = None,
        node_rank: int | None = None,
        address: str | None = None,
        port: int | None = None,
        job: str = "",
        attempt: int = 0,
        hosted_by_launcher: bool = False,
        notes: tuple[str, ...] = (),
    ) -> LaunchInfo:
        """Create the value after checking that its parts are consistent."""
        if size < 1:
            raise self.error("the world size is 0")
        if rank >= size:
            raise self.error(f"rank {rank} is not below the world size {size}")
        if local_size is not None and not 1 <= local_size <= size:
            raise self.error(f"{local_size} ranks on this host, but only {size} in total")
        if local_rank is not None and local_rank >= (local_size or size):
            raise self.error(f"local rank {local_rank} is not below the {local_size or size} ranks of this host")
        if size == 1:
            local_rank, local_size, node_rank = local_rank or 0, 1, node_rank or 0
        return LaunchInfo(
            rank=rank,
            size=size,
            source=self.source,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=0 if node_rank is None and local_size == size else node_rank,
            address=address,
            port=port,
            job=job,
            attempt=attempt,
            hosted_by_launcher=hosted_by_launcher,
            notes=notes,
        )


def _shown(value: str) -> str:
    """The value as is, unless it could affect the terminal or cannot be printed."""
    return value if value.isprintable() else repr(value)
