"""What a run has found so far, and the forms in which it is shown."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console

from ringway.bench.compare import compare, in_words
from ringway.bench.machine import differences, machine
from ringway.bench.page import page
from ringway.bench.reading import reading
from ringway.bench.table import Row, from_json, print_tables, to_csv, to_json
from ringway.errors import UsageError


@dataclass
class Findings:
    """What a run has told so far."""

    rows: list[Row] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    begun: int | None = None
    """The item that was measured last."""

    def take(self, event: dict[str, Any]) -> None:
        if "row" in event:
            self.rows.append(Row.from_dict(event["row"]))
        elif "backends" in event:
            self.backends = event["backends"]
        elif "skipped" in event:
            self.skipped[event["skipped"]] = event["reason"]
        elif "refused" in event:
            self._note(f"not measured: {event['refused']}: {event['reason']}")
        elif "nothing" in event:
            self._note(f"nothing was measured: none of {', '.join(event['nothing'])} works here")
        elif "begun" in event:
            self.begun = event["number"]
        elif "late" in event:
            self._note(f"time was up: {event['late']} measurements are missing (--seconds allows more)")

    def _note(self, note: str) -> None:
        """Ranks that go on after others died tell some of it again."""
        if note not in self.notes:
            self.notes.append(note)


@dataclass(frozen=True)
class Formats:
    """Where the results go."""

    output: Path | None
    as_json: bool
    csv: Path | None
    html: Path | None
    compare: Path | None

    def check(self) -> list[str]:
        """Raise UsageError now, rather than after minutes of measuring. Returns why a comparison will say little."""
        for path in filter(None, (self.output, self.csv, self.html)):
            if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
                raise UsageError(f"cannot write {path}: it is a folder, or its folder is missing or read-only")
        for (option, path), (other, same) in combinations(self._given(), 2):
            if path.resolve() == same.resolve() or (path.is_file() and same.is_file() and path.samefile(same)):
                raise UsageError(f"{option} and {other} name the same file, {path}: one would overwrite the other")
        changed = differences(self.earlier()[1], machine())
        return [f"--compare {self.compare}: {what}, so what changed may not be the code" for what in changed]

    def _given(self) -> Iterator[tuple[str, Path]]:
        """The files, without devices such as /dev/null."""
        named = (("--output", self.output), ("--csv", self.csv), ("--html", self.html), ("--compare", self.compare))
        return ((option, path) for option, path in named if path is not None and (path.is_file() or not path.exists()))

    def earlier(self) -> tuple[list[Row], dict[str, Any]]:
        """The results to compare with, and the machine's facts then."""
        if self.compare is None:
            return [], {}
        try:
            return from_json(self.compare.read_text())
        except OSError as error:
            raise UsageError(f"--compare {self.compare}: {error.strerror or error}") from None


def show(findings: Findings, formats: Formats) -> bool:
    """Prints and writes the results, or only says why there are none. Returns whether all files were written."""
    for name, reason in findings.skipped.items():
        print(f"ringway bench: skipped {name}: {reason}", file=sys.stderr)
    written = not findings.rows or _show_rows(findings, formats)
    for note in findings.notes:
        print(f"ringway bench: {note}", file=sys.stderr)
    return written


def _show_rows(findings: Findings, formats: Formats) -> bool:
    table = findings.rows
    said = reading(table)
    changes = [] if formats.compare is None else in_words(compare(formats.earlier()[0], table))
    if formats.as_json:
        facts = {"left_out": findings.skipped, "notes": findings.notes, "reading": said, "changes": changes}
        text = to_json(table, findings.backends, **facts) + "\n"
    elif formats.output is not None:
        drawn = io.StringIO()
        print_tables(table, Console(file=drawn, width=140))
        text = drawn.getvalue()
    written = True
    if formats.output is not None:
        written = _write(formats.output, text)
    elif formats.as_json:
        print(text, end="")
    else:
        print_tables(table)
    if not formats.as_json or formats.output is not None:
        for line in (*said, *changes):
            print(line)
    if formats.csv is not None:
        written &= _write(formats.csv, to_csv(table))
    if formats.html is not None:
        written &= _write(formats.html, page(table, machine(findings.backends)))
    return written


def _write(path: Path, text: str) -> bool:
    """Prints the text if the file cannot be written, so that it is not lost."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(text, end="")
        print(f"ringway bench: cannot write {path}: {error.strerror or error}", file=sys.stderr)
        return False
    return True
