"""DeepSpeed's 1-bit backends: its formulas, its names, and CuPy only where it is needed."""

from __future__ import annotations

import importlib.util

import pytest
import rank_deepspeed
import torch

from ringway.compat.compressed import CupyBackend, scale_bound
from ringway.errors import BackendUnavailable
from ringway.testing import RankPool


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fifty_steps_are_deepspeeds_to_the_bit(pool: RankPool, ranks: int) -> None:
    pool.run(rank_deepspeed.fifty_steps, 1001, world_size=ranks)


def test_the_fused_path_stays_within_its_bound(pool: RankPool) -> None:
    pool.run(rank_deepspeed.fused_step, world_size=3)


def test_deepspeeds_norm_stays_within_the_bound_of_its_length() -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in (100, 1 << 16, 1 << 23):
        for values in (torch.randn(numel, generator=generator), torch.full((numel,), 1.1)):
            exact = values.double().norm().item()
            off = abs(torch.linalg.norm(values).item() - exact) / exact
            assert off <= scale_bound(numel), numel


def test_gathers_and_edges(pool: RankPool) -> None:
    pool.run(rank_deepspeed.gathers, world_size=3)


def test_only_cupy_backend_needs_cupy() -> None:
    if importlib.util.find_spec("cupy") is None:
        with pytest.raises(BackendUnavailable, match="cupy"):
            CupyBackend()
    else:
        CupyBackend()
