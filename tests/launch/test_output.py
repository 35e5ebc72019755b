"""The output of the ranks of `ringway run`: all of it is shown, and closing waits for nothing else."""

from __future__ import annotations

import io
import os
import sys
import threading

import pytest

from ringway.launch.output import Output

LINES = [f"line {number}" for number in range(4000)]


class _Blocked(io.StringIO):
    """A stream whose reader has stopped reading, like a pager that waits for a key."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()
        self.blocks = threading.Event()

    def write(self, text: str) -> int:
        self.blocks.set()
        assert self.reads.wait(60)
        return super().write(text)


def _pipes() -> tuple[list[int], list[io.BufferedReader]]:
    pairs = [os.pipe() for _ in range(2)]
    return [write for _, write in pairs], [os.fdopen(read, "rb") for read, _ in pairs]


def _shown(lines: list[str]) -> str:
    return "".join(f"[rank 0] {line}\n" for line in lines)


@pytest.mark.timeout(90)
def test_a_slow_reader_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = _Blocked()
    monkeypatch.setattr(sys, "stdout", stdout)
    output = Output()
    ends, pipes = _pipes()
    output.show(0, *pipes)
    os.write(ends[0], _lines(LINES[:1]))
    assert stdout.blocks.wait(60)
    os.write(ends[0], _lines(LINES[1:]))
    for end in ends:
        os.close(end)
    looks = 0

    def look() -> bool:  # the reader goes on only after several looks, while closing waits
        nonlocal looks
        looks += 1
        if looks == 5:
            stdout.reads.set()
        return False

    output.close(look)
    assert stdout.getvalue() == _shown(LINES)


@pytest.mark.timeout(90)
def test_closing_gives_up_on_a_reader_if_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = _Blocked()
    monkeypatch.setattr(sys, "stdout", stdout)
    output = Output()
    ends, pipes = _pipes()
    output.show(0, *pipes)
    os.write(ends[0], _lines(LINES[:1]))
    assert stdout.blocks.wait(60)
    output.close(lambda: True)
    assert stdout.getvalue() == ""
    stdout.reads.set()
    for end in ends:
        os.close(end)


@pytest.mark.timeout(90)
def test_a_process_that_holds_a_pipe_open_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe never ends, and what the rank wrote last has no newline."""
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    output = Output()
    ends, pipes = _pipes()
    output.show(0, *pipes)
    os.write(ends[0], _lines(LINES) + b"half a line")
    output.close(lambda: False)
    assert stdout.getvalue() == _shown([*LINES, "half a line"])
    for end in ends:
        os.close(end)


def _lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.mark.timeout(90)
def test_a_line_without_an_end_is_shown_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, it would fill the launcher's memory."""
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    output = Output()
    ends, pipes = _pipes()
    output.show(0, *pipes)
    for _ in range(30):
        os.write(ends[0], b"x" * 10_000)
    for end in ends:
        os.close(end)
    output.close(lambda: False)
    parts = [line.removeprefix("[rank 0] ") for line in stdout.getvalue().splitlines()]
    assert len(parts) > 1
    assert "".join(parts) == "x" * 300_000
