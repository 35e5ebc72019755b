"""The policy: which tables are valid, and how `ringway tune` makes one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from programs import ended_with, ringway_run_variables, run_command, run_program
from ringway.backends.several import policy
from ringway.backends.several.policy import Policy, Rule
from ringway.bench.tune import winners
from ringway.cli import app
from ringway.errors import ConfigError, UsageError
from ringway.observe.top import snapshot
from ringway.testing import RankPool

TABLE = {
    "world_size": 2,
    "rules": [
        {"op": "all_reduce", "up_to": 1024, "backend": "gloo"},
        {"op": "all_reduce", "dtype": "float16", "backend": "gloo"},
        {"op": "broadcast", "backend": "gloo"},
    ],
}


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"world_size": 4}, "made for 4 ranks, and this job has 2"),
        ({"rules": [{"op": "all_reduce", "backend": "glooo"}]}, "did you mean 'gloo'"),
        ({"rules": [{"op": "all_reduce", "backend": "torch:mpi"}]}, "a policy can mix"),
        ({"rules": [{"op": "all_reduce", "backend": "nccl", "device": "cpu"}]}, "which takes those on cuda"),
        ({"rules": [{"op": "allreduce", "backend": "gloo"}]}, "did you mean 'all_reduce'"),
        ({"rules": [{"op": "send", "backend": "gloo"}]}, "messages always go through"),
        ({"rules": [{"op": "all_to_all", "up_to": 8, "backend": "gloo"}]}, "need not agree"),
        ({"rules": [{"up_to": 8, "backend": "gloo"}]}, "need not agree"),
        ({"rules": [{"op": "all_reduce", "upto": 8, "backend": "gloo"}]}, "did you mean 'up_to'"),
        ({"rules": [{"op": "all_reduce", "up_to": -1, "backend": "gloo"}]}, "expected a whole number"),
        ({"rules": [{"op": "all_reduce", "dtype": "float17", "backend": "gloo"}]}, "did you mean 'float1"),
        ({"rules": [{"op": "all_reduce"}]}, "names no backend"),
        ({"rules": [{"op": ["all_reduce"], "backend": "gloo"}]}, "op is .'all_reduce'. in rule 1"),
        ({"rules": [{"op": "all_reduce", "backend": {}}]}, "expected a name"),
        ({"rules": [{"op": "all_reduce", "ranks": 0, "backend": "gloo"}]}, "from 1 on"),
        ({"rules": [{"op": "all_reduce", "device": "gpu", "backend": "gloo"}]}, "takes those on cpu and cuda"),
        ({"rules": [{"op": "all_reduce", "device": "cuda", "backend": "hierarchical"}]}, "which takes those on cpu"),
        ({"measured": 5}, "'measured' of the policy in the configuration is not a table"),
        ({"rules": "gloo"}, "is not a list"),
        ({"version": 7}, "has version 7"),
        ({"rule": []}, "did you mean 'rules'"),
        ({"world_size": 0}, "not a number of ranks"),
    ],
)
def test_invalid_policies_are_refused(change: dict[str, Any], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        policy.load({**TABLE, **change}, 2)


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (None, "No such file"),
        ("{", "is not valid"),
        ("[" * 100_000, "is not valid"),
        ("[]", "does not contain a table"),
        (b"\xff\xfe", "is not valid"),
        ('{"rules": [], "rules": []}', "the key 'rules' occurs twice"),
    ],
)
def test_a_file_that_is_not_a_policy_is_refused(content: str | bytes | None, reported: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=reported) as caught:
        policy.load(path)
    assert f"{path} (the policy)" in str(caught.value)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        policy.load(tmp_path)


def test_a_saved_policy_loads_unchanged(tmp_path: Path) -> None:
    table = policy.load(TABLE, 2)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(table.document()))
    again = policy.load(path, 2)
    assert again.rules == table.rules
    assert again.digest == table.digest
    other = policy.load({**TABLE, "rules": TABLE["rules"][:2]}, 2)
    assert other.digest != table.digest


def test_rules_apply_to_groups_of_their_size() -> None:
    table = Policy(4, (Rule("gloo"), Rule("shm", ranks=2)), {}, "here")
    assert [rule.backend for rule in table.rules_for(4)] == ["gloo"]
    assert [rule.backend for rule in table.rules_for(2)] == ["shm"]
    assert table.rules_for(3) == []


def test_winners_become_rules() -> None:
    found = {
        "all_reduce": {
            16: {"shm": 1.0, "gloo": 9.0},
            1024: {"shm": 1.01, "gloo": 1.0},  # not clearly faster: stays
            4096: {"shm": 5.0, "gloo": 2.0},
        },
        "all_to_all": {16: {"shm": 1.0, "gloo": 10.0}, 4096: {"shm": 5.0, "gloo": 4.0}},
    }
    assert winners(found) == (
        Rule("shm", "all_reduce", up_to=2048),
        Rule("gloo", "all_reduce"),
        Rule("shm", "all_to_all"),
    )


def test_tune_writes_what_the_next_run_loads(pool: RankPool, tmp_path: Path) -> None:
    (folder := tmp_path / "command").mkdir()
    file = tmp_path / "policy.json"
    measured = ("--backends", "shm,gloo", "--ops", "all_reduce,barrier", "--sizes", "8,65536", "--rounds", "3")
    with ringway_run_variables(2) as environments:
        tuned = run_command(pool, "tune", "-o", str(file), *measured, folder=folder, environments=environments)
    assert all(map(ended_with, tuned)), tuned
    assert "all_reduce" in tuned[0].output
    table = policy.load(file, 2)
    assert {rule.op for rule in table.rules} == {"all_reduce", "barrier"}
    assert set(table.measured["microseconds"]["all_reduce"]["8"]) == {"shm", "gloo"}
    with ringway_run_variables(2) as environments:
        loaded = [variables | {"RINGWAY_POLICY": str(file)} for variables in environments]
        ranks = run_program(pool, Path(__file__).with_name("tuned_ranks.py"), environments=loaded)
    assert all(map(ended_with, ranks)), ranks
    found = json.loads(ranks[0].output)
    assert found["sum"] == 2.0
    assert found["origins"]["all_reduce"].startswith(table.rules[0].in_words())
    shown = CliRunner().invoke(app, ["env", "--json"], env={"RINGWAY_POLICY": str(file)})
    assert [rule["op"] for rule in json.loads(shown.stdout)["policy"]["rules"]] == [rule.op for rule in table.rules]


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--sizes", "8,abc"], "'abc' is not a number of bytes"),
        (["--sizes", "0"], "'0' is not a number of bytes"),
        (["--backends", "ucc"], "ucc cannot be mixed with other backends"),
        (["--device", "tpu"], "tpu: choose cpu, cuda or all"),
    ],
)
def test_tune_refuses_invalid_options_before_it_starts_ranks(arguments: list[str], reported: str) -> None:
    result = CliRunner().invoke(app, ["tune", "-n", "2", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert reported in result.output


@pytest.mark.parametrize("arguments", [["--backends", "glop"], ["--ops", "all_reduc"], ["--ops", "send"]])
def test_tune_refuses_unknown_names(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["tune", "-n", "2", *arguments])
    assert isinstance(result.exception, UsageError)


def test_tune_reports_an_unwritable_file_before_it_measures(pool: RankPool, tmp_path: Path) -> None:
    (ended,) = run_command(pool, "tune", "-o", str(tmp_path), folder=tmp_path)
    assert ended_with(ended, 2), ended
    assert f"cannot write {tmp_path}: it is a folder" in ended.output
    assert "measuring" not in ended.output


def _interrupt_once_they_measure(pool: RankPool) -> None:
    while not any(status.total > 100 for status in snapshot() if status.pid in pool.pids().values()):
        time.sleep(0.1)
    for pid in pool.pids().values():
        os.kill(pid, signal.SIGINT)


def test_an_interrupted_tune_leaves_the_old_table(pool: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text("the table of before")
    folder = tmp_path / "program"
    folder.mkdir()
    options = ["-o", str(file), "--backends", "shm", "--ops", "barrier", "--rounds", "1000000"]
    not_read = {"RINGWAY_POLICY": str(file)}  # not a valid policy, but tune does not read it
    threading.Thread(target=_interrupt_once_they_measure, args=[pool], daemon=True).start()
    with ringway_run_variables(2) as environments:
        ended = run_command(
            pool, "tune", *options, folder=folder, environments=[own | not_read for own in environments]
        )
    for rank in ended:
        assert rank.kind == "died", rank
        assert not ended_with(rank), rank
    assert file.read_text() == "the table of before"
    assert sorted(tmp_path.iterdir()) == [file, folder]
