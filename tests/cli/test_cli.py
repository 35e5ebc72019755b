"""The command, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

import ringway
from programs import ended_with, ringway_run_variables, run_command, run_program
from ringway.cli import app, demo_rank, main
from ringway.cli import bench as cli_bench
from ringway.cli import run as cli_run
from ringway.config import SETTINGS, schema
from ringway.errors import ConfigError, UsageError
from ringway.launch import run as launcher
from ringway.testing import RankPool

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "job7",
}


def _env(*arguments: str, environ: dict[str, str | None] | None = None) -> str:
    done = CliRunner().invoke(app, ["env", *arguments], env={"COLUMNS": "200", **(environ or {})})
    assert done.exit_code == 0, done.output
    return done.output


def test_run_passes_a_replacement_on_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | None] = []

    def run(*_: object, **__: object) -> launcher.Outcome:
        given.append(os.environ.get("RINGWAY_REPLACE"))
        raise UsageError("enough")

    monkeypatch.setattr(launcher, "run", run)
    for arguments, expected in (([], None), (["--replace", "gloo=shm"], "gloo:shm")):
        with mock.patch.dict(os.environ):
            CliRunner().invoke(app, ["run", "-n", "1", *arguments, sys.executable])
        assert given.pop() == expected
    wrong = CliRunner().invoke(app, ["run", "-n", "1", "--replace", "nccl=shm", sys.executable])
    assert isinstance(wrong.exception, ConfigError)
    assert not given


def test_env_without_a_launcher() -> None:
    facts = json.loads(_env("--json"))
    assert facts["launcher"]["source"] == "no launcher"
    assert (facts["launcher"]["rank"], facts["launcher"]["size"]) == (0, 1)
    assert facts["choice"]["backend"]
    assert facts["choice"]["reason"].startswith("a world of one")
    assert facts["backends"]["gloo"]["available"] is True
    assert set(facts["config"]) == set(SETTINGS)


def test_env_shows_every_launcher_that_was_seen_and_each_values_source() -> None:
    environ: dict[str, str | None] = {**TORCHRUN, "PMI_RANK": "9", "PMI_SIZE": "2", "RINGWAY_TIMEOUT": "77"}
    facts = json.loads(_env("--json", environ=environ))
    assert facts["launcher"]["source"] == "torchrun"
    assert facts["launcher"]["address"] == "node1"
    seen = {entry["source"]: entry for entry in facts["seen"]}
    assert seen["torchrun"]["chosen"] is True
    assert "rank 9 is not below" in seen["PMI (MPICH, Intel MPI)"]["error"]
    assert facts["config"]["timeout"] == {"value": 77.0, "source": "RINGWAY_TIMEOUT"}


def test_env_as_a_table() -> None:
    text = _env(environ={**TORCHRUN, "RINGWAY_TIMEOT": "3"})
    for words in ("torchrun", "used: local rank 1", "address node1", "port 29400", "comms_logger.enabled"):
        assert words in text
    assert "Would pick:" in text
    assert "RINGWAY_TIMEOT is not a setting; did you mean RINGWAY_TIMEOUT?" in text


def test_env_of_a_launcher_that_contradicts_itself() -> None:
    text = _env(environ={"RANK": "5", "WORLD_SIZE": "2"})
    assert "rank 5 is not below the world size 2 (seen: RANK=5, WORLD_SIZE=2)" in text


def test_env_shows_the_others_when_the_innermost_contradicts_itself() -> None:
    environ: dict[str, str | None] = {"RANK": "5", "WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "2"}
    facts = json.loads(_env("--json", environ=environ))
    assert facts["launcher"] is None
    seen = {entry["source"]: entry for entry in facts["seen"]}
    assert "rank 5 is not below" in seen["environment"]["error"]
    assert seen["PMI (MPICH, Intel MPI)"]["size"] == 2
    assert not any(entry["chosen"] for entry in facts["seen"])
    assert "PMI (MPICH, Intel MPI)" in _env(environ=environ)


def test_env_of_a_backend_that_cannot_be() -> None:
    facts = json.loads(_env("--json", environ={"RINGWAY_BACKEND": "ucc"}))
    assert facts["choice"]["backend"] is None
    assert "backend 'ucc' is not available" in facts["choice"]["reason"]


def test_schema() -> None:
    assert json.loads(_env("--schema")) == schema()


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["run", "-n", "1", "no-such-program"], {}, "there is no program 'no-such-program'"),
        (["run", "-n", "1", "no-such-script.py"], {}, "there is no script 'no-such-script.py' in /"),
        (["run", "-n", "1", "--on-death", "weep", "x.py"], {}, "use stop or keep"),
        (["run", "train.py"], {}, "how many ranks? This host has no GPU that torch sees, and"),
        (["run", "-n", "gpu", "train.py"], {}, "pass -n, as in ringway run -n"),
        (["run", "-n", "0", "train.py"], {}, "-n is '0'; use a number above 0, gpu or cpu"),
        (["env"], {"RINGWAY_TIMEOUT": "soon"}, "timeout is 'soon' in RINGWAY_TIMEOUT"),
    ],
)
def test_our_errors_are_one_line_without_a_traceback(
    arguments: list[str],
    environ: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["ringway", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    reported = capsys.readouterr().err
    assert reported.startswith("ringway: ")
    assert words in reported
    assert "Traceback" not in reported
    assert reported.count("\n") == 1


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"ringway {ringway.__version__}\n")


def test_python_m_ringway() -> None:
    command = [sys.executable, "-m", "ringway", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"ringway {ringway.__version__}\n"), done.stderr


def test_run_takes_torchruns_option_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def run(command: list[str], ranks: int, **options: object) -> launcher.Outcome:
        started.append(ranks)
        return launcher.Outcome(0, "")

    monkeypatch.setattr(launcher, "run", run)
    monkeypatch.setattr(cli_run, "_gpus", lambda: 3)
    monkeypatch.setattr("ringway.launch.cpus.usable_cpus", lambda: 5)
    for options in (
        ["--nproc-per-node", "2"],
        ["--nproc_per_node=4"],
        ["-n", "cpu"],
        ["-n", "gpu"],
        ["--nproc-per-node=auto"],
        [],
    ):
        done = CliRunner().invoke(app, ["run", *options, "true"])
        assert done.exit_code == 0, done.output
    assert started == [2, 4, 5, 3, 3, 3]


def test_help_does_not_break_defaults() -> None:
    text = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    words = {word.strip("[](),") for word in text.replace("│", " ").split()}
    assert {"8,64K,4M", "float32", "sync", "cpu"} <= words, text


def test_bench_alone_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def run(command: list[str], ranks: int) -> launcher.Outcome:
        started.append(ranks)
        return launcher.Outcome(3, "")

    monkeypatch.setattr(launcher, "run", run)
    monkeypatch.setattr(cli_bench, "usable_cpus", lambda: 1)
    done = CliRunner().invoke(app, ["bench"])
    assert (done.exit_code, started) == (3, [2])
    monkeypatch.setattr(cli_bench, "_bench_here", lambda *arguments: started.append(0))
    assert CliRunner().invoke(app, ["bench"], env=TORCHRUN).exit_code == 0
    assert started == [2, 0], "under a launcher, this process is a rank"


def test_demo_ends_with_a_table_in_which_all_is_right(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], ranks: int) -> launcher.Outcome:
        """What the launcher does, on forked ranks."""
        assert command[:3] == [sys.executable, "-m", "ringway.cli.demo_rank"]
        with ringway_run_variables(ranks) as environments:
            ended = run_program(pool, Path(demo_rank.__file__), *command[3:], environments=environments)
        assert all(map(ended_with, ended)), ended
        return launcher.Outcome(0, f"{ranks} ranks finished")

    monkeypatch.setattr(launcher, "run", run)
    monkeypatch.setenv("COLUMNS", "80")
    app(["demo"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "on every rank" in printed
    assert printed.count("correct") == 7
    assert "all_gather_into_tensor, 1 MiB" in printed  # the table fits 80 columns
    assert "WRONG" not in printed
    assert "weights are equal on all ranks" in printed
    assert "ringway demo: 2 ranks finished" in printed


def test_bench_measures_what_it_has_verified(pool: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    options = ["--ops", "all_reduce,broadcast", "--sizes", "8,4096", "--rounds", "3", "--json", "-o", str(file)]
    with ringway_run_variables(2) as environments:
        ranks = run_command(pool, "bench", *options, folder=tmp_path, environments=environments)
    assert all(map(ended_with, ranks)), ranks
    rows = json.loads(file.read_text())["rows"]
    assert {(row["op"], row["nbytes"]) for row in rows} == {
        (op, nbytes) for op in ("all_reduce", "broadcast") for nbytes in (8, 4096)
    }
    assert {"shm", "gloo"} <= {row["candidate"] for row in rows}
    assert all(row["verified"] and row["seconds"]["median"] > 0 for row in rows)
