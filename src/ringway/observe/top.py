"""`ringway top`: the ranks that are running on this host, what each is doing, and which ones others wait for.

Every rank listens on an abstract unix socket named after its pid, for its own user only, so nothing has to be
configured or cleaned up. A rank answers without the GIL, so a stuck rank is shown too.
"""

from __future__ import annotations

import re
import socket
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ringway.launch.locality import same_user
from ringway.observe.log.summary import printable, size_text
from ringway.observe.recorder import RecordedCall, recorded
from ringway.observe.stall.peers import request
from ringway.store import Deadline

_SECONDS = 2.0


@dataclass(frozen=True)
class RankStatus:
    """The status one rank reports."""

    rank: int
    size: int
    host: str
    pid: int
    now_ns: int
    total: int
    calls: tuple[RecordedCall, ...]
    leaving: str
    job: str = ""

    @property
    def current(self) -> RecordedCall | None:
        return next((call for call in self.calls if call.state == "issued"), None)

    @property
    def gigabytes_a_second(self) -> float | None:
        """The bytes of its latest calls over the time they took."""
        done = [call for call in self.calls if call.state == "completed" and call.nbytes]
        took = sum(call.completed_ns - call.issued_ns for call in done)
        return sum(call.nbytes for call in done) / took if took else None


def pids() -> list[int]:
    """Processes on this host, and in this network namespace, that have a ringway socket."""
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
            found = re.findall(r"@ringway/(\d+)$", file.read(), re.MULTILINE)
    except OSError:
        return []
    return sorted({int(pid) for pid in found})


def ask_pid(pid: int) -> RankStatus | None:
    """A rank's status. None if the process is gone, belongs to another user, or does not answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(f"\0ringway/{pid}")
            if not same_user(connection):  # anyone can listen under this name
                return None
            return _status(request(connection, "", "C", "", Deadline(_SECONDS)))
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # or another version of ringway answers differently
        return None


def _status(reply: dict[str, Any]) -> RankStatus:
    facts = reply["facts"]
    calls = tuple(recorded(row) for row in reply["calls"])
    return RankStatus(
        facts["rank"],
        facts["size"],
        facts["host"],
        reply["pid"],
        reply["now"],
        reply["total"],
        calls,
        reply["leaving"],
        facts["job"],
    )


def snapshot() -> list[RankStatus]:
    """The ranks by job, the oldest job first, and within a job by rank."""
    found = [status for status in map(ask_pid, pids()) if status is not None]
    first: dict[str, int] = {}
    for status in found:
        first[status.job] = min(status.pid, first.get(status.job, status.pid))
    return sorted(found, key=lambda status: (first[status.job], status.job, status.rank, status.pid))


def skews(ranks: list[RankStatus]) -> dict[int, float]:
    """How long the first rank waited for each rank, in seconds, averaged over the calls that several of them know.
    Keyed by pid. Ranks of one host share a clock."""
    meetings: dict[tuple[str, str, int, str], dict[int, int]] = defaultdict(dict)
    for status in ranks:
        for call in status.calls:
            if call.op not in ("send", "recv"):
                meetings[status.job, call.group, call.sequence, call.op][status.pid] = call.issued_ns
    late: dict[int, list[float]] = defaultdict(list)
    for came in meetings.values():
        if len(came) > 1:
            first = min(came.values())
            for pid, at in came.items():
                late[pid].append((at - first) / 1e9)
    return {pid: sum(values) / len(values) for pid, values in late.items()}


_COLUMNS = ("Rank", "PID", "In", "Since", "Calls", "Calls/s", "GB/s", "Behind")
_NARROW_COLUMNS = ("Rank", "In", "Since")
_NARROW = 64


def table(
    ranks: list[RankStatus], before: dict[int, tuple[int, int]] | None = None, width: int = _NARROW
) -> RenderableType:
    """The screen. `before` holds (time, calls) of the last screen by pid, for the call rate; `width` is the
    terminal's."""
    if not ranks:
        return Text("No ringway rank is running on this host (in this network namespace, as this user).")
    view = Table(box=None, pad_edge=False)
    names = _COLUMNS if width >= _NARROW else _NARROW_COLUMNS
    for name in names:
        # In a narrow terminal, truncate what a rank is in and keep the other columns.
        view.add_column(name, justify="left" if name == "In" else "right", no_wrap=name != "In")
    late = skews(ranks)
    job = ranks[0].job
    for status in ranks:
        if status.job != job:  # a separator between jobs
            job = status.job
            view.add_row()
        cells = _row(status, late.get(status.pid), (before or {}).get(status.pid))
        view.add_row(*(cells[_COLUMNS.index(name)] for name in names))
    jobs = len({status.job for status in ranks})
    count = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}" + (f" of {jobs} jobs" if jobs > 1 else "")
    return Lines(Text(f"{count} on {printable(ranks[0].host)}, {time.strftime('%H:%M:%S')}"), view)


def _row(status: RankStatus, late: float | None, before: tuple[int, int] | None) -> list[Text]:
    call = status.current
    if status.leaving:
        doing = f"leaving: {status.leaving}"
    elif call is None:
        doing = "the program's own code"
    else:
        label = f" '{call.label}'" if call.label else ""
        doing = f"{call.op}{label} #{call.sequence}, group {call.group}, {size_text(call.nbytes)}"
    since = "" if call is None else f"{max(status.now_ns - call.issued_ns, 0) / 1e9:.1f} s"
    stalled = call is not None and status.now_ns - call.issued_ns > 10e9
    rate = ""
    if before is not None and status.now_ns > before[0]:
        rate = f"{(status.total - before[1]) / ((status.now_ns - before[0]) / 1e9):.0f}"
    speed = status.gigabytes_a_second
    return [
        Text(f"{status.rank}/{status.size}"),
        Text(str(status.pid)),
        Text(printable(doing, 70), style="red" if stalled else "", no_wrap=True, overflow="ellipsis"),
        Text(since, style="red" if stalled else ""),
        Text(str(status.total)),
        Text(rate),
        Text("" if speed is None else f"{speed:.3f}"),
        Text("" if late is None else f"{late * 1e3:.1f} ms"),
    ]
