"""`ringway.lowcomm.plan` and `measure_link`."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ringway.errors import UsageError
from ringway.lowcomm import Link, measure_link, plan
from ringway.testing import RankContext, RankPool


def _link(megabits: float, sites: int = 2) -> Link:
    return Link(sites, megabits * 1e6 / 8, 0.05)


def test_the_plan_follows_the_link() -> None:
    model = nn.Linear(3162, 3162, bias=False)  # 10 M parameters
    named = {}
    for megabits in (100_000, 1000, 100, 10, 0.01):
        made = plan(model, _link(megabits), 0.5)
        rows = {row.method: row for row in made.rows}
        assert len(rows) == len(made.rows)
        ddp, diloco = rows["DDP, fp32"], rows["DiLoCo, int8, every 100"]
        assert ddp.bytes_per_step == 2 * 1 / 2 * 4 * made.numel
        assert ddp.times_fewer == 1
        assert 390 < diloco.times_fewer < 394
        assert 0.5 <= ddp.seconds_per_step == pytest.approx(0.5 / ddp.utilization)
        seconds = 0.05 * 2 / 100 + diloco.bytes_per_step * 8 / megabits / 1e6
        assert diloco.seconds_per_step == pytest.approx(0.5 + seconds)
        named[megabits] = made.recommended.method
        assert made.recommended.method in str(made)
        assert str(made).count("\n") == 2 + len(rows)
    assert named[100_000] == "DDP, fp32"
    assert named[1000] != "DDP, fp32"
    assert named[10].startswith("Streaming")
    assert not any("SGD" in method for method in named.values())
    assert "No method" in plan(model, _link(0.01), 0.5).recommendation
    sparse = [plan(model, _link(10, sites), 0.5).rows[-1].times_fewer for sites in (2, 8)]
    assert sparse[0] / sparse[1] == pytest.approx(4, rel=1e-3), "the factor falls as 2 / n"
    for wrong in ({"step_seconds": 0.0}, {"step_seconds": 1.0, "every": 0}):
        with pytest.raises(UsageError):
            plan(model, _link(10), **wrong)  # type: ignore[arg-type]
    for wrong_link, wrong_model in ((_link(10, 1), model), (_link(10), nn.Flatten())):
        with pytest.raises(UsageError, match="nothing to exchange"):
            plan(wrong_model, wrong_link, 0.5)
    assert plan(model, _link(10), 0.5, every=1).rows[-1].utilization > 0


@pytest.mark.parametrize(("megabits", "every"), [(10, 100), (1, 100), (1, 7), (0.1, 30), (10, 1)])
def test_a_delayed_exchange_hides_as_many_steps_as_its_delay(megabits: float, every: int) -> None:
    """Against a simulation of the link, step by step."""
    model = nn.Linear(3162, 3162, bias=False)
    made = plan(model, _link(megabits), 0.5, every=every)
    row = next(row for row in made.rows if row.method.startswith("Streaming"))
    options = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row.how)}
    assert 0 <= options["delay"] < options["every"]
    exchange = 2 * 0.05 + row.bytes_per_step * every / options["fragments"] * 8 / megabits / 1e6
    starts = {number * every // options["fragments"] for number in range(options["fragments"])}
    now, ends = 0.0, {}
    for step in range(50 * every):
        now = max(now + 0.5, ends.pop(step, 0.0))
        if step % every in starts and options["delay"]:
            ends[step + options["delay"]] = now + exchange
        elif step % every in starts:
            now += exchange
    assert row.seconds_per_step == pytest.approx(now / (50 * every), rel=0.03)


def _measured(context: RankContext) -> Link:
    context.start("gloo")
    return measure_link()


def _alone(context: RankContext) -> None:
    context.start("shm")
    with pytest.raises(UsageError, match="no link"):
        measure_link()


def test_all_ranks_measure_the_same_link(pool: RankPool) -> None:
    first, second = pool.run(_measured, world_size=2)
    assert first == second
    assert first.sites == 2
    assert first.bytes_per_second > 0
    assert first.latency >= 0
    assert "2 sites" in str(first)
    assert torch.isfinite(torch.tensor(plan(nn.Linear(8, 8), first, 0.1).rows[0].seconds_per_step))
    pool.run(_alone, world_size=1)
