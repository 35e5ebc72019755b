"""`ringway.lowcomm.DiLoCo` and `SparseLoCo`."""

from __future__ import annotations

import pytest
import rank_lowcomm
import torch

from ringway.compress import get_codec
from ringway.compress.windows import compressed_bytes, ring_bytes
from ringway.testing import RankPool


def test_diloco_follows_the_papers(pool: RankPool) -> None:
    pool.run(rank_lowcomm.diloco_follows_the_papers, world_size=2)


def test_sparseloco_follows_the_paper(pool: RankPool) -> None:
    pool.run(rank_lowcomm.sparseloco_follows_the_paper, world_size=3)


def test_not_finite_leaves_no_trace(pool: RankPool) -> None:
    pool.run(rank_lowcomm.not_finite_leaves_no_trace, world_size=2)


def test_late_outcomes_are_read_before_they_are_applied(pool: RankPool) -> None:
    pool.run(rank_lowcomm.late_outcomes_are_read_before_they_are_applied, world_size=2)


def test_small_updates_add_up(pool: RankPool) -> None:
    pool.run(rank_lowcomm.small_updates_add_up, world_size=2)


def test_they_resume_to_the_bit(pool: RankPool) -> None:
    pool.run(rank_lowcomm.resumes_to_the_bit, world_size=2)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_inside(pool: RankPool) -> None:
    pool.run(rank_lowcomm.muon_inside, world_size=2)


def test_several_ranks_in_a_site(pool: RankPool) -> None:
    pool.run(rank_lowcomm.several_ranks_in_a_site, world_size=4)


def test_scalers_count_the_same_steps(pool: RankPool) -> None:
    pool.run(rank_lowcomm.scalers_count_the_same_steps, world_size=2)


def test_bytes_are_counted(pool: RankPool) -> None:
    for size in (2, 3):
        for codec, reported, sent in pool.run(rank_lowcomm.counts_its_bytes, world_size=size)[0]:
            assert reported == sent, (codec, size)


def test_bytes_of_a_step_against_ddp() -> None:
    """Both grow alike with the number of ranks, as 2 (n - 1) / n."""
    numel, every = 10_000_000, 100
    for ranks in (2, 3, 4, 8, 16):
        fewer = every * ring_bytes(numel, ranks) / compressed_bytes(get_codec("int8"), numel, ranks)
        assert 390 <= fewer <= 100 * 4 / (1 + 4 / 256), ranks


def test_bytes_of_a_sparse_step_against_ddp() -> None:
    """Every site sends to all others, n - 1 times the message, and DDP sends 2 (n - 1) / n times: the factor falls as
    2 / n."""
    numel, every, codec = 10_000_000, 30, get_codec("topk:0.01:2")
    for ranks in (2, 3, 4, 8, 16):
        fewer = every * ring_bytes(numel, ranks) / compressed_bytes(codec, numel, ranks, servers=False)
        formula = every * 2 / ranks * 4 * 4096 / codec.nbytes(4096)
        assert fewer == pytest.approx(formula, rel=1e-3)
        assert ranks > 2 or fewer >= 6000


def test_wrong_uses_are_refused(pool: RankPool) -> None:
    pool.run(rank_lowcomm.usage, world_size=1)
