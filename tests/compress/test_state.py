"""Residuals, moments and step counts: the same on every rank, and unchanged by what fails."""

from __future__ import annotations

import sys

import pytest
import rank_state
import torch

from ringway.testing import RankPool


def test_a_scaler_makes_all_ranks_skip_together(pool: RankPool) -> None:
    for agreeing in (False, True):
        ranks = pool.run(rank_state.scaler_skips_together, agreeing, world_size=2)
        assert torch.equal(ranks[0][0], ranks[1][0])
        assert ranks[0][1] == ranks[1][1] == 12
        assert (ranks[0][2] == ranks[1][2]) == agreeing, "torch's scaler follows its own rank's gradients"


def test_adam_follows_parameters_that_come_and_go(pool: RankPool) -> None:
    pool.run(rank_state.parameters_come_and_go, world_size=2)


def test_a_failed_step_changes_nothing(pool: RankPool) -> None:
    pool.run(rank_state.failed_step_changes_nothing, world_size=2)


def test_checkpoints_of_the_first_release_load(pool: RankPool) -> None:
    pool.run(rank_state.old_checkpoints_load, world_size=2)


@pytest.mark.parametrize("how", ["hooks", "ddp"])
def test_a_parameter_that_is_not_always_used_loses_nothing(pool: RankPool, how: str) -> None:
    for codec, bound in (("onebit:64", 0.2), ("int4:64", 0.02)):
        errors = pool.run(rank_state.unused_parameters_keep_their_residuals, how, codec, world_size=2)
        assert max(errors) < bound, codec


def test_loading_keeps_the_slots_that_the_program_holds(pool: RankPool) -> None:
    pool.run(rank_state.loading_keeps_the_slots_that_the_program_holds, world_size=2)


@pytest.mark.parametrize("how", ["hook", "feedback", "together"])
def test_a_feedback_serves_one_model(pool: RankPool, how: str) -> None:
    pool.run(rank_state.one_feedback_per_model, how, world_size=2)


def test_uncompressed_calls_report_nan_too(pool: RankPool) -> None:
    pool.run(rank_state.plain_calls_report_nan, world_size=2)


def test_half_precision_results_stay_finite(pool: RankPool) -> None:
    pool.run(rank_state.half_precision_stays_finite, world_size=2)


def test_scales_that_overflow_are_reported(pool: RankPool) -> None:
    pool.run(rank_state.scales_that_overflow, world_size=2)


def test_calls_with_the_same_residuals_follow_each_other(pool: RankPool) -> None:
    pool.run(rank_state.calls_on_one_slot_follow_each_other, world_size=2)


def test_buffers_have_one_owner() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        rank_state.buffers_have_one_owner()
    finally:
        sys.setswitchinterval(before)
