"""The policy: what a table may say, that all ranks decide alike, and that calls go where it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ringway.backends import policy
from ringway.backends.policy import MixedBackend, Policy, Rule
from ringway.bench.tune import winners
from ringway.errors import ConfigError
from ringway.testing import RankContext, RankPool
from ringway.world import world

TABLE = {
    "world_size": 2,
    "rules": [
        {"op": "all_reduce", "up_to": 1024, "backend": "gloo"},
        {"op": "all_reduce", "dtype": "float16", "backend": "gloo"},
        {"op": "broadcast", "backend": "gloo"},
    ],
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"world_size": 4}, "made for 4 ranks, and this job has 2"),
        ({"rules": [{"op": "all_reduce", "backend": "glooo"}]}, "did you mean 'gloo'"),
        ({"rules": [{"op": "all_reduce", "backend": "nccl"}]}, "a policy can mix"),
        ({"rules": [{"op": "allreduce", "backend": "gloo"}]}, "did you mean 'all_reduce'"),
        ({"rules": [{"op": "send", "backend": "gloo"}]}, "messages always go through"),
        ({"rules": [{"op": "all_to_all", "up_to": 8, "backend": "gloo"}]}, "need not agree"),
        ({"rules": [{"up_to": 8, "backend": "gloo"}]}, "need not agree"),
        ({"rules": [{"op": "all_reduce", "upto": 8, "backend": "gloo"}]}, "did you mean 'up_to'"),
        ({"rules": [{"op": "all_reduce", "up_to": -1, "backend": "gloo"}]}, "expected a whole number"),
        ({"rules": [{"op": "all_reduce", "dtype": "float17", "backend": "gloo"}]}, "did you mean 'float1"),
        ({"rules": [{"op": "all_reduce"}]}, "names no backend"),
        ({"rules": "gloo"}, "is not a list"),
        ({"version": 7}, "has version 7"),
        ({"rule": []}, "did you mean 'rules'"),
        ({"world_size": 0}, "not a number of ranks"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        policy.load({**TABLE, **change}, 2)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the policy"):
        policy.load(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        policy.load(tmp_path / "bad.json")


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    table = policy.load(TABLE, 2)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(table.document()))
    again = policy.load(path, 2)
    assert again.rules == table.rules
    assert again.digest == table.digest
    other = policy.load({**TABLE, "rules": TABLE["rules"][:2]}, 2)
    assert other.digest != table.digest


def test_rules_are_for_groups_of_their_size() -> None:
    table = Policy(4, (Rule("gloo"), Rule("shm", ranks=2)), {}, "here")
    assert [rule.backend for rule in table.rules_for(4)] == ["gloo"]
    assert [rule.backend for rule in table.rules_for(2)] == ["shm"]
    assert table.rules_for(3) == []


def _mixed_calls(context: RankContext) -> dict[str, Any]:
    """Counts which backend does what, in a world of shm with some calls given to gloo."""
    world.policy = policy.load(TABLE, context.world_size)
    try:
        dist = context.start("shm", group_name="mixed")
    finally:
        world.policy = None
    backend = dist.communicator().backend
    assert isinstance(backend, MixedBackend)
    chosen = {}
    for name, tensor in {
        "small": torch.ones(256),
        "large": torch.ones(257),
        "half": torch.ones(1000, dtype=torch.float16),
        "huge": torch.ones(1 << 20),
    }.items():
        chosen[name] = backend.choose(policy.OP_BY_NAME["all_reduce"], tensor.nbytes, tensor.dtype, "cpu")
        dist.all_reduce(tensor)
        assert bool((tensor == context.world_size).all())
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert bool((tensor == context.world_size**2).all())
    value = torch.full((5,), float(context.rank))
    dist.broadcast(value, 1)
    gathered = [torch.zeros(5) for _ in range(context.world_size)]
    dist.all_gather(gathered, torch.full((5,), float(context.rank)))
    pair = dist.new_group([0], backend="gloo")
    if context.rank == 0:
        dist.all_reduce(torch.ones(1), group=pair)
    found = {
        "chosen": chosen,
        "broadcast": value[0].item(),
        "gathered": [t[0].item() for t in gathered],
        "origins": dist.communicator().origins()["cpu"],
        "name": dist.get_backend(),
    }
    dist.destroy_process_group()
    return found


def test_calls_go_where_the_table_says(pool: RankPool) -> None:
    for found in pool.run(_mixed_calls, world_size=2):
        assert found["chosen"] == {"small": "gloo", "large": "shm", "half": "gloo", "huge": "shm"}
        assert found["broadcast"] == 1.0
        assert found["gathered"] == [0.0, 1.0]
        assert found["origins"]["all_reduce"] == "gloo up to 1024 B, else gloo of float16, else shm"
        assert found["origins"]["all_gather"] == "shm"
        assert found["name"] == "shm"


def _different_tables(context: RankContext) -> str:
    rules = [{"op": "all_reduce", "up_to": 1024 + context.rank, "backend": "gloo"}]
    world.policy = policy.load({"world_size": 2, "rules": rules}, 2)
    try:
        context.start("shm", group_name="differing")
    except ConfigError as error:
        return str(error)
    finally:
        world.policy = None
    return ""


def test_ranks_with_different_tables_are_told(pool: RankPool) -> None:
    for said in pool.run(_different_tables, world_size=2):
        assert "rank 1 loaded another policy than rank 0" in said


def _conform(context: RankContext) -> int:
    """A mixed group does what every backend has to: some cases of the suite on it."""
    from ringway.testing.conformance import Setting, all_cases
    from ringway.testing.probe import Probe

    world.policy = policy.load(TABLE, context.world_size)
    try:
        dist = context.start("shm", group_name="conforming")
    finally:
        world.policy = None
    setting, ran = Setting("shm", context.world_size), 0
    for name in ("all_reduce", "broadcast", "every_op_in_flight_at_once", "strided_broadcast", "both_send_first"):
        case = all_cases()[name]
        assert setting.admits(case)
        probe = Probe(dist, None, context.rank, list(range(context.world_size)), context.store, name)
        case.run(probe)
        assert probe.findings == []
        ran += 1
    dist.destroy_process_group()
    return ran


def test_a_mixed_group_conforms(pool: RankPool) -> None:
    assert pool.run(_conform, world_size=2) == [5, 5]


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


def _command(*arguments: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "ringway.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_tune_writes_what_the_next_run_loads(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    measured = ("--backends", "shm,gloo", "--ops", "all_reduce,barrier", "--sizes", "8,65536", "--rounds", "3")
    printed = _command("tune", "-n", "2", "-o", str(file), *measured)
    assert "all_reduce" in printed
    table = policy.load(file, 2)
    assert {rule.op for rule in table.rules} == {"all_reduce", "barrier"}
    assert set(table.measured["microseconds"]["all_reduce"]["8"]) == {"shm", "gloo"}
    program = Path(__file__).with_name("tuned_ranks.py")
    said = _command("run", "-n", "2", str(program), RINGWAY_POLICY=str(file))
    found = json.loads(said[said.index("{") :])
    assert found["sum"] == 2.0
    assert found["origins"]["all_reduce"].startswith(table.rules[0].in_words())
    shown = json.loads(_command("env", "--json", RINGWAY_POLICY=str(file)))
    assert [rule["op"] for rule in shown["policy"]["rules"]] == [rule.op for rule in table.rules]
