"""Error feedback makes a compressed mean right in the long run, and survives a checkpoint."""

from __future__ import annotations

import pytest
import rank_feedback
import torch

from ringway.compress.windows import Sharding
from ringway.testing import RankPool


@pytest.mark.parametrize("spec", ["onebit:64", "onebit:tensor", "int4:64", "fp8:64"])
def test_the_mean_of_many_steps_converges_with_feedback_only(pool: RankPool, spec: str) -> None:
    half, whole = pool.run(rank_feedback.mean_of_many_steps, spec, 200, True, world_size=2)[0]
    assert whole < 0.05
    assert whole < 0.75 * half, "the error must shrink as 1/steps"
    half, without = pool.run(rank_feedback.mean_of_many_steps, spec, 10, False, world_size=2)[0]
    assert without == pytest.approx(half, rel=1e-3), "without feedback every step errs alike"
    assert without > 3 * whole


def test_a_checkpoint_resumes_to_the_bit(pool: RankPool) -> None:
    states = pool.run(rank_feedback.save, 3, world_size=2)
    resumed = pool.run(rank_feedback.resume, states, world_size=2)
    straight = pool.run(rank_feedback.without_a_stop, 3, world_size=2)
    assert torch.equal(resumed[0], straight[0])


def test_residuals_survive_a_change_of_world_size(pool: RankPool) -> None:
    states = pool.run(rank_feedback.save, 3, world_size=2)
    mean = torch.stack([state["slots"]["a"]["worker"] for state in states]).mean(dim=0)
    joined = torch.cat([state["slots"]["a"]["server"] for state in states])
    assert joined.any()
    for rank, (worker, server) in enumerate(pool.run(rank_feedback.reshard, states, world_size=3)):
        torch.testing.assert_close(worker, mean)
        assert torch.equal(server, joined[Sharding(rank_feedback.NUMEL, 3).served(rank)])


def test_misuse_is_refused_by_name(pool: RankPool) -> None:
    pool.run(rank_feedback.misuse, world_size=1)


def test_the_report_counts_bytes_time_and_error(pool: RankPool) -> None:
    report = pool.run(rank_feedback.report, world_size=2)[0]
    assert report["calls"] == 3
    assert 3.7 < report["plain_bytes"] / report["sent_bytes"] < 4
    assert report["bytes_saved"] == report["plain_bytes"] - report["sent_bytes"]
    assert report["seconds"] > 0
    assert report["seconds_saved"] is None
    assert 0.001 < report["relative_error"] < 0.02
