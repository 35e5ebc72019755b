"""The errors that ringway raises.

RingwayError (RuntimeError)
├── ConfigError                      an invalid setting: which one, from where, the nearest valid name
├── DiscoveryError                   the launcher's environment is inconsistent
├── RendezvousError                  not all ranks arrived: which did, which did not
├── Tampered                         a stranger changed what the ranks exchange: what, and where
├── BackendUnavailable               a backend that cannot be used here: what to install
├── UsageError (also ValueError)     an invalid call; nothing was sent
├── ObjectError                      an object message that cannot be trusted: its sender, what is wrong
├── NotFinite                        NaN or infinity in a compressed collective: on which rank
├── CollectiveMismatch               ranks called different collectives: both sides
├── PeerLost                         another rank's process is gone
└── CommTimeout (also TimeoutError)  ranks that did not arrive in time: which ones

Each carries its facts as attributes, and its message is built from them. Both survive `pickle` and `copy`. Errors of
other libraries (torch, mpi4py, oneCCL, the system) are converted to these where they enter, in the backend's own file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

__all__ = [
    "BackendUnavailable",
    "CollectiveMismatch",
    "CommTimeout",
    "ConfigError",
    "DiscoveryError",
    "NotFinite",
    "ObjectError",
    "PeerLost",
    "RendezvousError",
    "RingwayError",
    "Tampered",
    "UsageError",
]


class RingwayError(RuntimeError):
    """The base class of all errors that ringway raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is rebuilt from its message alone by default, but constructors want the facts too.
        return restored, (type(self), self.args), self.__dict__


def restored(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """An error from a pickle, whose attributes are set afterwards."""
    error = kind.__new__(kind)
    error.args = arguments
    return error


class ConfigError(RingwayError):
    """A setting has an invalid value, or a name that does not exist."""

    def __init__(self, message: str, *, key: str | None = None, source: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.source = source


class DiscoveryError(RingwayError):
    """A launcher's environment variables are inconsistent."""

    def __init__(self, message: str, *, source: str | None = None, seen: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.source = source
        self.seen = dict(seen or {})


class RendezvousError(RingwayError):
    """Not every rank arrived in time."""

    def __init__(
        self,
        message: str,
        *,
        arrived: Mapping[int, str] | None = None,
        missing: Iterable[int] = (),
    ) -> None:
        super().__init__(message)
        self.arrived = dict(arrived or {})
        self.missing = sorted(missing)


class Tampered(RingwayError):
    """Something that the ranks exchange was changed by a process that does not have the job's secret. `what` names it:
    a key of the job's store, or a message. It was not used."""

    def __init__(self, message: str, *, what: str) -> None:
        super().__init__(message)
        self.what = what


class BackendUnavailable(RingwayError):
    """The backend exists, but cannot be used here."""

    def __init__(self, backend: str, reason: str, *, remedy: str | None = None) -> None:
        super().__init__(f"backend '{backend}' is not available: {reason}" + (f". {remedy}" if remedy else ""))
        self.backend = backend
        self.reason = reason
        self.remedy = remedy


class UsageError(RingwayError, ValueError):
    """The call is invalid, and nothing was sent."""


class ObjectError(RingwayError):
    """An object could not be sent, or what arrived cannot be trusted. The group stays usable."""

    def __init__(self, message: str, *, sender: int) -> None:
        super().__init__(message)
        self.sender = sender


class NotFinite(RingwayError):
    """A compressed collective was given NaN or infinity. `rank` of the group had it; None if only the average was not
    finite. `key` names the residual, if there is one. The group stays usable, and residuals are unharmed."""

    def __init__(self, message: str, *, rank: int | None = None, key: object = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.key = key


class CollectiveMismatch(RingwayError):
    """Ranks of one group called different collectives.

    `sides` maps a global rank to what it called, in words. Ranks are global everywhere in the text too, also roots and
    peers, even if the group numbers its members differently. `sequence` is the call's number in the group.
    """

    def __init__(self, message: str, *, sides: Mapping[int, str] | None = None, sequence: int | None = None) -> None:
        super().__init__(message)
        self.sides = dict(sides or {})
        self.sequence = sequence


class PeerLost(RingwayError):
    """The process of another rank is gone. `signal` is set only if the kernel reports it."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        pid: int | None = None,
        signal: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.pid = pid
        self.signal = signal


class CommTimeout(RingwayError, TimeoutError):
    """A call waited until its deadline. `missing` lists the ranks that did not arrive, if known."""

    def __new__(cls, *arguments: Any, **facts: Any) -> CommTimeout:
        # The inherited one is RuntimeError's, which refuses to make an OSError. From Python 3.14 on, `__init__` is
        # OSError's, which leaves the message to this.
        return TimeoutError.__new__(cls, *arguments)

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        sequence: int | None = None,
        waited: float | None = None,
        missing: Sequence[int] | None = None,
    ) -> None:
        super().__init__(message)
        self.op = op
        self.sequence = sequence
        self.waited = waited
        self.missing = list(missing or ())


def mismatch_error(
    group: str,
    sides: Mapping[int, str],
    sequence: int | None = None,
    *,
    what: str = "called different things",
    ended: bool = True,
    details: Iterable[str] = (),
) -> CollectiveMismatch:
    """The error for ranks that called different things: what each did (`sides`, by global rank), then the details."""
    lines = [f"ranks of the group {group} {what}{'; the group has ended' if ended else ''}"]
    lines += [f"  rank {rank}: {sides[rank]}" for rank in sorted(sides)]
    lines += [f"  {detail}" for detail in details]
    return CollectiveMismatch("\n".join(lines), sides=sides, sequence=sequence)


def message_sizes(source: int, target: int, sent: int, expected: int) -> str:
    """The detail of a mismatch for a message whose two ends, by global rank, name different sizes."""
    return f"rank {source} sends {sent} bytes to rank {target}, which expects {expected}"


def nearest(name: str, names: Iterable[str]) -> str:
    """A suffix for a message about an unknown name: suggests the closest existing name, if any is close."""
    close = get_close_matches(name, list(names), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
