"""Programs written for deepspeed.comm: its ops, its logger, its environment, its objects."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringway
from programs import ended_with, ringway_run_variables, run_program
from ringway.compat import deepspeed as dist
from ringway.compat.deepspeed import launcher
from ringway.errors import DiscoveryError, UsageError
from ringway.testing import RankContext, RankPool

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "deepspeed_dropin.py"
SIZE = 2


def _every_op(context: RankContext) -> None:
    context.start("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    other = 1 - rank
    mine = torch.full((4,), rank + 1.0)

    def full(value: float, count: int = 4) -> torch.Tensor:
        return torch.full((count,), value)

    tensor = mine.clone()
    assert dist.all_reduce(tensor, dist.ReduceOp.SUM, None, False, False, "label", "me") is None
    assert torch.equal(tensor, full(3))
    for op, expected in (("MAX", 2), ("MIN", 1), ("PRODUCT", 2), ("AVG", 1.5)):
        tensor = mine.clone()
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        assert torch.equal(tensor, full(expected)), op
    tensor = mine.clone()
    work = dist.all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, async_op=True)
    work.wait()
    assert torch.equal(tensor, full(3))
    assert torch.equal(dist.inference_all_reduce(mine.clone()), full(3))
    pair = [mine.clone(), mine.clone()]
    dist.all_reduce_coalesced(pair)
    assert all(torch.equal(t, full(3)) for t in pair)

    tensor = mine.clone()
    dist.broadcast(tensor, src=1)
    assert torch.equal(tensor, full(2))
    tensor = mine.clone()
    dist.reduce(tensor, 0)
    assert rank or torch.equal(tensor, full(3))
    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, mine)
    assert torch.equal(parts[1], full(2))
    whole = torch.empty(8)
    for gather in (dist.all_gather_into_tensor, dist.allgather_fn):
        gather(whole.zero_(), mine)
        assert torch.equal(whole, torch.cat([full(1), full(2)]))
    with pytest.raises(UsageError, match="output 0 is not contiguous"):
        dist.all_gather_coalesced([torch.empty(4, 2).T], [mine])
    outs = [torch.empty(8), torch.empty(2, 2)]
    dist.all_gather_coalesced(outs, [mine, mine[:2]])
    assert torch.equal(outs[0], whole)
    assert torch.equal(outs[1], torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    for scatter in (dist.reduce_scatter_tensor, dist.reduce_scatter_fn):
        share = torch.empty(2)
        scatter(share, mine)
        assert torch.equal(share, full(3, 2))
    share = torch.empty(2)
    dist.reduce_scatter(share, list(mine.chunk(2)))
    assert torch.equal(share, full(3, 2))
    swapped = torch.empty(4)
    dist.all_to_all_single(swapped, mine)
    assert torch.equal(swapped, torch.cat([full(1, 2), full(2, 2)]))
    received = [torch.empty(2), torch.empty(2)]
    dist.all_to_all(received, list(mine.chunk(2)))
    assert torch.equal(received[1], full(2, 2))
    gathered = [torch.empty(4) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    assert gathered is None or torch.equal(gathered[1], full(2))
    share = torch.empty(2)
    dist.scatter(share, list(mine.chunk(2)) if rank == 0 else None, src=0)
    assert torch.equal(share, full(1, 2))

    box = torch.empty(4)
    if rank == 0:
        dist.send(mine, 1, tag=3)
        dist.recv(box, 1, tag=4)
    else:
        dist.recv(box, 0, tag=3)
        dist.send(mine, 0, tag=4)
    assert torch.equal(box, full(other + 1))
    incoming = dist.irecv(box.zero_(), other)
    outgoing = dist.isend(mine, other)
    incoming.wait()
    outgoing.wait()
    assert torch.equal(box, full(other + 1))
    batch = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, box.zero_(), other)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert torch.equal(box, full(other + 1))

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    objects = [{"from": rank}]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [{"from": 1}]
    dist.barrier()
    dist.monitored_barrier()

    group = dist.new_group([0, 1])
    assert dist.get_all_ranks_from_group(group) == [0, 1]
    assert dist.get_global_rank(group, 1) == 1
    for has in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce_coalesced", "coalescing_manager"):
        assert getattr(dist, f"has_{has}")()
    dist.set_backend()


def test_every_op_with_deepspeeds_arguments(pool: RankPool) -> None:
    pool.run(_every_op, world_size=SIZE)


def _backend_objects(context: RankContext) -> None:
    context.start("gloo")
    backend = dist.cdb
    assert isinstance(backend, dist.TorchBackend)
    assert (backend.name, backend.is_initialized(), backend.using_mpi) == ("torch", True, False)
    assert (backend.get_rank(), backend.get_world_size()) == (context.rank, SIZE)
    tensor = torch.full((3,), context.rank + 1.0)
    backend.all_reduce(tensor, dist.ReduceOp.SUM)
    assert torch.equal(tensor, torch.full((3,), 3.0))
    backend.barrier()
    assert dist.nccl_backend is None
    ccl = dist.CCLBackend()
    assert isinstance(ccl, dist.TorchBackend)
    if not ccl.is_initialized():
        with pytest.raises(ringway.errors.BackendUnavailable, match="ccl"):
            ccl.run_collective("barrier")


def test_backend_objects(pool: RankPool) -> None:
    pool.run(_backend_objects, world_size=SIZE)


def _profiling(context: RankContext) -> dict[str, int]:
    context.start("gloo")
    tensor = torch.ones(256)
    dist.configure(deepspeed_config={"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["broadcast"]}})
    dist.reset_log()
    dist.all_reduce(tensor)  # not selected
    dist.broadcast(tensor, 0)  # selected by its op
    dist.all_reduce(tensor, prof=True, log_name="gradients")  # selected for this call
    work = dist.all_reduce(tensor, prof=True, log_name="later", async_op=True)
    work.wait()
    logger = dist.comms_logger
    assert (logger.enabled, logger.prof_all, logger.prof_ops) == (True, False, ["broadcast"])
    counts = {
        name: sum(size["count"] for size in logger.get_operation_summary(name).values())
        for name in dist.get_logged_comm_ops()
    }
    assert logger.get_operation_summary("gradients")[1024]["count"] == 1
    assert logger.get_raw_data()["gradients"][1024][0] == 1
    with pytest.raises(AttributeError, match="colour"):
        logger.colour = 1
    assert logger.get_operation_summary("nothing") is None
    assert dist.get_comm_operation_count() == logger.get_total_operations() == 3
    logger.start_profiling_op(["all_reduce"])
    dist.all_reduce(tensor)
    logger.stop_profiling_op(["all_reduce"])
    dist.all_reduce(tensor)
    assert logger.get_operation_summary("all_reduce")[1024]["count"] == 1
    logger.append("all_reduce", "by hand", 2.0, 4096)
    assert logger.get_operation_summary("by hand")[4096]["total_latency_ms"] == pytest.approx(2.0)
    logger.append("all_reduce", "by hand", 4.0, 4096)
    count, latencies, *rates = logger.get_raw_data()["by hand"][4096]
    assert count == len(latencies) == len(rates[0]) == len(rates[1]) == 2
    assert sum(latencies) == pytest.approx(6.0)
    summary = logger.log_all(print_log=False, return_dict=True)
    assert summary["metadata"]["world_size"] == SIZE
    assert "gradients" in summary["summary"]
    logger.enabled = False
    dist.reset_log()
    dist.all_reduce(tensor, prof=True)
    assert not dist.has_comm_data()
    dist.configure(prof_all=True, prof_ops=[])
    return counts


@dist.timed_op
def _own_collective(tensor: torch.Tensor, group: Any = None) -> None:
    ringway.all_reduce(tensor, group=group)


def _prof_of_one_call(context: RankContext) -> None:
    context.start("shm")
    tensor = torch.ones(256)
    dist.configure(enabled=True, prof_all=False, prof_ops=[], verbose=False)
    try:
        for _ in range(3):
            dist.all_reduce(tensor, prof=True)
            dist.all_reduce(tensor)
            _own_collective(tensor, prof=True)  # type: ignore[call-arg]
            _own_collective(tensor)
        assert dist.comms_logger.get_operation_summary("all_reduce")[1024]["count"] == 3
        assert dist.comms_logger.get_operation_summary("_own_collective")[1024]["count"] == 3
        printed = io.StringIO()
        with redirect_stdout(printed):
            report = dist.comms_logger.log_all(print_log=False, show_straggler=True, return_dict=True)
        assert printed.getvalue() == ""
        assert report["straggler_analysis"]["all_reduce"][1024]["count"] == 3
    finally:
        dist.reset_log()
        dist.configure(enabled=False, prof_all=True)
    printed = io.StringIO()
    with redirect_stdout(printed):
        dist.log_summary()
        dist.comms_logger.log_all()
    lines = printed.getvalue().splitlines()
    assert len(lines) == (2 if context.rank == 0 else 1)  # log_all prints on every rank
    assert all("ringway.configure(enabled=True)" in line for line in lines)


def test_prof_of_one_call_reaches_every_table(pool: RankPool) -> None:
    pool.run(_prof_of_one_call, world_size=2)


def test_prof_and_log_name(pool: RankPool) -> None:
    for counts in pool.run(_profiling, world_size=SIZE):
        assert counts == {"broadcast": 1, "gradients": 1, "later": 1}


def test_deepspeeds_configuration_objects() -> None:
    block = SimpleNamespace(enabled=True, verbose=False, prof_all=False, debug=False, prof_ops=["reduce"])
    whole = SimpleNamespace(comms_config=SimpleNamespace(comms_logger_enabled=True, comms_logger=block))
    try:
        dist.configure(deepspeed_config=whole)
        assert (dist.comms_logger.enabled, dist.comms_logger.prof_ops) == (True, ["reduce"])
        dist.configure(SimpleNamespace(_param_dict={"comms_logger": {"enabled": False}}))
        assert dist.comms_logger.enabled is False
        dist.configure(SimpleNamespace(comms_config=SimpleNamespace(comms_logger_enabled=False)))
        assert dist.comms_logger.enabled is False
    finally:
        dist.configure(enabled=False, prof_all=True, prof_ops=[])


def test_before_initialization() -> None:
    assert dist.is_available()
    assert not dist.is_initialized()
    assert dist.cdb is None
    with pytest.raises(UsageError):
        dist.has_all_reduce_coalesced()
    with pytest.raises(UsageError):
        dist.init_distributed(dist_init_required=False)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A separate environment: what the deepspeed API writes into it does not stay."""
    own: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", own)
    return own


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_mpi_discovery(environ: dict[str, str]) -> None:
    environ.update(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    dist.mpi_discovery(distributed_port=1234, verbose=False)
    found = {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert found == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
    }


def test_mpi_discovery_without_a_launcher_is_a_world_of_one(environ: dict[str, str]) -> None:
    dist.mpi_discovery(verbose=False)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["MASTER_PORT"]) == ("0", "1", "29500")


def test_azureml(environ: dict[str, str]) -> None:
    environ.update(OPEN_MPI | {"AZUREML_EXPERIMENT_ID": "e", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"})
    assert dist.in_aml()
    assert not dist.in_aws_sm()
    assert not dist.in_dlts()
    dist.patch_aml_env_for_torch_nccl_backend(verbose=False)
    assert (environ["RANK"], environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("3", "10.0.0.4", "6105")
    assert environ["NCCL_SOCKET_IFNAME"] == dist.DEFAULT_AML_NCCL_SOCKET_IFNAME
    environ.pop("AZ_BATCH_MASTER_NODE")
    with pytest.raises(DiscoveryError, match="first node"):
        dist.patch_aml_env_for_torch_nccl_backend(verbose=False)


def test_sagemaker(environ: dict[str, str]) -> None:
    environ.update(OPEN_MPI | {"SM_TRAINING_ENV": "{}"})
    assert dist.in_aws_sm()
    dist.patch_aws_sm_env_for_torch_nccl_backend(verbose=False)
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == ("3", "1", "4")
    environ.pop("OMPI_COMM_WORLD_LOCAL_RANK")
    with pytest.raises(DiscoveryError, match="OMPI_COMM_WORLD_LOCAL_RANK"):
        dist.patch_aws_sm_env_for_torch_nccl_backend(verbose=False)


def test_places_by_the_launcher(environ: dict[str, str]) -> None:
    assert (dist.get_world_rank_from_launcher(), dist.get_world_size_from_launcher()) == (0, 1)
    environ.update(OPEN_MPI)
    assert (dist.get_world_rank_from_launcher(), dist.get_world_size_from_launcher()) == (3, 4)
    assert dist.get_local_rank_from_launcher() == 1
    environ["LOCAL_RANK"] = "0"
    assert dist.get_local_rank_from_launcher() == 0


def _limits(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> timedelta | None:
    passed: list[Any] = []
    monkeypatch.setattr(launcher.init, "init_distributed", lambda *given: passed.extend(given))
    monkeypatch.setattr(launcher, "_leave_variables", lambda port: None)
    dist.init_distributed(**arguments)
    limit: timedelta | None = passed[4]
    return limit


def test_timeout_that_was_set_is_the_one_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _limits(monkeypatch) == dist.default_pg_timeout == timedelta(minutes=10)
    assert _limits(monkeypatch, timeout=timedelta(seconds=5)) == timedelta(seconds=5)
    assert _limits(monkeypatch, config={"ringway": {"timeout": 7}}) is None
    monkeypatch.setenv("RINGWAY_TIMEOUT", "9")
    assert _limits(monkeypatch) is None


def _outer_launcher(context: RankContext) -> tuple[str, ...]:
    """deepspeed's start under MPI, inside a job whose variables are still set."""
    ringway.destroy_process_group()
    dist.init_distributed(rank=0, world_size=1)
    ringway.destroy_process_group()
    return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def test_variables_left_behind_are_this_jobs(pool: RankPool) -> None:
    outer: dict[str, str | None] = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "1"}
    (ended,) = pool.try_run(_outer_launcher, world_size=1, environment=outer)
    assert ended.ok, ended
    assert ended.value == ("0", "1", "node1")
    assert "timeout 600 s (deepspeed's default)" in ended.output


def test_message_sizes() -> None:
    tensor = torch.zeros(10, dtype=torch.float64)
    size = dist.get_msg_size_from_args
    assert size(dist.all_reduce, tensor) == size(dist.all_reduce, tensor=tensor) == 80
    assert size(dist.all_to_all, [], [tensor, tensor]) == 160
    assert size(dist.all_gather, [], tensor) == 80
    assert size(dist.batch_isend_irecv, [dist.P2POp(dist.isend, tensor, 0)]) == 80
    assert size(dist.barrier) == 0
    assert dist.get_tensor_position(dist.all_gather) == 1
    assert dist.get_tensor_position(dist.barrier) == -1
    assert dist.get_tensor_kwarg(dist.reduce_scatter, {"input_list": [tensor]}) == [tensor]
    assert dist.get_default_args(dist.broadcast)["log_name"] == "broadcast"
    assert dist.get_debug_log_name({"log_name": "x"}, False) == "x"
    assert "Caller Func" in dist.get_debug_log_name({"log_name": "x"}, True)


def test_small_classes() -> None:
    group = dist.ProcessGroup(3, [0, 1])
    assert (group.comm_id, group.ranks, group.size) == (3, [0, 1], 2)
    base = dist.Backend("x", 1, 2)
    assert (base.name, base.world_rank, base.world_size, base.is_initialized()) == ("x", 1, 2, False)
    base.init_process_group()
    assert base.is_initialized()
    with pytest.raises(UsageError):
        dist.P2POp(print, torch.ones(1), 0)


def test_the_example_runs(pool: RankPool) -> None:
    with ringway_run_variables(2) as environments:
        ranks = run_program(pool, EXAMPLE, environments=environments)
    assert all(map(ended_with, ranks)), ranks
    assert "sum 3, logged ['broadcast', 'gradients'] on 2 ranks" in ranks[0].output
