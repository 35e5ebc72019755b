"""The compressed all-reduce on real ranks."""

from __future__ import annotations

import importlib

import pytest
import rank_compress
import torch

from ringway.compress.agreement import spoil_if_different
from ringway.compress.windows import headers, statuses
from ringway.testing import RankPool

BACKENDS = ["gloo", "shm"]
LENGTHS = (9, 4099)
SPECS = ("onebit:64", "onebit:tensor", "int8:64", "int8:tensor", "int4:64", "fp8:64")


@pytest.mark.parametrize(("backend", "sizes"), [("gloo", (1, 3)), ("shm", (1, 4))])
def test_ranks_agree_with_the_simulation_in_float64(pool: RankPool, backend: str, sizes: tuple[int, ...]) -> None:
    cases = [(spec, numel, "native") for spec in SPECS for numel in LENGTHS]
    cases += [(spec, 999, "reference") for spec in SPECS]
    for ranks in sizes:
        for apart in pool.run(rank_compress.against_simulation, backend, cases, world_size=ranks):
            assert apart == []


def test_one_phase_agrees_with_the_simulation_in_float64(pool: RankPool) -> None:
    cases = [(spec, numel, kernels) for spec in SPECS for numel, kernels in ((4099, "native"), (999, "reference"))]
    for apart in pool.run(rank_compress.against_simulation, "shm", cases, False, world_size=3):
        assert apart == []
    pool.run(rank_compress.without_servers, world_size=3)


def test_topk_wherever_codecs_are_taken(pool: RankPool) -> None:
    for how in ("two phases", "one phase", "asynchronous", "ddp_hook", "register_data_parallel_hooks"):
        assert max(pool.run(rank_compress.sparse_mean, how, world_size=2)) < 0.2, how


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


@pytest.mark.parametrize("how", ["compressed_all_reduce", "register_data_parallel_hooks", "ddp_hook"])
def test_asynchronous_calls_where_ranks_are_in_different_numbers_of_groups(pool: RankPool, how: str) -> None:
    pool.run(rank_compress.beside_another_group, "shm", how, world_size=3, timeout=40)


@pytest.mark.parametrize("backend", BACKENDS)
def test_asynchronous_calls_have_the_groups_timeout(pool: RankPool, backend: str) -> None:
    waited = pool.run(rank_compress.late_peer, backend, world_size=2, timeout=60)
    assert waited[0] < 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_names_the_rank_with_non_finite_values(pool: RankPool, backend: str) -> None:
    pool.run(rank_compress.not_finite, backend, world_size=3)


def test_ranks_that_make_different_compressed_calls_are_told_so(pool: RankPool) -> None:
    kinds = ("quantized_all_gather", "all_to_all_quant_reduce", "asynchronous", "servers=False", "OneBitAdam")
    cases = [(name, "synchronous", "shm") for name in rank_compress.MISMATCHES]
    cases += [("codecs of the same length", kind, "shm") for kind in kinds]
    cases += [("windows", kind, "gloo") for kind in ("synchronous", "asynchronous")]
    for name, kind, backend in cases:
        sides = rank_compress.MISMATCHES[name]
        for told in pool.run(rank_compress.mismatched, backend, sides, kind, world_size=2, timeout=60):
            for (numel, dtype, codec), side in zip(sides, told, strict=True):
                assert f"{str(dtype).removeprefix('torch.')}[{numel}]" in side, (name, kind)
                assert f"codec {codec}" in side, (name, kind)
    pool.run(rank_compress.mismatched_hooks, "shm", world_size=2, timeout=60)


def test_a_call_that_failed_on_one_rank_does_not_meet_the_next(pool: RankPool) -> None:
    pool.run(rank_compress.a_call_that_failed_on_one_rank, "shm", world_size=2, timeout=60)


def test_frames_of_different_calls_are_spoilt_without_waiting_for_the_device() -> None:
    heading, other = (5 << 32, 7), (5 << 32, 8)
    for second, spoilt in ((heading, False), (other, True)):
        frames = torch.zeros(2, 64, dtype=torch.uint8)
        headers(frames).copy_(torch.tensor([heading, second]))
        statuses(frames)[0] = 1
        spoil_if_different(frames, heading)
        assert statuses(frames).tolist() == [1, int(spoilt)]
        assert headers(frames)[1, 1] == second[1]


def test_the_public_names_are_there() -> None:
    module = importlib.import_module("ringway.compress")
    for name in module.__all__:
        assert hasattr(module, name), name
