"""Habits of torch's users: compiled models, restarts by torchrun, built-in hooks. Each of these failed once."""

from __future__ import annotations

import mmap
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ringway as dist
from ringway import torch_patches
from ringway.compress import OneBitAdam, ddp_hook
from ringway.errors import CommTimeout, UsageError
from ringway.parallel import register_data_parallel_hooks
from ringway.testing import RankContext, RankPool

# torch.compile


def _model(buffers: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if buffers else nn.ReLU(), nn.Linear(6, 2))


def _loss(model: Any, step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + c10d.get_rank())
    loss: torch.Tensor = model(torch.randn(3, 4)).square().mean()
    return loss


def _gradients(wrap: Callable[[nn.Module], Any], compiled: bool, buffers: bool = False) -> list[torch.Tensor]:
    """The gradients of two steps. In a compiled step, C++ calls ringway's group or hooks between two graphs."""
    torch.compiler.reset()
    model = wrap(_model(buffers))

    def step(number: int) -> None:
        _loss(model, number).backward()

    run = torch.compile(step, backend="eager") if compiled else step
    for number in range(2):
        run(number)
    return [parameter.grad for parameter in model.parameters()]


def _with_int8(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, ddp_hook("int8"))
    return wrapped


def _with_hooks(model: nn.Module) -> nn.Module:
    register_data_parallel_hooks(model)
    return model


def _compiled(context: RankContext) -> None:
    context.start("shm")
    cases = (
        (DistributedDataParallel, False),
        (DistributedDataParallel, True),
        (_with_hooks, False),
        (_with_int8, False),
    )
    for wrap, buffers in cases:
        expected = _gradients(wrap, compiled=False, buffers=buffers)
        torch.testing.assert_close(_gradients(wrap, compiled=True, buffers=buffers), expected)
    torch.compiler.reset()
    model = _model()
    adam = OneBitAdam(model.parameters(), freeze_step=1)
    step = torch.compile(adam.step, backend="eager")
    for number in range(3):
        _loss(model, number).backward()
        step()


def test_compiled_models_and_steps(pool: RankPool) -> None:
    """C++ calls ringway's groups and hooks inside a compiled region, where the compiler must not trace them."""
    pool.run(_compiled, world_size=2)


# Restarts by torchrun


def _attempt(context: RankContext, number: int, start: str) -> float:
    own = c10d.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    own.set(f"{number}/{context.rank}", str(os.getpid()))
    if number == 0 and context.rank == 1:  # rank 0 is killed while the group forms
        victim = int(own.get("0/0"))
        time.sleep(0.3)
        os.kill(victim, signal.SIGKILL)
        return 0.0
    if number == 1 and context.rank == 0:
        time.sleep(0.5)  # the other rank reads what the first attempt left behind
    if start == "torch":
        c10d.init_process_group("shm")
    elif start == "init_process_group":
        dist.init_process_group("gloo")
    else:
        dist.init_distributed(verbose=False)
    one = torch.ones(1)
    c10d.all_reduce(one)
    c10d.destroy_process_group()
    return one.item()


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_restarted_job_does_not_read_what_the_attempt_before_posted(pool: RankPool, hosts: int) -> None:
    """torchrun keeps one store for all attempts of a job. On several hosts, each agent counts the failures of its own
    ranks only. The secret is for the last start; without one, ranks of one host make their own."""
    for start in ("torch", "init_process_group", "init_distributed"):
        agents = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment: dict[str, str | None] = {
            "TORCHELASTIC_RUN_ID": "restarted",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(agents.port),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": str(2 // hosts),
            "RINGWAY_JOB_SECRET": "5" * 64 if start == "init_distributed" and hosts == 2 else None,
        }
        for number in (0, 1):
            pool.replace()
            outcomes = pool.try_run(
                _as_torchrun, _attempt, number, start, hosts, world_size=2, timeout=60, environment=environment
            )
            assert number == 0 or [outcome.value for outcome in outcomes] == [2.0, 2.0], "\n".join(map(str, outcomes))


def _as_torchrun(context: RankContext, function: Callable[..., Any], number: int, start: str, hosts: int) -> Any:
    failures = number if hosts == 1 or context.rank == 0 else 0
    host, local = divmod(context.rank, 2 // hosts)
    os.environ.update(
        RANK=str(context.rank),
        LOCAL_RANK=str(local),
        GROUP_RANK=str(host),
        TORCHELASTIC_RESTART_COUNT=str(failures),
    )
    return function(context, number, start)


# A world of one


def _alone(context: RankContext) -> None:
    """Nothing is written to memory that may not be written, so nothing is copied."""
    context.start("shm")
    memory = mmap.mmap(-1, 4 << 20, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only
        constant = torch.frombuffer(memory, dtype=torch.float32)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        dist.all_reduce(constant, op)
        dist.reduce(constant, 0, op)
        work = dist.all_reduce(constant, op, async_op=True)
        assert work is not None
        work.wait()
    c10d.all_reduce(constant)
    dist.inference_all_reduce(constant)
    dist.all_reduce_coalesced([constant, constant])
    halved = torch.full((8,), 3.0)
    dist.all_reduce(halved, dist.premul_sum(0.5))
    assert halved.tolist() == [1.5] * 8
    target = torch.zeros(8)
    dist.reduce_scatter_tensor(target, halved, dist.ReduceOp.AVG)
    assert torch.equal(target, halved)


def test_a_world_of_one_copies_nothing(pool: RankPool) -> None:
    pool.run(_alone, world_size=1)


# DDP's built-in hooks


def _built_in(context: RankContext, backend: str) -> None:
    context.start(backend)
    kinds = c10d.BuiltinCommHookType

    def gradients(register: Callable[[Any], None]) -> list[torch.Tensor]:
        model = DistributedDataParallel(_model())
        register(model)
        for step in range(2):
            model.zero_grad()
            _loss(model, step).backward()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    for kind, hook in (
        (kinds.ALLREDUCE, default_hooks.allreduce_hook),
        (kinds.FP16_COMPRESS, default_hooks.fp16_compress_hook),
    ):
        built_in = gradients(lambda model, kind=kind: model._register_builtin_comm_hook(kind))
        torch.testing.assert_close(built_in, gradients(lambda model, hook=hook: model.register_comm_hook(None, hook)))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_built_in_hooks_of_ddp(pool: RankPool, backend: str) -> None:
    pool.run(_built_in, backend, world_size=2)


# torch's functions that ask for a group's name


def _named(context: RankContext, backend: str) -> list[str]:
    context.start(backend)
    other = c10d.new_group([0])
    for group in (None, c10d.group.WORLD):
        c10d.monitored_barrier(group)
        c10d.monitored_barrier(group, timedelta(seconds=60), wait_all_ranks=True)
    if context.rank == 0:
        c10d.monitored_barrier(other, 60.0)  # type: ignore[arg-type] # torch takes a number too
        with pytest.raises(CommTimeout, match="Rank 1 failed to pass monitoredBarrier"):
            c10d.distributed_c10d.monitored_barrier(timeout=timedelta(0))
    else:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            c10d.monitored_barrier(other)
        assert "does not belong" in str(said[0].message)
    described = [repr(c10d.group.WORLD), repr(other)]
    dist.destroy_process_group()  # ranks have passed different numbers of barriers
    store = c10d.HashStore()
    dist.init_process_group(f"cpu:{backend}", store=store, rank=0, world_size=1, enable_reconfigure=False)
    assert dist.get_backend() == f"cpu:{backend}", "as the user wrote it"
    dist.destroy_process_group()
    c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    c10d.monitored_barrier()  # a group of torch's own
    c10d.destroy_process_group()
    return described


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_functions_of_torch_that_ask_for_the_backends_name(pool: RankPool, backend: str) -> None:
    for rank, (world, other) in enumerate(pool.run(_named, backend, world_size=2)):
        assert re.fullmatch(f"<ringway group .+: {backend}, rank {rank} of 2>", world)
        if rank == 0:
            assert re.fullmatch(f"<ringway group .+: {backend}, rank 0 of 1>", other)


# The switch of patches


def test_patches_of_torch_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set(torch_patches.PATCHES)
    for value, left in (("all", set()), ("new_group, ddp_split", names - {"new_group", "ddp_split"}), ("", names)):
        monkeypatch.setenv("RINGWAY_NO_PATCH", value)
        torch_patches._left_out.cache_clear()
        patched = set()
        for name in names:
            owner = SimpleNamespace(function=abs)
            torch_patches.patch(name, "function", owner, by=lambda original: lambda number: -original(number))
            if owner.function(-3) == -3:
                patched.add(name)
        assert patched == left
    monkeypatch.setenv("RINGWAY_NO_PATCH", "monitored_barier")
    torch_patches._left_out.cache_clear()
    with pytest.warns(UserWarning, match="ringway has no patch 'monitored_barier'"):
        torch_patches.enabled("new_group")
    torch_patches._left_out.cache_clear()


def _unsorted(context: RankContext) -> None:
    dist = context.start("shm")
    group = dist.new_group([0, 1], sort_ranks=False)  # sorted anyway, so every torch can
    dist.all_reduce(total := torch.ones(3), group=group)
    assert total.unique().tolist() == [2.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "new_group", lambda ranks, timeout: pytest.fail("torch was asked"))
        with pytest.raises(UsageError, match="sort_ranks=False needs a newer torch"):
            dist.new_group([1, 0], sort_ranks=False)


def test_ranks_in_another_order_need_a_torch_that_can(pool: RankPool) -> None:
    pool.run(_unsorted, world_size=2)
