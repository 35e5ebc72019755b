"""Runs the conformance cases, and training, on ranks that a launcher started."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as c10d
from torch.nn.parallel import DistributedDataParallel

import ringway as dist
from ringway.testing.conformance import Case, Setting, all_cases
from ringway.testing.probe import Probe

SOME = 1 if os.environ.get("RINGWAY_SOAK") else 7
"""Of the kinds that another test runs all of on the same code: every Nth."""


def about_the_backend(case: Case) -> bool:
    """Without invalid calls, which never reach a backend, and objects, which are bytes to it."""
    return case.run.__module__.rpartition(".")[2] not in ("cases_errors", "cases_objects")


def small(case: Case) -> bool:
    """For further groups on the same backend: the cases without large tensors."""
    return about_the_backend(case) and not case.name.endswith("_large")


def run_cases(
    setting: Setting,
    group: Any,
    findings: list[str],
    seconds: dict[str, float],
    report: Callable[[dict[str, Any]], None],
    wanted: Callable[[Case], bool] = lambda case: True,
) -> None:
    """Runs every case that the setting allows, on ranks that are already in one job. A case that raises is reported at
    once, because the other ranks may hang in it."""
    members = setting.members or tuple(range(setting.world_size))
    rank = members.index(dist.get_rank())
    for case in all_cases().values():
        if not (setting.admits(case) and wanted(case)):
            continue
        store = c10d.PrefixStore(f"case/{setting}/{case.name}", c10d.distributed_c10d._get_default_store())
        probe = Probe(dist, group, rank, list(members), store, case.name)
        began = time.perf_counter()
        try:
            setting.run(case.run, probe)
        except Exception:
            text = f"{case.name} of {setting} at {probe.parameters}: {traceback.format_exc()}"
            report({"findings": [*findings, text]})
            raise
        seconds[f"{setting} {case.name}"] = time.perf_counter() - began
        findings += [f"[{setting}] {finding}" for finding in probe.findings]
        dist.barrier(group=group)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _trained(wrap: Callable[[torch.nn.Module], torch.nn.Module], rank: int, size: int) -> list[float]:
    torch.manual_seed(1)
    model = wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(5):
        batch = torch.randn(4 * size, 8, generator=generator)
        mine = batch[rank * 4 : (rank + 1) * 4]
        loss = model(mine).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


def training() -> dict[str, Any]:
    """DDP and FSDP2 on the world, compared with one process that has the whole batch."""
    from torch.distributed.fsdp import fully_shard  # takes a second of CPU time

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    expected = []
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        loss = model(torch.randn(4 * size, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    def sharded(module: torch.nn.Module) -> torch.nn.Module:
        fully_shard(module, mesh=mesh)
        return module

    return {
        "expected": expected,
        "ddp": _trained(DistributedDataParallel, rank, size),
        "fsdp2": _trained(sharded, rank, size),
    }
