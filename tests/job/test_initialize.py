"""`ringway.initialize`, and the training example that uses it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringway
from programs import ended_with, ringway_run_variables, run_program
from ringway.errors import CollectiveMismatch, ConfigError, UsageError
from ringway.parallel import Column
from ringway.testing import RankContext, RankPool

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
QUICK = ["--steps", "4", "--width", "16", "--blocks", "1", "--context", "16", "--batch", "4", "--every", "1"]


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(context: RankContext, *arguments: str) -> list[float]:
    context.start("gloo")
    example = _example()
    return example.train(example.parsed([*QUICK, *arguments]))


def one_object(context: RankContext) -> dict[str, Any]:
    dist = context.start("gloo")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.zeros_(model[0].bias)  # so that the same neurons are active for all inputs below
    whole = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    config = {"comms_logger": {"enabled": True, "prof_all": True}, "ringway": {"timeout": 77}}
    plan = {"0": "column", "2": "row"}
    runtime = ringway.initialize(config, model, plan=plan, model_parallel_size=2, verbose=False)
    try:
        assert runtime.config.timeout == 77
        assert runtime.mesh.shape == (context.world_size // 2, 2)
        assert model[0].weight.shape == (4, 4)
        with runtime.no_sync():
            model(torch.ones(1, 4)).sum().backward()
        alone = model[0].weight.grad.clone()
        model.zero_grad()
        model(torch.full((1, 4), 1.0 + ringway.get_rank(runtime.data_group))).sum().backward()
        assert {name: tuple(value.shape) for name, value in runtime.full_state_dict().items()} == whole
        torch.testing.assert_close(model[0].weight.grad.sign(), alone.sign())
        logged = ringway.get_logged_comm_ops()
    finally:
        runtime.close()
        runtime.close()
        ringway.configure(enabled=False)
        ringway.reset_log()
    assert dist.is_initialized()  # it was initialized before, so it stays
    with pytest.raises(UsageError, match="does not divide"):
        ringway.initialize(None, model, plan={"0": "column"}, model_parallel_size=3, verbose=False)
    return {"logged": logged}


def one_rank_differs(context: RankContext) -> None:
    """All ranks get the error, not only those of the group with the difference."""
    context.start("gloo")

    def given(kind: str) -> dict[str, Any]:
        other = context.rank == 3 and kind
        layers: list[nn.Module] = [nn.Linear(4, 8), nn.Linear(8, 6 if other == "model" else 2)]
        return {
            "model": nn.Sequential(*layers),
            "plan": {"0": Column(gather_output=True) if other == "plan" else "column", "1": "row"},
            "model_parallel_size": 4 if other == "size" else 2,
            "codec": "int9" if other == "codec" else None,
        }

    for kind in ("model", "plan", "size", "codec"):
        settings = given(kind)
        own_mistake = (context.rank, kind) == (3, "codec")
        with pytest.raises(UsageError if own_mistake else CollectiveMismatch) as caught:
            ringway.initialize(None, verbose=False, **settings)
        assert ("int9" if kind == "codec" else "on rank 3: ") in str(caught.value)
        assert settings["model"][0].weight.shape == (8, 4)  # still whole
    ringway.initialize(None, verbose=False, **given("")).close()


def replicas_stay_alike(context: RankContext, codec: str) -> None:
    """Parameters that every rank of a model group has whole must stay equal, whatever a codec does to the parts."""
    context.start("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3)]
    model = nn.Sequential(*layers)
    plan = {"2": "column", "4": "row"}
    runtime = ringway.initialize(None, model, plan=plan, model_parallel_size=2, codec=codec, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    chance = torch.Generator().manual_seed(ringway.get_rank(runtime.data_group))
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=chance)).square().sum().backward()
        optimizer.step()
    replicated = [*layers[0].parameters(), *layers[1].parameters(), layers[4].bias]
    whole = torch.cat([p.detach().flatten() for p in replicated])
    everybody = ringway.allgather_object(whole)
    assert all(torch.equal(one, everybody[0]) for one in everybody)
    runtime.close()


def logger_as_it_was(context: RankContext) -> None:
    """A configuration that does not mention the logger leaves it unchanged."""
    context.start("gloo")
    ringway.configure(enabled=True)
    try:
        ringway.initialize({"ringway": {"timeout": 60}}, verbose=False)
        ringway.all_reduce(torch.ones(1), log_name="still logged")
        assert "still logged" in ringway.get_logged_comm_ops()
    finally:
        ringway.configure(enabled=False)
        ringway.reset_log()


def test_all_ranks_of_the_job_report_one_that_differs(pool: RankPool) -> None:
    pool.run(one_rank_differs, world_size=4)


@pytest.mark.parametrize("codec", ["onebit", "int8"])
def test_replicas_stay_alike_under_a_codec(pool: RankPool, codec: str) -> None:
    pool.run(replicas_stay_alike, codec, world_size=4)


def test_the_logger_stays_as_it_was(pool: RankPool) -> None:
    pool.run(logger_as_it_was, world_size=2)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_the_example_learns_alike_on_any_ranks(pool: RankPool, codec: str | None) -> None:
    extra = [] if codec is None else ["--codec", codec]
    (alone,) = pool.run(trained, world_size=1)
    assert alone[-1] < alone[0]
    layouts: list[tuple[int, list[str]]] = [(2, [])]
    if codec is None:
        layouts += [(2, ["--model-parallel", "2"]), (4, ["--model-parallel", "2", "--sequence"])]
    for size, arguments in layouts:
        for losses in pool.run(trained, *arguments, *extra, world_size=size):
            assert losses == pytest.approx(alone, rel=1e-4 if codec is None else 1e-2)


def test_the_example_runs_as_it_is(pool: RankPool) -> None:
    with ringway_run_variables(2) as environments:
        ranks = run_program(pool, EXAMPLE, *QUICK, environments=environments)
    assert all(map(ended_with, ranks)), ranks
    assert "step    3  loss" in ranks[0].output
    assert "Comm. Op" in ranks[0].output
    assert "gradients 0" in ranks[0].output


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--width 18", "--width 18 is not divisible by --heads 4"),
        ("--model-parallel 3", "--heads 4 cannot be split over --model-parallel 3"),
        ("--model-parallel 0", "--heads 4 cannot be split over --model-parallel 0"),
        ("--sequence", "--sequence needs a --model-parallel"),
        ("--sequence --model-parallel 2 --context 15", "that divides --context 15"),
    ],
)
def test_the_example_refuses_flags_that_do_not_fit(capsys: pytest.CaptureFixture[str], flags: str, reason: str) -> None:
    with pytest.raises(SystemExit):
        _example().parsed(flags.split())
    assert reason in capsys.readouterr().err


def test_one_object_to_close(pool: RankPool) -> None:
    for result in pool.run(one_object, world_size=4):
        assert {"reduce_from_group", "model digest", "gradients 0"} <= set(result["logged"])


def test_invalid_arguments_are_refused_before_anything_is_started() -> None:
    with pytest.raises(UsageError, match="pass model="):
        ringway.initialize(plan={"0": "column"})
    with pytest.raises(UsageError, match="needs a plan"):
        ringway.initialize(model=nn.Linear(1, 1), model_parallel_size=2)
    with pytest.raises(ConfigError, match="did you mean 'timeout'"):
        ringway.initialize({"ringway": {"timeuot": 3}})
    assert not ringway.is_initialized()


def alone(context: RankContext) -> None:
    ringway.destroy_process_group()
    with ringway.initialize(verbose=False) as runtime:
        assert ringway.get_world_size() == 1
        assert runtime.mesh is None
        assert runtime.data_group is None
        with pytest.raises(UsageError, match="without a model"):
            runtime.full_state_dict()
    assert not ringway.is_initialized()
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="names no module"):
        ringway.initialize(None, model, plan={"nothing": "row"}, verbose=False)
    assert not ringway.is_initialized()  # it ended what it had started


def test_a_world_of_one(pool: RankPool) -> None:
    pool.run(alone, world_size=1)
