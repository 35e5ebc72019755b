"""The command `ringway bench`: what it refuses, what it writes, what it does when ranks die or the user stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from programs import ended_with, ringway_run_variables, run_command
from ringway.bench.cases import CASES
from ringway.bench.runner import Estimate
from ringway.bench.schedule import BRIEF_SIZES, EVENTS, MODES, PAIRS, SCHEDULE, Schedule
from ringway.bench.table import Row, to_json
from ringway.cli import app
from ringway.cli import bench as cli_bench
from ringway.errors import UsageError
from ringway.launch import run as launcher
from ringway.testing import RankPool


def _row(nbytes: int, seconds: float, op: str = "send") -> Row:
    estimate = Estimate(seconds, 0.98 * seconds, 1.02 * seconds, 21)
    return Row(op, nbytes, "float32", 2, "shm", estimate, nbytes / seconds, nbytes / seconds, True)


def test_files_that_cannot_be_written_or_read_are_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[int] = []
    monkeypatch.setattr(launcher, "run", _run_with([], [], started))
    (tmp_path / "no.json").write_text("[]")
    wrong = [[option, str(tmp_path / "absent" / "file")] for option in ("-o", "--csv", "--html", "--compare")]
    wrong += [["--compare", str(tmp_path / "no.json")], ["-o", str(tmp_path)], ["--backends", "nosuch"]]
    wrong += [["--codec", "int8,nosuch"]]
    old = tmp_path / "old.json"
    old.write_text(to_json([_row(8, 1e-6)]))
    (tmp_path / "linked.json").symlink_to(old)
    for other in (old, tmp_path / "linked.json", tmp_path / "." / ".." / tmp_path.name / "old.json"):
        wrong += [["--compare", str(old), option, str(other)] for option in ("--csv", "-o", "--html")]
    wrong += [["--csv", str(tmp_path / "new"), "--html", str(tmp_path / "new")]]
    for options in wrong:
        done = CliRunner().invoke(app, ["bench", "-n", "2", "--ops", "send", "--sizes", "8", *options])
        assert isinstance(done.exception, UsageError), (options, done.exception)
    done = CliRunner().invoke(app, ["bench", "-n", "2", "--ops", "send", "--sizes", "8", "--seconds", "-1"])
    assert done.exit_code == 2
    assert started == []
    assert "send" in old.read_text()


def test_a_file_that_fails_at_the_end_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [[{"begun": "send 8", "number": 0}, {"row": _row(8, 1e-6).to_dict()}]]
    monkeypatch.setattr(launcher, "run", _run_with(told, [0], []))
    done = CliRunner().invoke(app, ["bench", "-n", "2", "--ops", "send", "--sizes", "8", "--csv", "/dev/full"])
    assert done.exit_code == 1
    assert "send: shm is fastest" in done.stdout
    assert "send,8,float32" in done.stdout  # the CSV
    assert "cannot write /dev/full: No space left" in done.output


def test_restarted_ranks_have_only_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    began = [[{"begun": "send", "number": 0}]] * 4
    given: list[float] = []
    run = _run_with(began, [137] * 4, [])

    def slow(command: list[str], ranks: int) -> launcher.Outcome:
        given.append(Schedule.from_json(Path(command[-1], SCHEDULE).read_text()).seconds or 0.0)
        time.sleep(0.05)
        return run(command, ranks)  # type: ignore[no-any-return]

    monkeypatch.setattr(launcher, "run", slow)
    options = ["--ops", "send", "--sizes", "8:1M:x2", "--seconds", "0.12"]
    done = CliRunner().invoke(app, ["bench", "-n", "2", *options])
    assert done.exit_code == 1
    assert given[0] == 0.12
    assert given[1] <= 0.07
    assert given[3] == 0
    assert done.output.count("new ranks go on") == 3
    assert "interrupted" not in done.output


def _run_with(events: list[list[dict[str, Any]]], codes: list[int], started: list[int]) -> Any:
    """A launcher whose ranks tell these events and end like this, one list for each start. 130 is Ctrl-C."""

    def run(command: list[str], ranks: int) -> launcher.Outcome:
        folder = Path(command[-1])
        started.append(len(Schedule.from_json((folder / SCHEDULE).read_text()).items))
        with (folder / EVENTS).open("w") as file:
            file.writelines(json.dumps(event) + "\n" for event in events[len(started) - 1])
        code = codes[len(started) - 1]
        return launcher.Outcome(code, "rank 1 was killed by SIGKILL", interrupted=code == 130)

    return run


def test_a_rank_that_dies_is_reported_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"row": _row(size, 1e-6, "all_reduce").to_dict()} for size in (8, 32)]
    told = [
        [{"begun": "all_reduce 8", "number": 0}, rows[0], {"begun": "all_reduce 16", "number": 1}],
        [{"begun": "all_reduce 32", "number": 0}, rows[1]],
    ]
    started: list[int] = []
    monkeypatch.setattr(launcher, "run", _run_with(told, [137, 0], started))
    done = CliRunner().invoke(app, ["bench", "-n", "2", "--ops", "all_reduce", "--sizes", "8,16,32", "--json"])
    assert (done.exit_code, started) == (1, [3, 1])
    document = json.loads(done.stdout)
    assert [row["nbytes"] for row in document["rows"]] == [8, 32]
    assert document["notes"] == ["all_reduce 16 failed: rank 1 was killed by SIGKILL"]


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = [[{"begun": "send 8", "number": 0}, {"row": _row(8, 1e-6).to_dict()}]]
    monkeypatch.setattr(launcher, "run", _run_with(told, [130], []))
    files = {name: tmp_path / f"file.{name}" for name in ("csv", "html", "json")}
    options = ["--csv", str(files["csv"]), "--html", str(files["html"]), "--json", "-o", str(files["json"])]
    done = CliRunner().invoke(app, ["bench", "-n", "2", "--ops", "send", "--sizes", "8,16", *options])
    assert done.exit_code == 130
    assert json.loads(files["json"].read_text())["rows"][0]["op"] == "send"
    assert "send" in files["csv"].read_text()
    assert "<svg" in files["html"].read_text()
    monkeypatch.setattr(launcher, "run", _run_with(told, [0], []))
    again = ["bench", "-n", "2", "--ops", "send", "--sizes", "8", "--compare", str(files["json"])]
    assert "nothing changed beyond the noise" in CliRunner().invoke(app, again).stdout


def test_codecs_that_apply_to_nothing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (["--ops", "send", "--sizes", "4M"], ["--ops", "all_reduce", "--sizes", "8"]):
        told = [[{"begun": "it", "number": 0}, {"row": _row(8, 1e-6).to_dict()}]]
        monkeypatch.setattr(launcher, "run", _run_with(told, [0], []))
        done = CliRunner().invoke(app, ["bench", "-n", "2", *options, "--codec", "int8"])
        assert done.exit_code == 0
        assert "not measured: int8: codecs compress a synchronous all_reduce of floats, of 1K or more" in done.output


def test_a_run_without_arguments_measures_something_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Schedule] = []

    def run(command: list[str], ranks: int) -> launcher.Outcome:
        given.append(Schedule.from_json(Path(command[-1], SCHEDULE).read_text()))
        return launcher.Outcome(3, "")

    monkeypatch.setattr(launcher, "run", run)
    assert CliRunner().invoke(app, ["bench", "-n", "2"]).exit_code == 3
    items = given[0].items
    assert {item.op for item in items} == {*CASES, PAIRS}
    assert {item.mode for item in items} == set(MODES)
    assert {codec for item in items for codec in item.codecs} == {"int8", "onebit"}
    assert len({str(item) for item in items}) == len(items), "nothing is measured twice"
    sizes = [item.nbytes for item in items if item.mode == "sync" and not item.codecs]
    others = [place for place, item in enumerate(items) if item.mode != "sync" or item.codecs]
    assert set(sizes[: others[0]]) == {0, *BRIEF_SIZES[:3]}
    assert set(sizes[others[0] :]) == set(BRIEF_SIZES[3:])
    CliRunner().invoke(app, ["bench", "-n", "2", "--modes", "async"])
    assert {item.mode for item in given[1].items if item.nbytes} == {"async"}


def test_one_rank_is_told_what_needs_two(pool: RankPool, tmp_path: Path) -> None:
    options = ["--backends", "gloo", "--ops", "send,pairs,inference_all_reduce", "--sizes", "8,64", "--modes", "async"]
    with ringway_run_variables(1) as environments:
        (ended,) = run_command(pool, "bench", *options, folder=tmp_path, environments=environments)
    assert ended_with(ended, 1), ended
    for line in ("send: it has no asynchronous form", "pairs: it needs 2 ranks", "inference_all_reduce: it has no"):
        assert ended.output.count(f"not measured: {line}") == 1, ended.output
    assert "┃" not in ended.output, "no empty table"


def test_a_comparison_with_another_machine_is_doubtful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = [[{"begun": "send 8", "number": 0}, {"row": _row(8, 1e-6).to_dict()}, {"backends": ["shm"]}]]
    file = tmp_path / "old.json"
    document = json.loads(to_json([_row(8, 1e-6)]))
    document["machine"] |= {"torch": "1.0", "cpu": "Z80", "date": "1999-01-01"}
    del document["machine"]["memory"]
    file.write_text(json.dumps(document))
    monkeypatch.setattr(launcher, "run", _run_with(told, [0], []))
    options = ["--ops", "send", "--sizes", "8", "--json", "--compare", str(file)]
    found = json.loads(CliRunner().invoke(app, ["bench", "-n", "2", *options]).stdout)
    assert found["changes"] == ["nothing changed beyond the noise, in 1 comparisons"]
    now = found["machine"]
    assert found["notes"] == [
        f"--compare {file}: {name} was {old} and is {now[name]}, so what changed may not be the code"
        for name, old in (("cpu", "Z80"), ("torch", "1.0"))
    ]
    assert now["backends"] == ["shm"]


@pytest.mark.processes
def test_ctrl_c_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Real ranks, and a real interrupt of the launcher once there are results."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    main, ended = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.02):
            if any('"row"' in file.read_text() for file in tmp_path.glob(f"*/{EVENTS}")):
                signal.pthread_kill(main, signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        options = ["--backends", "gloo", "--ops", "broadcast", "--sizes", "8:1G:x2", "--rounds", "1000"]
        done = CliRunner().invoke(app, ["bench", "-n", "2", *options])
    finally:
        ended.set()
        thread.join()
    shown = done.output + "".join(capfd.readouterr())
    assert done.exit_code == 130, shown
    assert "broadcast: gloo is fastest" in shown
    assert "interrupted: this is what was measured until then" in shown
    assert "Traceback" not in shown


@pytest.mark.processes
def test_ctrl_c_during_the_imports_leaves_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", cli_bench._RANK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as rank:
        while "libc10" not in Path(f"/proc/{rank.pid}/maps").read_text():
            assert rank.poll() is None
            time.sleep(0.005)
        os.kill(rank.pid, signal.SIGINT)
        printed, _ = rank.communicate(timeout=60)
    assert (rank.returncode, printed) == (-signal.SIGINT, b"")
