"""Exchanges values between the ranks of a group through its store, while a backend is made."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress

from ringway.backends.base import GroupInfo
from ringway.errors import RendezvousError
from ringway.store import Deadline, absent


def exchange(info: GroupInfo, topic: str, mine: bytes) -> list[bytes]:
    """The values of all ranks, in rank order. At the group's timeout, raises an error that names the missing ranks."""
    keys = [f"ringway/{topic}/{rank}" for rank in range(info.size)]
    info.store.set(keys[info.rank], mine)  # type: ignore[arg-type] # the store accepts bytes
    _await(info, topic, keys)
    return [bytes(value) for value in info.store.multi_get(keys)]


def from_rank_0(info: GroupInfo, topic: str, mine: bytes | None) -> bytes:
    """The value of the group's rank 0. Only rank 0 passes one."""
    key = f"ringway/{topic}"
    if mine is not None:
        info.store.set(key, mine)  # type: ignore[arg-type]
        return mine
    _await(info, topic, [key])
    return bytes(info.store.get(key))


def _await(info: GroupInfo, topic: str, keys: Sequence[str]) -> None:
    """Waits for one key of each rank, in rank order."""
    missing = [info.ranks[rank] for rank in absent(info.store, keys, Deadline(info.timeout))]
    if missing:
        raise RendezvousError(
            f"group {info.name}: rank {', '.join(map(str, missing))} did not come to {topic} within {info.timeout:g} s",
            missing=missing,
        )


_MARK = "ringway/mark"


def mark(info: GroupInfo) -> None:
    """Rank 0 of the group gives it a mark that no earlier group in the same store had. Before the backend is made."""
    if info.rank == 0 and info.size > 1:
        with suppress(Exception):  # if the store is gone, the backend fails with a better message
            info.store.set(_MARK, secrets.token_hex(8))


def mark_of(info: GroupInfo) -> str:
    """The group's mark. After the backend is made: making it waits for rank 0."""
    return bytes(info.store.get(_MARK)).decode() if info.size > 1 else ""
