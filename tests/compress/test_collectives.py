"""The compressed all-reduce on real ranks."""

from __future__ import annotations

import importlib

import pytest
import rank_compress
import torch

from ringway.testing import RankPool

BACKENDS = ["gloo", "shm"]
LENGTHS = (9, 4099)
SPECS = ("onebit:64", "onebit:tensor", "int8:64", "int8:tensor", "int4:64", "fp8:64")


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_agree_with_the_simulation_in_float64(pool: RankPool, backend: str) -> None:
    cases = [(spec, numel, "native") for spec in SPECS for numel in LENGTHS]
    cases += [(spec, 999, "reference") for spec in SPECS]
    for ranks in (1, 3, 4):
        for apart in pool.run(rank_compress.against_simulation, backend, cases, world_size=ranks):
            assert apart == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_shape_and_dtype(pool: RankPool, backend: str) -> None:
    pool.run(rank_compress.shapes_and_dtypes, backend, world_size=3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_mode_of_autograd(pool: RankPool, backend: str) -> None:
    pool.run(rank_compress.in_any_mode, backend, world_size=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_takes_two_collectives(pool: RankPool, backend: str) -> None:
    for seen in pool.run(rank_compress.two_collectives, backend, world_size=2):
        assert seen == ["all_to_all_single", "all_gather_into_tensor"] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_gets_the_same_bits(pool: RankPool, backend: str) -> None:
    results = pool.run(rank_compress.same_result_everywhere, backend, world_size=3)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sub_groups(pool: RankPool, backend: str) -> None:
    assert max(pool.run(rank_compress.in_subgroups, backend, world_size=4)) < 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_asynchronous_calls_among_plain_collectives(pool: RankPool, backend: str) -> None:
    pool.run(rank_compress.asynchronously, backend, world_size=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_names_the_rank_with_non_finite_values(pool: RankPool, backend: str) -> None:
    pool.run(rank_compress.not_finite, backend, world_size=3)


def test_the_public_names_are_there() -> None:
    module = importlib.import_module("ringway.compress")
    for name in module.__all__:
        assert hasattr(module, name), name
