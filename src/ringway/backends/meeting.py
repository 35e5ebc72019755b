"""What the ranks of a group tell each other through its store when a backend is made."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ringway.backends.base import GroupInfo
from ringway.errors import RendezvousError

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
