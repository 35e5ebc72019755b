"""Residuals, moments and step counts: the same on every rank, and unchanged by what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import rank_state
import torch

from ringway.compress import get_codec, kernels_for
from ringway.compress.windows import HEADER_BYTES, clear_spoiled, frame_bytes, statuses
from ringway.compress.workspace import BufferPool
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


def test_a_failed_exchange_is_taken_back(pool: RankPool) -> None:
    pool.run(rank_state.failed_exchange_is_taken_back, world_size=2)


def test_checkpoints_of_the_first_release_load(pool: RankPool) -> None:
    pool.run(rank_state.old_checkpoints_load, world_size=2)


@pytest.mark.parametrize("how", ["hooks", "ddp"])
def test_a_parameter_that_is_not_always_used_loses_nothing(pool: RankPool, how: str) -> None:
    for codec, bound in (("onebit:64", 0.2), ("int4:64", 0.02)):
        errors = pool.run(rank_state.unused_parameters_keep_their_residuals, how, codec, world_size=2)
        assert max(errors) < bound, codec


def test_loading_keeps_the_slots_that_the_program_holds(pool: RankPool) -> None:
    pool.run(rank_state.loading_keeps_the_slots_that_the_program_holds, world_size=2)


def test_residuals_are_saved_and_loaded_after_pending_calls(pool: RankPool) -> None:
    pool.run(rank_state.pending_calls_count, world_size=2)


@pytest.mark.parametrize("how", ["hook", "feedback", "together"])
def test_a_feedback_serves_one_model(pool: RankPool, how: str) -> None:
    pool.run(rank_state.one_feedback_per_model, how, world_size=2)


def test_uncompressed_calls_report_nan_too(pool: RankPool) -> None:
    pool.run(rank_state.plain_calls_report_nan, world_size=2)


def test_half_precision_results_stay_finite(pool: RankPool) -> None:
    pool.run(rank_state.half_precision_stays_finite, world_size=2)


def test_a_nan_is_named_whatever_was_in_memory(pool: RankPool) -> None:
    pool.run(rank_state.nan_is_named_whatever_was_in_memory, world_size=2)


def test_scales_that_overflow_are_reported(pool: RankPool) -> None:
    pool.run(rank_state.scales_that_overflow, world_size=2)


def test_calls_with_the_same_residuals_follow_each_other(pool: RankPool) -> None:
    pool.run(rank_state.calls_on_one_slot_follow_each_other, world_size=2)


class _Watched:
    """A buffer in a pool. While its size is being read, another thread asks the pool for a buffer."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._other = threading.Thread(target=meanwhile)

    def numel(self) -> int:
        if self._other.ident is None:
            self._other.start()
            self._other.join(0.3)  # it has to wait for this thread, or it takes this buffer
        return 64

    def __getitem__(self, where: slice) -> _Watched:
        return self

    def view(self, *shape: int) -> _Watched:
        return self


def test_buffers_have_one_owner() -> None:
    pool = BufferPool(torch.device("cpu"))
    taken: list[Any] = []
    watched: Any = _Watched(lambda: taken.append(pool.take(1, 64)))
    pool._idle.append(watched)
    taken.append(pool.take(1, 64))
    watched._other.join()
    assert [one is watched for one in taken].count(True) == 1


def test_frames_without_values_do_not_count_as_an_average_that_is_not_finite() -> None:
    """A frame whose status is set holds what was in its memory before. With a scale for the whole tensor, that decided
    whether the rank with the NaN was named."""
    for spec in ("fp8:tensor", "int8:tensor", "onebit:tensor"):
        codec = get_codec(spec)
        frames = torch.full((2, frame_bytes(codec, 64)), 255, dtype=torch.uint8)
        statuses(frames).copy_(torch.tensor([0, 1], dtype=torch.int32))
        frames[0, HEADER_BYTES:].zero_()
        clear_spoiled(frames)
        assert not frames[1, HEADER_BYTES:].any()
        assert statuses(frames).tolist() == [0, 1]
        for kernels in ("native", "reference"):
            measured = kernels_for(codec, torch.device("cpu"), kernels).measure_mean(frames, None, 64)
            assert torch.isfinite(measured).all(), (spec, kernels)
