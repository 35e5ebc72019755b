"""Stands in for names that commit 72db06d does not have, so that tests of today can be imported there.

What a test checks is never replaced: a stand-in is the older name, what a program used before, or nothing at all.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import torch

import ringway
from ringway import _core, parallel
from ringway.backends import base, shm_meeting
from ringway.compress import layout
from ringway.observe import peers

_core.GroupRecord = _core.Lane
_core.create_call_board = _core.create_signatures


class Absent:
    """Something that 72db06d does not have, and that the tests which run there only import."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...


GlooFastPath = Frames = Header = Key = KnownPeers = Listener = key_of = pid_namespace = Absent
_cpus_together = _Member = spoil_if_different = headers = clear_spoiled = compressed_bytes = ring_bytes = Absent
HEADER_BYTES, Sharding = layout.HEADER_BYTES, layout.Layout
frame_bytes, new_frames, statuses, body = layout.frame_bytes, layout.new_frames, layout.statuses, layout.body


class Process:
    """What all groups of a process share: nothing."""


def GroupInfo(process: Any = None, **facts: Any) -> base.GroupInfo:  # noqa: N802
    return base.GroupInfo(**facts)


class Deadline:
    """Seconds that are left."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def poll(self, ask: Callable[[], Any]) -> Any:
        while (found := ask()) is None and time.monotonic() < self.at:
            time.sleep(0.01)
        return found


def host_identity() -> str:
    return ""


def read(store: Any, key: str) -> Any:
    return store.get(key) if store.check([key]) else None


def request(connection: socket.socket, token: str, kind: str, group: str, deadline: Deadline) -> Any:
    connection.settimeout(max(0.1, deadline.at - time.monotonic()))
    return peers.request(connection, token, kind, group)


class links:  # noqa: N801
    """Messages between ranks that form a group."""

    @staticmethod
    def send(link: socket.socket, message: dict[str, Any], fds: Any = (), deadline: Any = None) -> None:
        shm_meeting._send(link, message, fds)

    @staticmethod
    def receive(link: socket.socket, deadline: Deadline, who: Any) -> Any:
        return shm_meeting._receive(link, deadline.at, str(who))


class GradScaler(torch.amp.GradScaler):
    """torch's own, which is what a program had."""

    def __init__(self, *arguments: Any, group: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)


parallel.GradScaler = GradScaler
parallel.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
ringway.parallel = parallel
