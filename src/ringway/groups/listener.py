"""The listener protocol: how other parts of ringway, and users, follow groups and their calls.

`world.listen(listener)` installs a listener for every group of this process, `world.unlisten(listener)` removes it.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from ringway.backends.base import GroupInfo
from ringway.call import Call


class Group(Protocol):
    """What a listener sees of a communicator."""

    info: GroupInfo
    name: str
    rank: int
    size: int
    ranks: list[int]
    spans_hosts: bool

    @property
    def closed(self) -> bool: ...

    @property
    def fault(self) -> BaseException | None:
        """The error that ended the group, if it has failed."""


class Listener:
    """Base class of listeners. Every method does nothing by default; override the ones you need.

    Methods run on the thread where the event happened, which may belong to a backend. They must not block and must
    not make collective calls.
    """

    sees_calls: ClassVar[bool] = False
    """Whether `issued` and `completed` are called. One listener that sees calls takes every group off the fast path."""

    def created(self, group: Group) -> None:
        """A communicator was made."""

    def issued(self, call: Call) -> None:
        """A call is about to start."""

    def completed(self, call: Call, error: BaseException | None) -> None:
        """A call has ended, with `error` if it failed."""

    def failed(self, group: Group, error: BaseException) -> BaseException:
        """A call failed in a way that ends the group. Returns the error to raise.

        `group.fault` is None for the first such call; later ones may raise the same fault again.
        """
        return error
