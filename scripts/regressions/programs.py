"""Bugs of commit 72db06d one by one, where the test that covers them fails there at another bug first.

    PYTHONPATH=CHECKOUT/src python scripts/regressions/programs.py [NAMES ...]

Only public names are used, so the programs run on any commit. Each returns what it saw, and raises if that is the bug.
`cpu_quota` needs root and version 1 of cgroups. `destroyed_in_a_callback` needs a core with the address sanitizer
(CMAKE_CXX_FLAGS=-fsanitize=address, LD_PRELOAD=libasan.so, ASAN_OPTIONS=detect_leaks=0).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ringway as dist
from ringway.compress import ErrorFeedback, OneBitAdam, compressed_all_reduce
from ringway.errors import CollectiveMismatch, CommTimeout, NotFinite
from ringway.parallel import register_data_parallel_hooks
from ringway.testing import RankContext, RankPool

NUMEL = 500


def _values(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * step + rank))


def late_peer(context: RankContext) -> str:
    """The timeout is 2 s, and rank 1 makes its asynchronous compressed call 6 s late."""
    context.start("shm", timeout=timedelta(seconds=2))
    feedback = ErrorFeedback()
    compressed_all_reduce(torch.ones(100), feedback["x"], "int8", async_op=True).wait()
    if context.rank == 1:
        context.store.wait(["called"], timedelta(seconds=30))
        time.sleep(6)
        try:
            compressed_all_reduce(torch.ones(100), feedback["x"], "int8", async_op=True).wait()
        except Exception as error:
            return type(error).__name__
        return "no error"
    began = time.monotonic()
    work = compressed_all_reduce(torch.ones(100), feedback["x"], "int8", async_op=True)
    context.store.set("called", "")
    try:
        work.wait()
    except CommTimeout:
        return f"CommTimeout after {time.monotonic() - began:.1f} s"
    raise AssertionError(f"the call returned after {time.monotonic() - began:.1f} s without an error")


def _optimizer(count: int, **options: Any) -> tuple[list[nn.Parameter], OneBitAdam]:
    parameters = [nn.Parameter(torch.full((NUMEL,), 2.0)) for _ in range(count)]
    return parameters, OneBitAdam(parameters, lr=1e-2, **options)


def _step(context: RankContext, parameters: list[nn.Parameter], optimizer: OneBitAdam, step: int) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = _values(context.rank, 10 * step + number) if parameter.requires_grad else None
    optimizer.step()


def unfrozen_later(context: RankContext) -> str:
    context.start("shm")
    parameters, optimizer = _optimizer(2, freeze_step=100)
    parameters[1].requires_grad_(False)
    _step(context, parameters, optimizer, 0)
    parameters[1].requires_grad_(True)
    _step(context, parameters, optimizer, 1)
    assert not parameters[1].eq(2.0).all(), "a parameter that was unfrozen after the first step never changes"
    return "it trains"


def frozen_later(context: RankContext) -> str:
    context.start("shm")
    parameters, optimizer = _optimizer(2, freeze_step=100)
    _step(context, parameters, optimizer, 0)
    parameters[1].requires_grad_(False)
    before = parameters[1].detach().clone()
    _step(context, parameters, optimizer, 1)
    assert torch.equal(parameters[1], before), "a parameter that was frozen after the first step keeps moving"
    return "it stays"


def frozen_and_added(context: RankContext) -> str:
    context.start("shm")
    parameters, optimizer = _optimizer(2, freeze_step=2)
    for step in range(4):
        _step(context, parameters, optimizer, step)
    parameters[1].requires_grad_(False)
    added = nn.Parameter(torch.ones(NUMEL))
    optimizer.add_param_group({"params": [added]})
    for step in range(4, 8):
        _step(context, [*parameters, added], optimizer, step)
    return "it goes on"


def no_gradient(context: RankContext) -> str:
    context.start("shm")
    parameters, optimizer = _optimizer(1, freeze_step=100, weight_decay=0.1)
    twin = nn.Parameter(parameters[0].detach().clone())
    plain = torch.optim.AdamW([twin], lr=1e-2, weight_decay=0.1)
    for step in range(3):
        have = step != 1
        parameters[0].grad = _values(context.rank, step) if have else None
        twin.grad = torch.stack([_values(rank, step) for rank in range(context.world_size)]).mean(0) if have else None
        optimizer.step()
        plain.step()
    torch.testing.assert_close(parameters[0], twin)
    return "as AdamW"


def nan_in_the_compressed_stage(context: RankContext) -> str:
    context.start("shm")
    parameters, optimizer = _optimizer(1, freeze_step=2)
    for step in range(4):
        _step(context, parameters, optimizer, step)
    parameters[0].grad = _values(context.rank, 4)
    if context.rank == 1:
        parameters[0].grad[7] = float("nan")
    try:
        optimizer.step()
    except NotFinite:
        _step(context, parameters, optimizer, 5)
        assert torch.isfinite(parameters[0]).all()
        return "NotFinite, and the next step is fine"
    raise AssertionError("no NotFinite")


def int4_unused(context: RankContext) -> str:
    """A layer that is used in every fourth step: the relative error of its summed gradient, with int4."""
    context.start("gloo")
    always, sometimes = nn.Linear(20, 10, bias=False), nn.Linear(20, 10, bias=False)
    model = nn.ModuleList([always, sometimes])
    hooks = register_data_parallel_hooks(model, codec="int4:64")
    summed, true = torch.zeros(10, 20), torch.zeros(10, 20)
    for step in range(81):
        inputs = [torch.randn(16, 20, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        model.zero_grad()
        total = always(inputs[context.rank]).sum()
        if step % 4 == 0:
            total = total + sometimes(inputs[context.rank]).sum()
            true += sum(each.sum(dim=0).expand(10, 20) for each in inputs) / 2
        total.backward()
        if step % 4 == 0:
            summed += sometimes.weight.grad
    hooks.remove()
    error = float((summed - true).norm() / true.norm())
    if error > 0.02:
        raise AssertionError(f"the relative error is {error:.2f}")
    return f"the relative error is {error:.4f}"


def fp8_in_fp16(context: RankContext) -> str:
    """Finite fp16 values near the largest, with fp8."""
    context.start("shm")
    feedback = ErrorFeedback()
    for step in range(6):
        values = 1 - 0.1 * torch.rand(NUMEL, generator=torch.Generator().manual_seed(step + context.rank))
        tensor = (values * (0.96 * torch.finfo(torch.float16).max * (0.5 if step == 0 else 1.0))).to(torch.float16)
        compressed_all_reduce(tensor, feedback["x"], "fp8", not_finite="propagate")
        if not torch.isfinite(tensor).all():
            raise AssertionError(f"step {step}: {int(torch.isinf(tensor).sum())} of {NUMEL} results are infinite")
    return "all results are finite"


def sizes_differ(context: RankContext) -> str:
    """1000 elements on rank 0, 1001 on rank 1."""
    context.start("shm")
    tensor = torch.arange(1000.0 + context.rank)
    try:
        compressed_all_reduce(tensor, ErrorFeedback(), "int8")
    except CollectiveMismatch:
        return "CollectiveMismatch"
    raise AssertionError(f"no error, and the last elements are {tensor[-2:].tolist()}")


def summary_alone(context: RankContext) -> str:
    """Rank 0 asks for a straggler report once more than rank 1, and both make a collective after it."""
    dist = context.start("gloo", timeout=timedelta(seconds=6))
    dist.configure(enabled=True, prof_all=True)
    dist.all_reduce(torch.ones(4))
    if context.rank == 0:
        dist.log_summary(show_straggler=True, return_dict=True)
    for _ in range(2):
        dist.log_summary(show_straggler=True, return_dict=True)
        dist.all_reduce(torch.ones(1))
    return "the group lives"


def cpu_quota(context: RankContext) -> str:
    """Two ranks that may use one CPU together, as with docker's --cpus=1. Rank 1 is always a little late."""
    folder = Path("/sys/fs/cgroup/cpu/ringway-regressions")
    folder.mkdir(exist_ok=True)
    (folder / "cpu.cfs_period_us").write_text("100000")
    (folder / "cpu.cfs_quota_us").write_text("100000")
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    context.start("shm")
    began = time.process_time()
    for _ in range(2000):
        if context.rank == 1:
            time.sleep(1e-6)
        dist.barrier()
    took = time.process_time() - began
    context.store.set(str(context.rank), "")
    context.store.wait(["0", "1"])
    Path("/sys/fs/cgroup/cpu/cgroup.procs").write_text(str(os.getpid()))
    used = f"{took * 1e6 / 2000:.0f} us of CPU time per barrier"
    assert context.rank == 1 or took / 2000 < 35e-6, f"rank 0 spins: {used}"
    return used


def destroyed_in_a_callback(context: RankContext) -> str:
    """The last reference to a group goes on the group's own thread."""
    dist = context.start("shm")
    for number in range(30):
        ended, held = threading.Event(), [dist.new_group()]
        if context.rank == 1:
            context.store.wait([f"go {number}"])

        def destroy(_: Any, held: list[Any] = held, ended: threading.Event = ended) -> None:
            dist.destroy_process_group(held.pop())
            ended.set()

        dist.all_reduce(torch.ones(1000), group=held[0], async_op=True).get_future().then(destroy)
        del held, destroy
        context.store.set(f"go {number}", "")
        assert ended.wait(30)
        dist.barrier()
    return "it ends"


PROGRAMS = {
    program.__name__: program
    for program in (
        late_peer, unfrozen_later, frozen_later, frozen_and_added, no_gradient, nan_in_the_compressed_stage,
        int4_unused, fp8_in_fp16, sizes_differ, summary_alone, cpu_quota, destroyed_in_a_callback,
    )
}  # fmt: skip


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def main() -> None:
    names = sys.argv[1:] or list(PROGRAMS)
    failed = 0
    with RankPool(2) as pool:
        for name in names:
            pool.replace()
            ended = pool.try_run(PROGRAMS[name], world_size=2, timeout=45, grace=15)
            failed += not all(outcome.ok for outcome in ended)
            for outcome in ended:
                said = outcome.value if outcome.ok else _last_line(outcome.detail)
                print(f"{name}, rank {outcome.rank}: {outcome.kind}: {said}", flush=True)
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
