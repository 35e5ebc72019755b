"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ringway.bench.cases import BenchCase, Place
from ringway.bench.machine import machine
from ringway.bench.runner import Estimate, Measured, median_interval, paired_ratio
from ringway.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 140


@dataclass(frozen=True)
class Row:
    """One candidate in one case. Bandwidths are in bytes per second, by nccl-tests' definitions."""

    op: str
    nbytes: int
    dtype: str
    ranks: int
    candidate: str
    seconds: Estimate
    algorithm_bandwidth: float
    bus_bandwidth: float
    verified: bool
    ratio: Estimate | None = None
    """Time relative to the first candidate; None for the first itself."""
    mode: str = "sync"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Row:
        ratio = facts.get("ratio")
        return cls(
            **{**facts, "seconds": Estimate(**facts["seconds"]), "ratio": None if ratio is None else Estimate(**ratio)}
        )

    @property
    def what(self) -> tuple[str, int, str, int, str, str]:
        """What was measured: rows of two runs with the same are comparable."""
        return self.op, self.nbytes, self.dtype, self.ranks, self.candidate, self.mode


def rows(case: BenchCase, place: Place, measured: Sequence[Measured], mode: str = "sync") -> list[Row]:
    """The results of one case. The first candidate is the baseline for the others."""
    nbytes = place.whole * place.dtype.itemsize if case.op.name != "barrier" else 0
    result = []
    for one in measured:
        seconds = one.seconds
        rate = nbytes / seconds.median
        ratio = None if one is measured[0] else paired_ratio(one, measured[0])
        result.append(
            Row(
                case.op.name,
                nbytes,
                str(place.dtype).removeprefix("torch."),
                place.size,
                one.name,
                seconds,
                rate,
                rate * case.op.bus_factor(place.size),
                one.verified,
                ratio,
                mode,
            )
        )
    return result


def pair_row(candidate: str, first: int, second: int, nbytes: int, ranks: int, samples: Sequence[float]) -> Row:
    """A message between two ranks, one way, that has been checked."""
    seconds = median_interval(samples)
    rate = nbytes / seconds.median
    return Row(f"{first}-{second}", nbytes, "uint8", ranks, candidate, seconds, rate, rate, True, None, "pair")


def print_table(table: Sequence[Row], title: str = "", console: Console | None = None) -> None:
    """Show rows in the terminal."""
    from rich.console import Console as RichConsole
    from rich.table import Table

    view = Table(title=title or None)
    several_dtypes = len({row.dtype for row in table}) > 1
    for heading in ("op", "ranks", "size", *(["dtype"] if several_dtypes else []), "candidate"):
        view.add_column(heading)
    for heading in ("time", "95 % interval", "bus GB/s", "against first"):
        view.add_column(heading, justify="right")
    previous: tuple[str, int, int] | None = None
    for row in table:
        key = (row.op, row.ranks, row.nbytes)
        if previous is not None and key != previous:
            view.add_section()
        previous = key
        view.add_row(
            row.op,
            str(row.ranks),
            in_bytes(row.nbytes),
            *([row.dtype] if several_dtypes else []),
            row.candidate,
            in_time(row.seconds.median),
            f"{in_time(row.seconds.low)} to {in_time(row.seconds.high)}",
            rounded(row.bus_bandwidth / 1e9),
            "" if row.ratio is None else in_ratio(row.ratio),
        )
    # A file or a pipe has no width, and a table with wrapped cells is unreadable.
    (console or RichConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH)).print(view)


def print_tables(table: Sequence[Row], console: Console | None = None) -> None:
    """Show the rows of a whole run: the ops, and the pairs of ranks on each backend."""
    ops = [row for row in table if row.mode != "pair"]
    if ops:
        print_table(ops, console=console)
    pairs = [row for row in table if row.mode == "pair"]
    for name in dict.fromkeys(row.candidate for row in pairs):
        own = [row for row in pairs if row.candidate == name]
        print_table(own, f"Pairs of ranks on {name}, one way", console)


def to_json(table: Sequence[Row], backends: Sequence[str] = (), **facts: Any) -> str:
    """Rows as JSON, with the facts about the machine that are needed to interpret them."""
    return json.dumps({"machine": machine(backends), **facts, "rows": [asdict(row) for row in table]}, indent=2)


_CSV = ("op", "nbytes", "dtype", "ranks", "candidate", "mode", "seconds", "low", "high", "bus_bandwidth", "verified")


def to_csv(table: Sequence[Row]) -> str:
    """Rows as CSV, one line each. Times are in seconds, bandwidths in bytes per second."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV)
    for row in table:
        seconds = row.seconds
        facts = (*row.what[:5], row.mode, seconds.median, seconds.low, seconds.high, row.bus_bandwidth, row.verified)
        writer.writerow(facts)
    return text.getvalue()


def from_json(text: str) -> tuple[list[Row], dict[str, Any]]:
    """The rows of what `to_json` made, and the facts about the machine."""
    try:
        document = json.loads(text)
        return [Row.from_dict(entry) for entry in document["rows"]], dict(document["machine"])
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"this is no result of ringway bench --json: {error}") from None


def rounded(value: float, digits: int = 3) -> str:
    """The value with some digits, without an exponent if it is large."""
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text else text


def in_time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{rounded(seconds / scale)} {unit}"
    return f"{rounded(seconds / 1e-9)} ns"


def in_bytes(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} B"


def in_ratio(ratio: Estimate) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
