"""`ringway top` and `ringway report`: what they show, and that text from other processes is escaped."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from rich.console import Console
from typer.testing import CliRunner

from ringway.cli import app
from ringway.observe.log.summary import printable
from ringway.observe.recorder import RecordedCall
from ringway.observe.top import RankStatus, ask_pid, pids, skews, snapshot, table
from ringway.testing import RankContext, RankPool

EVIL = "\x1b[31m[bold]loss[/bold]\x07"


def busy(context: RankContext) -> None:
    dist = context.start("gloo", timeout=timedelta(seconds=190))
    for _ in range(20):
        dist.all_reduce(torch.ones(1024))
    if context.rank == 1:
        context.store.get("looked")
    dist.all_reduce(torch.ones(1024), log_name=EVIL)


def own_pids(pool: RankPool) -> set[int]:
    """The status of the two ranks. The pool may have more ranks from earlier tests, or none yet."""
    return {pid for rank, pid in pool.pids().items() if rank in (0, 1)}


def settled(ranks: list[RankStatus]) -> bool:
    """Whether rank 0 waits for rank 1 and both have answered."""
    doing = [(status.rank, None if status.current is None else status.current.label) for status in ranks]
    return doing == [(0, EVIL), (1, None)]


def rate_of(screen: str) -> str:
    """The calls a second of rank 0. Ranks of other tests may be on the screen too."""
    head = screen.splitlines()[1]
    row = next(line for line in screen.splitlines() if "[bold]loss" in line)
    return row[head.index("Calls/s") : head.index("Calls/s") + 7].strip()


def look(pool: RankPool, address: tuple[str, int]) -> tuple[list[RankStatus], Any]:
    """The screen once rank 0 waits for rank 1. Retries, because a rank that is slow to answer is left out."""
    deadline = time.monotonic() + 120
    while True:
        ranks = [status for status in snapshot() if status.pid in own_pids(pool)]
        if settled(ranks) or time.monotonic() > deadline:
            result = CliRunner().invoke(app, ["top", "--once"], env={"COLUMNS": "40"})
            shown = "[bold]loss" in result.output and "the program's own code" in result.output
            if (shown and rate_of(result.output).isdigit()) or time.monotonic() > deadline:
                break
        time.sleep(0.05)
    store = c10d.TCPStore(*address, is_master=False)
    c10d.PrefixStore(f"run{pool._runs}", store).set("looked", "1")
    return ranks, result


def test_top_shows_the_current_call_of_each_rank(pool: RankPool) -> None:
    seen: list[Any] = []
    address = pool._store_address()  # made here, because the run would make a second one
    watcher = threading.Thread(target=lambda: seen.append(look(pool, address)))
    watcher.start()
    pool.run(busy, world_size=2, timeout=200)
    watcher.join()
    ranks, result = seen[0]
    assert [(status.rank, status.size) for status in ranks] == [(0, 2), (1, 2)]
    assert ranks[0].job == ranks[1].job != ""
    current = ranks[0].current
    assert current is not None
    assert (current.op, current.label) == ("all_reduce", EVIL)
    assert ranks[1].current is None
    assert ranks[0].gigabytes_a_second
    assert result.exit_code == 0, result.output
    assert "all_reduce" in result.output
    assert "the program's own code" in result.output
    assert "\x1b[31m[bold]" not in result.output
    assert "\x07" not in result.output
    assert "[bold]loss" in result.output  # shown unchanged
    head = result.output.splitlines()[1]
    assert head.split() == ["Rank", "PID", "In", "Since", "Calls", "Calls/s", "GB/s", "Behind"], "not a terminal"
    assert rate_of(result.output).isdigit(), result.output


def test_top_says_if_no_rank_is_running() -> None:
    console = Console(record=True, width=120)
    console.print(table([]))
    assert "No ringway rank" in console.export_text()
    assert ask_pid(1) is None
    assert 1 not in pids()


def shown(width: int) -> str:
    call = RecordedCall(3, "all_reduce", 4096, None, "SUM", None, "[red]dp", EVIL, None, 1_000, 0, "issued", 2)
    ranks = [RankStatus(rank, 2, "host", 1000 + rank, 2_000_000_000, 77, (call,), "") for rank in range(2)]
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(table(ranks, width=console.width))
    return console.export_text()


@pytest.mark.parametrize("width", [40, 64, 80, 200])
def test_a_narrow_terminal_shows_the_rank_its_call_and_the_time(width: int) -> None:
    lines = shown(width).splitlines()
    assert lines[2].strip().startswith("0/2")
    assert "all_reduce" in lines[2]
    assert "2.0 s" in lines[2]
    assert ("1000" in lines[2]) == (width > 40)
    assert len(lines) == 4


def test_jobs_on_the_same_host_are_shown_separately() -> None:
    def status(job: str, rank: int, pid: int, came: int) -> RankStatus:
        call = RecordedCall(0, "all_reduce", 8, None, "SUM", None, "0", "", None, came, came + 10, "completed", 2)
        return RankStatus(rank, 2, "host", pid, 10**10, 1, (call,), "", job)

    ranks = [status("a", 0, 1, 1_000), status("a", 1, 2, 2_000_000), status("b", 0, 3, 9 * 10**9)]
    late = skews(ranks)
    assert late[2] == pytest.approx(0.002, abs=1e-5)
    assert 3 not in late  # no other rank of its job is on this host
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(table(ranks, width=100))
    lines = console.export_text().splitlines()
    assert lines[0].startswith("3 ranks of 2 jobs on host")
    assert [line.split()[0] if line.strip() else "" for line in lines[2:]] == ["0/2", "1/2", "", "0/2"]


def test_ranks_of_another_version_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringway.observe.top._SECONDS", 60.0)  # a silent rank that is left out proves nothing
    name = f"ringway/{os.getpid() + 10_000_000}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b'{"facts": {}, "calls": [[1, 2]]}')

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask_pid(os.getpid() + 10_000_000) is None
        thread.join()


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b]0;x\x07\nb") == "a�]0;x��b"
    assert printable("x" * 100, 10) == "x" * 9 + "…"


def test_the_report_command_refuses_a_file_that_is_not_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["report", str(path), "-o", str(tmp_path / "r.html")])
    assert result.exit_code != 0
