"""Why a group failed, as the first rank that knew left it in the job's store for the others."""

from __future__ import annotations

import json
from typing import Any, Protocol

from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost
from ringway.groups.call_path import Issuer
from ringway.observe.stall.peers import Answer

_FACTS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "lost": (PeerLost, ("rank", "host", "pid", "signal")),
    "timeout": (CommTimeout, ("op", "sequence", "waited", "missing")),
    "mismatch": (CollectiveMismatch, ("sides", "sequence")),
}


class Board(Protocol):
    """Where it is left: the job, with its store."""

    rank: int

    def read(self, key: str) -> str | None: ...

    def write(self, key: str, text: str, *, unless_there: bool = False) -> None: ...


def _key(issuer: Issuer) -> str:
    return f"ringway/fault/{issuer.name}"


def read(board: Board, issuer: Issuer) -> BaseException | None:
    """What another rank found out before this one."""
    text = board.read(_key(issuer))
    told = None if text is None else json.loads(text)
    if told is None or told["reporter"] == board.rank:
        return None
    kind, names = _FACTS[told["kind"]]
    facts = {name: told[name] for name in names}
    if "sides" in facts:
        facts["sides"] = {int(rank): side for rank, side in facts["sides"].items()}
    error: BaseException = kind(f"rank {told['reporter']} reports: {told['text']}", **facts)
    return error


def write(board: Board, issuer: Issuer, error: BaseException) -> None:
    for kind, (made, names) in _FACTS.items():
        if isinstance(error, made):
            facts = {name: getattr(error, name) for name in names}
            told = {"kind": kind, "reporter": board.rank, "text": str(error), **facts}
            board.write(_key(issuer), json.dumps(told), unless_there=True)


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
