"""DeepSpeed's 1-bit backends: its formulas, its names, and CuPy only where it is needed."""

from __future__ import annotations

import importlib.util

import pytest
import rank_deepspeed

from ringway.compat.compressed import CupyBackend
from ringway.errors import BackendUnavailable
from ringway.testing import RankPool


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fifty_steps_are_deepspeeds_to_the_bit(pool: RankPool, ranks: int) -> None:
    pool.run(rank_deepspeed.fifty_steps, 1001, world_size=ranks)


def test_the_fused_path_stays_within_its_bound(pool: RankPool) -> None:
    pool.run(rank_deepspeed.fused_step, world_size=3)


def test_gathers_and_edges(pool: RankPool) -> None:
    pool.run(rank_deepspeed.gathers, world_size=3)


def test_only_cupy_backend_needs_cupy() -> None:
    if importlib.util.find_spec("cupy") is None:
        with pytest.raises(BackendUnavailable, match="cupy"):
            CupyBackend()
    else:
        CupyBackend()
