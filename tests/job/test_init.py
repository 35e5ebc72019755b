"""Starting a job with one call, and calling it again in a job that has started."""

from __future__ import annotations

import io
import os
import sys
import time
from contextlib import redirect_stderr
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as c10d

import ringway as dist
from free_ports import free_port
from ringway.errors import BackendUnavailable, ConfigError, DiscoveryError, RendezvousError, UsageError
from ringway.groups.world import world
from ringway.testing import RankContext, RankPool


def _start(context: RankContext, port: int | None, config: Any = None, **arguments: Any) -> None:
    """A fresh start in a rank of the pool, which may hold the group of an earlier test."""
    dist.destroy_process_group()
    where = {} if port is None else {"init_method": f"tcp://127.0.0.1:{port}"}
    dist.init_distributed(config=config, rank=context.rank, world_size=context.world_size, **where, **arguments)


def _sum(context: RankContext) -> float:
    tensor = torch.full((4,), context.rank + 1.0)
    dist.all_reduce(tensor)
    dist.barrier()
    return tensor[0].item()


def _by_address(context: RankContext, port: int) -> float:
    _start(context, port)
    try:
        return _sum(context)
    finally:
        dist.destroy_process_group()


def test_by_address_and_again_on_the_same_port(pool: RankPool) -> None:
    port = free_port()
    for _ in range(6):  # rank 0 joins the store that it opened the first time, which must outlive its groups
        assert pool.run(_by_address, port, world_size=3) == [6.0] * 3


def _by_file(context: RankContext, path: str) -> float:
    _start(context, None, init_method=f"file://{path}")
    try:
        return _sum(context)
    finally:
        dist.destroy_process_group()


def test_by_file(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_by_file, str(tmp_path / "store"), world_size=2) == [3.0] * 2


def _twice(context: RankContext, port: int) -> str:
    _start(context, port, verbose=False)
    first = c10d.group.WORLD
    dist.init_distributed()  # says so, and changes nothing
    assert c10d.group.WORLD is first
    dist.init_distributed(dist_init_required=False, verbose=False)
    try:
        return dist.get_backend()
    finally:
        dist.barrier()
        dist.destroy_process_group()


def test_second_call_is_a_no_op_that_says_so(pool: RankPool) -> None:
    first, second = pool.try_run(_twice, free_port(), world_size=2)
    assert first.ok, first
    assert second.ok, second
    assert "torch.distributed is initialized (2 ranks" in first.output
    assert "is initialized" not in second.output


def _contradicts(context: RankContext) -> None:
    dist.destroy_process_group()
    dist.init_distributed(verbose=False)  # a world of one
    try:
        for wrong in ({"rank": 1, "world_size": 2}, {"world_size": 2}, {"rank": 1}):
            with pytest.raises(UsageError, match="this process is rank 0 of 1; call destroy_process_group"):
                dist.init_distributed(init_method="tcp://127.0.0.1:1", **wrong)  # type: ignore[arg-type]
        for same in ({}, {"rank": 0}, {"world_size": 1}, {"rank": 0, "world_size": 1}):
            dist.init_distributed(verbose=False, **same)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def test_a_second_call_with_another_rank_or_size_is_refused(pool: RankPool) -> None:
    pool.run(_contradicts, world_size=1)


def _adopts(context: RankContext, port: int) -> float:
    dist.destroy_process_group()
    c10d.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=context.rank, world_size=context.world_size
    )
    theirs = c10d.group.WORLD
    dist.init_distributed()
    assert c10d.group.WORLD is theirs
    try:
        return _sum(context)
    finally:
        c10d.destroy_process_group()


def test_torchs_own_group_is_adopted(pool: RankPool) -> None:
    assert pool.run(_adopts, free_port(), world_size=2) == [3.0] * 2


def _groups_by_members(context: RankContext) -> list[str]:
    dist.destroy_process_group()
    c10d.init_process_group("gloo", store=context.store, rank=context.rank, world_size=context.world_size)
    dist.new_group([0, 1])  # so rank 1 is in more groups than rank 2
    names = []
    if context.rank > 0:
        for _ in range(2):
            group = dist.new_group((rank for rank in (2, 1)), use_local_synchronization=True)
            names.append(c10d.distributed_c10d._world.pg_names[group])
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total == 2
    everybody = dist.new_group(timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(1), group=everybody)
    names.append(c10d.distributed_c10d._world.pg_names[everybody])
    dist.destroy_process_group()
    return names


def test_groups_made_only_by_their_members_do_not_change_the_names_of_later_groups(pool: RankPool) -> None:
    """torch 2.15 counts these groups only on the ranks that make them, and names later groups by the count."""
    for _ in range(2):
        others, first, second = pool.run(_groups_by_members, world_size=3)
        assert first == second
        assert len(set(first)) == 3
        assert others == first[-1:]
    pool.replace()


def _configured(context: RankContext, port: int, config: dict[str, Any], timeout: float | None) -> dict[str, Any]:
    limit = None if timeout is None else timedelta(seconds=timeout)
    _start(context, port, config, timeout=limit)
    facts = {
        "backend": dist.get_backend(),
        "timeout": dist.communicator().info.timeout,
        "recorder": world.recorder.capacity,
        "objects": world.max_object_bytes,
    }
    dist.barrier()
    dist.destroy_process_group()
    return facts


def test_configuration_takes_effect_and_the_timeout_is_printed_with_its_source(pool: RankPool) -> None:
    config = {"ringway": {"backend": "gloo", "timeout": 77, "recorder_size": 512, "max_object_bytes": 4096}}
    expected = {"backend": "gloo", "timeout": 77.0, "recorder": 512, "objects": 4096}
    first, second = pool.try_run(_configured, free_port(), config, None, world_size=2)
    assert first.ok, first
    assert (first.value, second.value) == (expected, expected)
    assert "timeout 77 s (config argument)" in first.output
    assert "backend gloo (chosen by config argument)" in first.output

    outcome, _ = pool.try_run(_configured, free_port(), config, 66.0, world_size=2)
    assert outcome.ok, outcome
    assert outcome.value["timeout"] == 66.0
    assert "timeout 66 s (argument)" in outcome.output

    environment: dict[str, str | None] = {"RINGWAY_TIMEOUT": "55"}
    outcome, _ = pool.try_run(_configured, free_port(), config, None, world_size=2, environment=environment)
    assert outcome.ok, outcome
    assert "timeout 55 s (RINGWAY_TIMEOUT)" in outcome.output
    pool.replace()  # these ranks keep a small recorder and a small limit


def _too_few(context: RankContext, port: int) -> tuple[float, list[int]]:
    dist.destroy_process_group()
    began = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        dist.init_distributed(
            rank=context.rank, world_size=3, init_method=f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=5)
        )
    assert not dist.is_initialized()
    return time.monotonic() - began, caught.value.missing


def test_the_timeout_that_was_set_is_the_one_that_ends_the_wait(pool: RankPool) -> None:
    reported = pool.run(_too_few, free_port(), world_size=2, timeout=100)
    assert all(2 in missing for _, missing in reported)  # a rank that was slow to start may be missing to the other
    assert 4.9 < max(waited for waited, _ in reported) < 60  # a rank that arrived later gets the error at the same time


def test_wrong_arguments_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(UsageError, match="not initialized"):
        dist.init_distributed(dist_init_required=False)
    with pytest.raises(UsageError, match="timeout"):
        dist.init_distributed(timeout=timedelta(seconds=-1))
    with pytest.raises(UsageError, match="neither a timedelta nor a number"):
        dist.init_distributed(timeout="soon")
    with pytest.raises(UsageError, match="world_size"):
        dist.init_distributed(rank=2, world_size=2)
    with pytest.raises(ConfigError, match="did you mean 'timeout'"):
        dist.init_distributed(config={"ringway": {"timeot": 1}})
    assert not dist.is_initialized()


def _mpi_ignored(context: RankContext) -> int:
    dist.destroy_process_group()
    dist.init_distributed(auto_mpi_discovery=False, verbose=False)
    size = dist.get_world_size()
    dist.destroy_process_group()
    return size


def test_mpi_launchers_are_ignored_when_asked(pool: RankPool) -> None:
    environment: dict[str, str | None] = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert pool.run(_mpi_ignored, world_size=1, environment=environment) == [1]


def _unnamed(context: RankContext) -> tuple[str, str]:
    """init_process_group without a backend, as in torch: the ranks choose one together and print why."""
    dist.init_process_group(store=context.store, rank=context.rank, world_size=context.world_size)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [float(context.world_size)] * 3
    answer = dist.get_backend(), dist.status()["backend_reason"]
    dist.destroy_process_group()
    return answer


def test_a_group_that_names_no_backend_gets_shm_on_one_host(pool: RankPool) -> None:
    assert set(pool.run(_unnamed, world_size=2)) == {("shm", "all 2 ranks proved to be on one host")}


def _fails_first_on_one_rank(context: RankContext) -> float:
    def breaks(_: Any) -> Any:
        raise RuntimeError("nothing works here")

    dist.destroy_process_group()
    if context.rank == 0:
        dist.register_backend(f"breaks{context.rank}", breaks, ("cpu",))
        with pytest.raises(RuntimeError, match="nothing works here"):
            dist.init_process_group("breaks0", store=c10d.HashStore(), rank=0, world_size=1)
    context.start("gloo")
    return _sum(context)


def test_a_start_that_failed_on_one_rank_does_not_affect_the_next(pool: RankPool) -> None:
    assert pool.run(_fails_first_on_one_rank, world_size=2, timeout=100) == [3.0, 3.0]


# init_process_group starts anywhere too


def _anywhere(context: RankContext, port: int) -> str:
    """As many ranks as torch's variables say; without them, a world of one."""
    dist.destroy_process_group()
    if context.world_size > 1:
        os.environ.update(RANK=str(context.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        for number, method in enumerate((None, "env://", f"tcp://127.0.0.1:{port + 1}")):
            place = {"rank": context.rank, "world_size": context.world_size} if number == 2 else {}
            dist.init_process_group("gloo" if number == 1 else None, init_method=method, **place)
            assert _sum(context) == (3.0 if context.world_size == 2 else 1.0)
            assert dist.get_backend() == ("gloo" if number == 1 else "shm")
            with pytest.raises(ValueError, match="twice"):
                dist.init_process_group()
            dist.destroy_process_group()
        for name in ("nccl", "ucc"):
            with pytest.raises(BackendUnavailable, match=f"'{name}' is not available: this build of torch has no"):
                dist.init_process_group(name)
            with pytest.raises(BackendUnavailable, match=f"'{name}' is not available: this build of torch has no"):
                dist.init_process_group(name, store=c10d.HashStore(), rank=0, world_size=1)
        os.environ.update(RANK="0", WORLD_SIZE="2")
        os.environ.pop("MASTER_ADDR", None)
        for method in (None, "env://"):
            with pytest.raises(DiscoveryError, match="MASTER_ADDR is not set"):
                dist.init_process_group(init_method=method)
        return ""
    finally:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


@pytest.mark.skipif(c10d.is_nccl_available(), reason="torch has nccl here")
def test_init_process_group_finds_the_launcher_and_says_what_it_did(pool: RankPool) -> None:
    for size, source in ((1, "1 rank, by no launcher; backend shm"), (2, "2 ranks, by environment; backend shm")):
        ranks = pool.try_run(_anywhere, free_port(), world_size=size, timeout=60)
        assert all(rank.ok for rank in ranks), "\n".join(map(str, ranks))
        assert source in ranks[0].output
        assert "backend gloo (chosen by argument)" in ranks[0].output


def _signs(context: RankContext) -> None:
    dist.destroy_process_group()
    mpi = SimpleNamespace(Is_initialized=bool, Is_finalized=bool, COMM_WORLD=SimpleNamespace(Get_size=lambda: 4))
    mpi.Is_initialized = lambda: True
    driver = SimpleNamespace(get_placement_group_id=lambda: None)
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: driver)
    cases: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({}, {}, ""),
        ({"MASTER_ADDR": "node1", "LOCAL_RANK": "1"}, {}, "LOCAL_RANK=1, MASTER_ADDR=node1 are set without RANK"),
        ({"RAY_JOB_ID": "01000000"}, {}, "it runs in a Ray job"),
        ({}, {"ray": ray}, "it runs in a Ray job"),
        ({}, {"mpi4py.MPI": mpi}, "MPI has 4 ranks"),
    ]
    for variables, modules, sign in cases:
        with mock.patch.dict(os.environ, variables), mock.patch.dict(sys.modules, modules):
            for start in (dist.init_process_group, partial(dist.init_distributed, verbose=False)):
                said = io.StringIO()
                with redirect_stderr(said):
                    start()
                dist.destroy_process_group()
                assert ("no launcher was found" in said.getvalue()) == bool(sign)
                assert sign in said.getvalue()
            with pytest.raises(DiscoveryError, match="require_launcher is set") as refused:
                dist.init_distributed(config={"ringway": {"require_launcher": True}})
            assert sign in str(refused.value)
            with mock.patch.dict(os.environ, RINGWAY_REQUIRE_LAUNCHER="1"), pytest.raises(DiscoveryError):
                dist.init_process_group()
            # A rank and a size that are given are no less than what a launcher says.
            given = {"rank": 0, "world_size": 1, "config": {"ringway": {"require_launcher": True}}}
            dist.init_distributed(verbose=False, **given)
            dist.destroy_process_group()


def test_signs_of_other_ranks_are_reported_and_a_launcher_can_be_required(pool: RankPool) -> None:
    pool.run(_signs, world_size=1)
