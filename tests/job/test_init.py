"""Starting a job with one call, and calling it again in a job that has started."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway as dist
from free_ports import free_port
from ringway.errors import ConfigError, RendezvousError, UsageError
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
    assert [missing for _, missing in reported] == [[2], [2]]
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
