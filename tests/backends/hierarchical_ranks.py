"""What the tests run on the ranks of two hosts: `python hierarchical_ranks.py SCENARIO`; prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from launched import SOME, run_cases, small, training

import ringway as dist
from ringway.backends.several import policy
from ringway.groups import replacement
from ringway.groups.bridge import Bridge
from ringway.groups.world import world
from ringway.testing.conformance import Case, Setting

LIMIT = timedelta(seconds=90)
ELEMENTS = 16 << 20


def sent() -> int:
    """The bytes that this host has sent over its link: all interfaces except loopback."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        if name.strip() != "lo":
            total += int(counts.split()[8])
    return total


def _tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def _wanted(case: Case) -> bool:
    """Small tensors, and large ones of the ops that only then go by hosts."""
    return small(case) or case.name in ("broadcast_large", "reduce_scatter_tensor_large")


def conformance() -> dict[str, Any]:
    dist.init_distributed("hierarchical", timeout=LIMIT, verbose=False)
    findings: list[str] = []
    seconds: dict[str, float] = {}
    setting = Setting("hierarchical", dist.get_world_size(), every=SOME)
    run_cases(setting, None, findings, seconds, _tell, _wanted)
    return {"findings": findings, "cases": len(seconds), **training()}


def default() -> dict[str, Any]:
    """No backend is named: which one is chosen, what it does, and which backends sub-groups get."""
    dist.init_distributed(timeout=LIMIT)
    rank = dist.get_rank()
    groups = {
        "world": None,
        "host 0": dist.new_group([0, 1]),
        "host 1": dist.new_group([2, 3]),
        "across": dist.new_group([1, 2]),
        "uneven": dist.new_group([0, 1, 2]),
    }
    backends = {}
    for name, group in groups.items():
        if dist.get_rank(group) < 0:
            continue
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor, group=group)
        assert tensor[-1].item() == dist.get_world_size(group)
        backends[name] = dist.communicator(group).backend.name
    in_order = []
    for _ in range(3):  # hierarchical, gloo, hierarchical: each call sees the result of the previous one
        tensor = torch.full((1 << 20,), float(rank))
        dist.all_reduce(tensor, async_op=True)  # 6
        dist.reduce(tensor, 3, async_op=True)  # 24 on rank 3
        dist.broadcast(tensor, 3)
        in_order.append((tensor.min().item(), tensor.max().item()))
    origins = dist.communicator().origins()["cpu"]
    return {"backends": backends, "reason": world.backend_reason, "in_order": in_order, "origins": origins}


def replaced() -> dict[str, Any]:
    """A program that asks torch for gloo: what it gets with RINGWAY_REPLACE, and the losses without and with it."""

    def started() -> list[float]:
        c10d.init_process_group("gloo", timeout=LIMIT)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1, bias=False))
        with torch.no_grad():
            model.module.weight.fill_(0.5)
        losses = []
        for step in range(3):
            inputs = torch.arange(64.0) % (c10d.get_rank() + step + 2)
            model.zero_grad()
            model(inputs).sum().backward()
            losses.append(model.module.weight.grad.double().sum().item())
        return losses

    gloo = started()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    os.environ[replacement.VARIABLE] = replacement.ONLY
    replacement.install()
    losses = started()
    names = {}
    for name, ranks in (("world", range(4)), ("host 0", [0, 1]), ("host 1", [2, 3]), ("across", [1, 2])):
        group = c10d.new_group(list(ranks), backend="gloo")
        if c10d.get_rank() in ranks:
            tensor = torch.ones(100_000)
            c10d.all_reduce(tensor, group=group)
            assert tensor[-1].item() == len(ranks)
            assert c10d.get_backend(group) == "gloo"
            names[name] = repr(group) if isinstance(group, Bridge) else "torch's own"
    return {"gloo": gloo, "losses": losses, "names": names, "default": c10d.get_backend()}


def speed() -> dict[str, Any]:
    """64 MB of fp32 through both in alternation: seconds, bytes on the wire, and whether the sums are equal."""
    dist.init_distributed("gloo", timeout=LIMIT, verbose=False)
    rank = dist.get_rank()
    groups = {"gloo": None, "hierarchical": dist.new_group(backend="hierarchical")}
    values = torch.randint(-1000, 1000, (ELEMENTS,), generator=torch.Generator().manual_seed(rank)).float()
    times: dict[str, list[float]] = {name: [] for name in groups}
    wire: dict[str, int] = {}
    results = {}
    for turn in range(4):
        for name, group in groups.items():
            tensor = values.clone()
            dist.barrier()
            before = sent()
            dist.barrier()  # no rank of this host may send before the count
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            spent = torch.tensor(time.perf_counter() - began)
            dist.barrier()
            wire[name] = sent() - before
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if turn:
                times[name].append(spent.item())
            results[name] = tensor
    mixed = values.clone()
    dist.all_reduce(mixed, group=_mixed_group())
    return {
        "mixed": bool(torch.equal(mixed, results["gloo"])),
        "seconds": {name: min(taken) for name, taken in times.items()},
        "wire": wire,
        "equal": bool(torch.equal(results["gloo"], results["hierarchical"])),
    }


def _mixed_group() -> Any:
    """gloo for small calls, hierarchical for large ones."""
    rules = [{"op": "all_reduce", "up_to": 65536, "backend": "gloo"}, {"op": "all_reduce", "backend": "hierarchical"}]
    world.policy = policy.load({"rules": rules}, dist.get_world_size())
    try:
        group = dist.new_group(backend="gloo")
    finally:
        world.policy = None
    words = dist.communicator(group).origins()["cpu"]["all_reduce"]
    assert words == "gloo up to 65536 B, else hierarchical", words
    return group


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario = {"conformance": conformance, "default": default, "speed": speed, "replaced": replaced}[sys.argv[1]]
    _tell(scenario())
    dist.destroy_process_group()
