"""What the doctor says about one thing: whether it is well, and what to do if it is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
"""From the best to the worst. A warning slows a job down or breaks some jobs; an error breaks every job."""


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    says: str
    advice: str = ""
    host: str = ""
    """Empty for a finding about this host, if the doctor runs on one host only, or about all hosts."""


Findings = Iterator[Finding]


def worst(findings: list[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def ok(subject: str, says: str) -> Finding:
    return Finding("ok", subject, says)


def warning(subject: str, says: str, advice: str) -> Finding:
    return Finding("warning", subject, says, advice)


def error(subject: str, says: str, advice: str) -> Finding:
    return Finding("error", subject, says, advice)


def in_bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
