"""The line that says who is in an elastic run."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

import pytest
import torch.distributed as c10d

from ringway.job.elastic.roster import Arrival, Member, Roster, standing
from ringway.launch.live import LiveLine, Progress, Standing, described
from ringway.launch.output import _Shared
from ringway.launch.processes import ProcessName


@contextmanager
def _terminal() -> Iterator[tuple[TextIO, int]]:
    """A stream to a terminal, and the descriptor that sees what it shows."""
    reader, writer = pty.openpty()
    with open(writer, "w") as stream:
        yield stream, reader
    os.close(reader)


def _seen(stream: TextIO, reader: int) -> list[str]:
    """The lines on the terminal: what was erased is gone."""
    stream.write("\0")  # a terminal may hand over a part at a time
    stream.flush()
    shown = b""
    while not shown.endswith(b"\0"):
        shown += os.read(reader, 1 << 16)
    text = re.sub("\x1b\\[[0-9;]*m", "", shown[:-1].decode())
    return [line.rpartition("\x1b[2K")[2] for line in text.replace("\r\n", "\n").split("\n")]


def test_what_ranks_print_appears_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    with _terminal() as (stream, reader):
        line = LiveLine(stream)
        assert line.on
        ranks = _Shared(stream, line.aside)
        ranks.write("[rank 0] before\n")
        line.show("generation 1")
        ranks.write("[rank 0] one\n")
        line.show("generation 2, and more than fits into one line of the terminal")
        ranks.write("[rank 1] two\n")
        shown = _seen(stream, reader)
        assert shown[:3] == ["[rank 0] before", "[rank 0] one", "[rank 1] two"]
        assert shown[3].startswith("generation 2")
        assert len(shown[3]) < 40
        line.close()
        assert _seen(stream, reader) == [""]


def test_who_is_in_out_and_joining() -> None:
    own = ProcessName.own()
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        neighbour, elsewhere = replace(own, pid=child.pid), replace(own, namespace="another host")
        gone = replace(own, pid=2**22 + 1)
        facts = Standing(3, [neighbour, elsewhere, gone], [elsewhere])
        text = described(facts, {"0": child.pid, "2": 7}, ["1 (again in 2 s)"])
    finally:
        child.kill()
        child.wait()
    assert text == (
        "generation 3; in: 0 and 1 of other launchers; joining: 2 and 1 of other launchers; out: 1 (again in 2 s)"
    )


def test_without_a_terminal_each_generation_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    store = c10d.HashStore()
    assert standing(store) is None
    roster = Roster(store, 1, 1, 30.0, 30.0)
    member = roster.enroll(0)
    assert roster.next(Arrival(member, 0, whole=True, veteran=False), ()) is not None
    newcomer = Member(9, 0, replace(member.process, namespace="another host"))
    roster._sign_up(2, Arrival(newcomer, 0, whole=True, veteran=False))
    progress = Progress(store, standing)
    for _ in range(3):
        progress._next = 0.0
        progress.update({"0": os.getsid(0)}, ["1"])
    progress.say("a line")
    assert capfd.readouterr().err == (
        "ringway run: generation 1; in: 0; joining: 1 of other launchers; out: 1\nringway run: a line\n"
    )
