"""Why a group failed: the first rank that knows writes it to the job's store, the others read it there."""

from __future__ import annotations

import json
from typing import Any, Protocol

from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost
from ringway.groups.listener import Group
from ringway.observe.stall.peers import Answer

_FACTS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "lost": (PeerLost, ("rank", "host", "pid", "signal")),
    "timeout": (CommTimeout, ("op", "sequence", "waited", "missing")),
    "mismatch": (CollectiveMismatch, ("sides", "sequence")),
}


class Board(Protocol):
    """The part of a job that is needed here: its rank, and its store."""

    rank: int

    def read(self, key: str) -> str | None: ...

    def write(self, key: str, text: str, *, unless_there: bool = False) -> None: ...


def _key(group: Group) -> str:
    return f"ringway/fault/{group.name}"


def read(board: Board, group: Group) -> BaseException | None:
    """The error that another rank has published, if any."""
    text = board.read(_key(group))
    fault = None if text is None else json.loads(text)
    if fault is None or fault["reporter"] == board.rank:
        return None
    kind, names = _FACTS[fault["kind"]]
    facts = {name: fault[name] for name in names}
    if "sides" in facts:
        facts["sides"] = {int(rank): side for rank, side in facts["sides"].items()}
    error: BaseException = kind(f"rank {fault['reporter']} reports: {fault['text']}", **facts)
    return error


def write(board: Board, group: Group, error: BaseException) -> None:
    """Publishes the error, unless another rank has published one."""
    for kind, (made, names) in _FACTS.items():
        if isinstance(error, made):
            facts = {name: getattr(error, name) for name in names}
            fault = {"kind": kind, "reporter": board.rank, "text": str(error), **facts}
            board.write(_key(group), json.dumps(fault), unless_there=True)


def lost(rank: int, answer: Answer | None, text: str) -> PeerLost:
    """The error for a rank whose process is gone."""
    address = None if answer is None else answer.address
    return PeerLost(
        text,
        rank=rank,
        host=None if address is None else address.host,
        pid=None if address is None else address.pid,
        signal=None if answer is None else answer.signal,
    )
