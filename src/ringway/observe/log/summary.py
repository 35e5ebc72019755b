"""The logger's counts as values: one entry per name and message size.

Durations are from issue to completion. Bandwidths follow nccl-tests: algorithm bandwidth is the message size over its
time; bus bandwidth is that times the op's factor for the size of the *group* that made the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ringway.call import OP_BY_NAME, OPS

USER_OP = 255
"""The op code of functions decorated with `timed_op`; their calls are named by their label."""


def bus_factor(op: int, label: str, size: int) -> float:
    if op < len(OPS):
        return OPS[op].bus_factor(size)
    known = OP_BY_NAME.get(label)
    return 1.0 if known is None else known.bus_factor(size)


def size_text(nbytes: float) -> str:
    """1048576 -> '1.0 MB', as DeepSpeed writes it."""
    if nbytes < 1:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
    unit = 0
    while nbytes >= 1024 and unit < len(units) - 1:
        nbytes /= 1024
        unit += 1
    return f"{round(nbytes, 2)} {units[unit]}"


def printable(text: str, most: int = 60) -> str:
    """A user's text as one line, without control characters, which a terminal would interpret."""
    plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return plain if len(plain) <= most else plain[: most - 1] + "…"


@dataclass
class CallTotals:
    """All calls of one name and message size."""

    name: str
    nbytes: int
    count: int = 0
    total_ns: int = 0
    max_ns: int = 0
    moved: float = 0.0
    moved_on_bus: float = 0.0
    p50_ns: float = 0.0
    p99_ns: float = 0.0

    def add(self, row: tuple[Any, ...]) -> None:
        op, label, _, size, nbytes, count, total, longest, p50, p99 = row
        before, self.count = self.count, self.count + count
        self.total_ns += total
        self.max_ns = max(self.max_ns, longest)
        self.moved += nbytes * count
        self.moved_on_bus += nbytes * count * bus_factor(op, label, size)
        # Groups of different sizes share an entry; their percentiles are weighted by their calls.
        self.p50_ns = (self.p50_ns * before + p50 * count) / self.count
        self.p99_ns = max(self.p99_ns, p99)

    @property
    def mean_ms(self) -> float:
        return self.total_ns / self.count / 1e6 if self.count else 0.0

    @property
    def algorithm_gbps(self) -> float:
        """Gigabits per second, as in DeepSpeed's table."""
        return self.moved * 8 / self.total_ns if self.total_ns else 0.0

    @property
    def bus_gbps(self) -> float:
        return self.moved_on_bus * 8 / self.total_ns if self.total_ns else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "total_latency_ms": self.total_ns / 1e6,
            "avg_latency_ms": self.mean_ms,
            "tput_avg_gbps": self.algorithm_gbps,
            "busbw_avg_gbps": self.bus_gbps,
            "msg_size_bytes": self.nbytes,
            "msg_size_str": size_text(self.nbytes),
            "p50_latency_ms": self.p50_ns / 1e6,
            "p99_latency_ms": self.p99_ns / 1e6,
            "max_latency_ms": self.max_ns / 1e6,
        }


def record_name(op: int, label: str, site: tuple[str, int, str] | None) -> str:
    """The name under which a call is logged: its label or its op, with its caller if `debug` asked for that."""
    name = label or (OPS[op].name if op < len(OPS) else f"op {op}")
    return name if site is None else f"{name} | [Caller Func: {site[2]}]"


def totals(rows: Iterable[tuple[Any, ...]]) -> dict[str, dict[int, CallTotals]]:
    """The recorder's rows by name and by message size, both sorted."""
    table: dict[str, dict[int, CallTotals]] = {}
    for row in sorted(rows, key=lambda row: (row[0], row[1], row[4])):
        name, nbytes = record_name(row[0], row[1], row[2]), row[4]
        table.setdefault(name, {}).setdefault(nbytes, CallTotals(name, nbytes)).add(row)
    return {name: dict(sorted(by_size.items())) for name, by_size in sorted(table.items())}


def table_text(table: dict[str, dict[int, CallTotals]]) -> str:
    """DeepSpeed's table, with three more columns."""
    heads = (
        "Comm. Op",
        "Message Size",
        "Count",
        "Total Latency(ms)",
        "Avg Latency(ms)",
        "tput_avg (Gbps)",
        "busbw_avg (Gbps)",
        "p50(ms)",
        "p99(ms)",
        "max(ms)",
    )
    out = ["".join(f"{head: <20}" for head in heads[:7]) + "".join(f"{head: <12}" for head in heads[7:])]
    for name, by_size in table.items():
        out.append(printable(name, 120))
        for line in by_size.values():
            numbers = (line.total_ns / 1e6, line.mean_ms, line.algorithm_gbps, line.bus_gbps)
            out.append(
                f"{' ': <20}{size_text(line.nbytes): <20}{line.count: <20}"
                + "".join(f"{number: <20.2f}" for number in numbers)
                + "".join(f"{number / 1e6: <12.3f}" for number in (line.p50_ns, line.p99_ns, line.max_ns))
            )
    return "\n".join(line.rstrip() for line in out)
