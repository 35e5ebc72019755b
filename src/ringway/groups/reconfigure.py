"""Groups whose members can be replaced: torch 2.15's `_reconfigure`, on every version.

Each process has a handle. The program collects the handles, in its own rendezvous for example, and passes the new list
to every member. The group object stays: only what is behind it is made again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d_module

from ringway.errors import PeerLost, UsageError
from ringway.groups.bridge import Bridge
from ringway.groups.communicator import Communicator
from ringway.launch.processes import ProcessName
from ringway.work import DONE, Work, seconds

Formed = tuple[Communicator, dict[str, Any]]
"""A communicator, and torch's own backends by device."""


@dataclass(frozen=True)
class ReconfigureHandle:
    """One process, as others address it. A process has one for each of its groups."""

    process: ProcessName
    nonce: str

    def pack(self) -> str:
        return json.dumps(asdict(self))


def _unpacked(text: str) -> ReconfigureHandle:
    try:
        facts = json.loads(text)
        process = facts["process"]
        return ReconfigureHandle(
            ProcessName(str(process["host"]), int(process["pid"]), str(process["namespace"])), str(facts["nonce"])
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UsageError(f"{text[:80]!r} is not a handle that _get_reconfigure_handle() returned") from None


class ReconfigurableBridge(Bridge):
    """A group that has no members until `reconfigure` names them, and can be given others at any time.

    C++ code that asks the group for its rank, size or backend sees those that `init_process_group` was given.
    """

    def __init__(
        self,
        name: str,
        place: tuple[int, int],
        alone: Formed,
        form: Callable[[Sequence[ReconfigureHandle], int, int, float], Formed],
    ) -> None:
        """`alone` is a group of one, which refuses all calls. `form` makes the group of some processes: it takes
        them, this one's rank, the uuid and the time limit."""
        super().__init__(name, *alone, _cannot_split, place)
        self._form = form
        self._handle = ReconfigureHandle(ProcessName.own(), secrets.token_hex(8))
        self._used: set[int] = set()
        self.communicator.health.poison(
            UsageError("this group was made with enable_reconfigure=True and has no members yet: call _reconfigure")
        )

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        return self._handle.pack()

    def reconfigure(self, opts: Any) -> Work:
        """Ends what is behind the group, and connects the processes of `opts.handles`. A list is in rank order, a set
        is sorted. Every process in it calls this with the same uuid."""
        if opts.uuid in self._used:
            raise UsageError(f"the uuid {opts.uuid} was already used; pass a new one each time")
        handles = _in_order(opts.handles)
        if self._handle not in handles:
            raise UsageError("the handles do not contain this process's own, which _get_reconfigure_handle() returns")
        self._used.add(opts.uuid)
        limit = seconds(getattr(opts, "timeout", None)) or self.communicator.info.timeout
        self.communicator.health.poison(
            UsageError("_reconfigure replaces this group's members; if it failed, call it again with a new uuid")
        )
        self.communicator.close(wait=False)
        communicator, self._torchs = self._form(handles, handles.index(self._handle), opts.uuid, limit)
        self._connect(communicator)
        ranks = c10d_module._world.pg_group_ranks
        if self in ranks:
            ranks[self] = {rank: rank for rank in range(len(handles))}
        return Work(DONE, (), lambda error: error)

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.size

    def _get_backend(self, device: torch.device) -> Any:
        """torch registers a backend once. The one of the first members would not know later ones."""
        return self

    def get_error(self) -> Any:
        """What the backend of the current members says."""
        return next(iter(self._torchs.values())).get_error()


def _in_order(handles: Collection[str]) -> list[ReconfigureHandle]:
    texts = list(handles) if isinstance(handles, (list, tuple)) else sorted(handles)
    if len(set(texts)) < len(texts):
        raise UsageError("a handle is in the list twice")
    return [_unpacked(text) for text in texts]


def _cannot_split(*_: Any, **__: Any) -> None:
    raise UsageError("a group that can be reconfigured cannot be split; use new_group")


def watch_for(handles: Sequence[ReconfigureHandle]) -> Callable[[], None]:
    """Raises if one of the processes is gone, as far as this host's process table says."""

    def look() -> None:
        for rank, handle in enumerate(handles):
            if handle.process.seems_gone():
                raise PeerLost(
                    f"rank {rank} ({handle.process}) ended while the group formed",
                    rank=rank,
                    host=handle.process.host,
                    pid=handle.process.pid,
                )

    return look


@dataclass(frozen=True)
class ReconfigureOptions:
    """Like torch 2.15's class, for earlier versions."""

    uuid: int
    handles: Collection[str]
    timeout: timedelta | None = None
