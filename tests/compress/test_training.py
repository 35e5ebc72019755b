"""Training with compressed gradients and momenta."""

from __future__ import annotations

import pytest
import rank_training
import torch

from ringway.testing import RankPool


def test_the_ddp_hook_trains_like_plain_ddp(pool: RankPool) -> None:
    plain = pool.run(rank_training.train_ddp, None, 0, 40, world_size=2)[0]
    for codec, bound in (("onebit", 2.5), ("int8", 1.1)):
        ranks = pool.run(rank_training.train_ddp, codec, 3, 40, world_size=2)
        assert ranks[0][-1] == ranks[1][-1], "every rank has the same weights"
        assert ranks[0][:4] == pytest.approx(plain[:4], rel=1e-4), "the warm-up is plain DDP"
        assert sum(ranks[0][30:40]) < 0.5 * sum(ranks[0][:10]), "it learns"
        assert sum(ranks[0][30:40]) < bound * sum(plain[30:40])


def test_the_hook_warns_of_adam_and_not_of_sgd(pool: RankPool) -> None:
    pool.run(rank_training.adam_is_warned_of, world_size=2)


def test_residuals_begin_again_when_buckets_change(pool: RankPool) -> None:
    pool.run(rank_training.buckets_change, world_size=2)


def test_onebit_adams_warm_up_is_adamw(pool: RankPool) -> None:
    ours = pool.run(rank_training.onebit_adam, "onebit", 100, 10, None, world_size=2)[0]
    theirs = pool.run(rank_training.adamw, 10, world_size=2)[0]
    torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=1e-5, atol=1e-6)
    assert ours["calls"] == 0


def test_onebit_adam_trains_like_adam(pool: RankPool) -> None:
    theirs = pool.run(rank_training.adamw, 90, world_size=2)[0]
    for codec in ("onebit", "onebit:tensor", "int8", "int4", "fp8"):
        ours, other = pool.run(rank_training.onebit_adam, codec, 30, 90, None, world_size=2)
        assert torch.equal(ours["weights"], other["weights"]), codec
        assert ours["calls"] >= 60 * 2, codec
        assert sum(ours["losses"][-10:]) < 1.5 * sum(theirs["losses"][-10:]), codec
        assert sum(ours["losses"][-10:]) < 0.5 * sum(ours["losses"][30:40]), codec


@pytest.mark.parametrize("resume_at", [3, 8])
def test_onebit_adam_resumes_to_the_bit(pool: RankPool, resume_at: int) -> None:
    straight = pool.run(rank_training.onebit_adam, "onebit", 5, 12, None, world_size=2)[0]
    resumed = pool.run(rank_training.onebit_adam, "onebit", 5, 12, resume_at, world_size=2)[0]
    assert torch.equal(straight["weights"], resumed["weights"])


def test_elements_without_a_gradient_stay_unchanged(pool: RankPool) -> None:
    pool.run(rank_training.adam_leaves_untouched_elements_alone, world_size=2)


def test_the_collectives_of_zero_plus_plus(pool: RankPool) -> None:
    pool.run(rank_training.quantized, world_size=4)


def test_moments_stay_fp32_in_a_checkpoint_of_half_precision_parameters(pool: RankPool) -> None:
    pool.run(rank_training.adam_of_halves_resumes, world_size=2)


def test_parameter_groups_may_be_added_later(pool: RankPool) -> None:
    pool.run(rank_training.groups_are_added, world_size=2)


def test_a_feedback_that_is_still_empty_is_used_by_the_hook(pool: RankPool) -> None:
    pool.run(rank_training.the_hook_uses_the_feedback_it_was_given, world_size=2)
