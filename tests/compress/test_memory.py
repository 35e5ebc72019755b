"""A compressed all-reduce holds less than 2 bytes per element beyond its residuals, with any codec."""

from __future__ import annotations

import pytest
import rank_memory
import torch

from ringway.compress.all_reduce import CPU_SPLIT, CUDA_SPLIT, Split
from ringway.compress.workspace import KEPT, Workspace
from ringway.testing import RankPool

CPU = torch.device("cpu")
SPECS = ["onebit", "onebit:tensor", "int8", "int8:tensor", "int4", "fp8", "fp8:tensor"]


@pytest.mark.parametrize("split", [CPU_SPLIT, CUDA_SPLIT])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_codec_holds_two_bytes_an_element(pool: RankPool, ranks: int, split: Split) -> None:
    for numel in (1 << 17, 1_000_003):
        for found in pool.run(rank_memory.extra_bytes, SPECS, numel, split.windows, world_size=ranks):
            assert all(extra < 2.0 for extra in found.values()), found
            assert found["int8"] > 0.5, "the count missed the frames"
    pool.replace()


def test_frames_of_every_length_share_the_same_buffers() -> None:
    pool = Workspace().pool(CPU)
    first = pool.take(2, 1024)
    address = first.data_ptr()
    pool.give_back(first)
    smaller = pool.take(1, 512)
    assert smaller.shape == (1, 512)
    assert smaller.data_ptr() == address
    pool.give_back(smaller)
    again = pool.take(2, 1024)
    assert again.data_ptr() == address, "the whole buffer came back, not the part that was used"


def test_a_buffer_too_small_gives_way_to_a_larger_one() -> None:
    pool = Workspace().pool(CPU)
    for size in (64, 128, 256, 512):
        pool.give_back(pool.take(1, size))
    assert [buffer.numel() for buffer in pool._idle] == [512]
    many = [pool.take(1, 512) for _ in range(KEPT + 4)]
    for frames in many:
        pool.give_back(frames)
    assert len(pool._idle) == KEPT
