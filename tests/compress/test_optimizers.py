"""`ZeroOneAdam` and `OneBitLamb`: against float64 simulations of all ranks, and their state."""

from __future__ import annotations

import pytest
import rank_optimizers

from ringway.testing import RankPool


def test_zero_one_adam_follows_the_paper(pool: RankPool) -> None:
    pool.run(rank_optimizers.zero_one_adam_follows_the_paper, world_size=2)


def test_onebit_lamb_follows_the_paper(pool: RankPool) -> None:
    pool.run(rank_optimizers.onebit_lamb_follows_the_paper, world_size=2)


@pytest.mark.parametrize("kind", ["zero_one", "lamb"])
def test_they_resume_to_the_bit(pool: RankPool, kind: str) -> None:
    pool.run(rank_optimizers.resumes_to_the_bit, kind, world_size=2)


@pytest.mark.parametrize("kind", ["zero_one", "lamb"])
def test_ranks_skip_or_raise_together(pool: RankPool, kind: str) -> None:
    pool.run(rank_optimizers.scaler_and_nan, kind, world_size=2)


def test_parameters_wait_for_gradients_between_exchanges(pool: RankPool) -> None:
    pool.run(rank_optimizers.parameters_wait_for_gradients, world_size=2)


def test_checkpoints_of_deepspeed_load(pool: RankPool) -> None:
    pool.run(rank_optimizers.deepspeed_checkpoints_load, world_size=2)


def test_the_arguments_of_deepspeed(pool: RankPool) -> None:
    pool.run(rank_optimizers.arguments_of_deepspeed, world_size=1)
