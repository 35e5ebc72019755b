"""What changed between two runs, beyond their noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringway.bench.reading import geometric_mean
from ringway.bench.table import Row

_SMALLEST = 0.1
"""Changes below a tenth are left to longer runs."""


@dataclass(frozen=True)
class Change:
    """An op on one candidate, over all sizes that both runs have. `ratio` is the new time relative to the old one."""

    op: str
    candidate: str
    mode: str
    ratio: float
    sizes: int
    apart: int
    """At how many sizes the intervals of the two runs do not touch."""

    @property
    def changed(self) -> bool:
        """Machines drift, so one size alone does not count unless it is the only one."""
        beyond = self.ratio > 1 + _SMALLEST or self.ratio < 1 / (1 + _SMALLEST)
        return beyond and 2 * self.apart > self.sizes


def compare(old: Sequence[Row], new: Sequence[Row]) -> list[Change]:
    """One entry for each op and candidate that both runs have, the largest change first."""
    before = {row.what: row for row in old}
    pairs: dict[tuple[str, str, str], list[tuple[Row, Row]]] = {}
    for row in new:
        if row.what in before:
            pairs.setdefault((row.op, row.candidate, row.mode), []).append((before[row.what], row))
    changes = []
    for (op, candidate, mode), rows in pairs.items():
        ratio = geometric_mean([after.seconds.median / earlier.seconds.median for earlier, after in rows])
        apart = sum(
            after.seconds.low > earlier.seconds.high or after.seconds.high < earlier.seconds.low
            for earlier, after in rows
        )
        changes.append(Change(op, candidate, mode, ratio, len(rows), apart))
    return sorted(changes, key=lambda change: -max(change.ratio, 1 / change.ratio))


def in_words(changes: Sequence[Change]) -> list[str]:
    lines = []
    for change in changes:
        if change.changed:
            factor = max(change.ratio, 1 / change.ratio)
            mode = "" if change.mode == "sync" else f" {change.mode}"
            how = "slower" if change.ratio > 1 else "faster"
            lines.append(
                f"{change.op}{mode} on {change.candidate} is {factor:.2f} times {how} "
                f"(beyond the noise at {change.apart} of {change.sizes} sizes)"
            )
    if not changes:
        return ["the two runs have nothing in common: compare runs with the same ops, sizes and ranks"]
    return lines or [f"nothing changed beyond the noise, in {len(changes)} comparisons"]
