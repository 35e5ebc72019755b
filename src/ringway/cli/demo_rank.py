"""What each rank of `ringway demo` runs. Rank 0 writes the results to the file given first."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringway as dist
from ringway.call import OP_BY_NAME
from ringway.groups.world import world
from ringway.job.init import init_distributed

SIZES = {"64 B": 16, "1 MiB": 1 << 18}
REPEATS = 20
STEPS = 6


def main(results: str, backend: str | None) -> None:
    init_distributed(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    facts: dict[str, Any] = {"ranks": size, "backend": dist.get_backend(), "torch": torch.__version__}
    facts["rows"] = [row for op in _OPS for row in _measure(op, rank, size)]
    facts["rows"].append(_objects(rank, size))
    facts |= _train(rank)
    if rank == 0:
        Path(results).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def _all_reduce(count: int, rank: int, size: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    tensor = torch.empty(count)

    def run() -> None:
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor)

    return run, lambda: bool((tensor == size * (size + 1) / 2).all())


def _all_gather(count: int, rank: int, size: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    mine, everyone = torch.full((count,), float(rank)), torch.empty(size * count)
    expected = torch.arange(size, dtype=torch.float32).repeat_interleave(count)
    return lambda: _none(dist.all_gather_into_tensor(everyone, mine)), lambda: torch.equal(everyone, expected)


def _broadcast(count: int, rank: int, size: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    tensor = torch.full((count,), 7.0 if rank == 0 else 0.0)
    return lambda: _none(dist.broadcast(tensor, 0)), lambda: bool((tensor == 7).all())


_OPS = {"all_reduce": _all_reduce, "all_gather_into_tensor": _all_gather, "broadcast": _broadcast}


def _none(work: Any) -> None:
    assert work is None  # a synchronous call returns nothing to wait for


def _measure(op: str, rank: int, size: int) -> list[dict[str, str]]:
    rows = []
    for label, count in SIZES.items():
        run, right = _OPS[op](count, rank, size)
        run()
        correct = dist.reduce_object(int(right()), dist.ReduceOp.MIN)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        median = statistics.median(times)
        nbytes = count * 4 * (size if op == "all_gather_into_tensor" else 1)
        rate = nbytes / median * OP_BY_NAME[op].bus_factor(size) / 1e9
        rows.append(
            {
                "what": f"{op}, {label}",
                "result": "correct" if correct else "WRONG",
                "time": f"{median * 1e6:.0f} µs",
                "bandwidth": f"{rate:.2f} GB/s" if size > 1 else "-",
            }
        )
    return rows


def _objects(rank: int, size: int) -> dict[str, str]:
    start = time.perf_counter()
    gathered = dist.allgather_object({"rank": rank})
    seconds = time.perf_counter() - start
    right = gathered == [{"rank": other} for other in range(size)]
    result = "correct" if dist.reduce_object(int(right), dist.ReduceOp.MIN) else "WRONG"
    return {"what": "allgather_object", "result": result, "time": f"{seconds * 1e6:.0f} µs", "bandwidth": "-"}


def _train(rank: int) -> dict[str, Any]:
    """Each rank has its own part of the data; DDP averages the gradients through ringway's group."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)
    inputs = torch.randn(64, 16)
    targets = inputs.sum(dim=1, keepdim=True) / 4
    losses = []
    before = world.recorder.total
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    by_ddp = world.recorder.total - before
    weights: Tensor = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    others = dist.allgather_object(weights)
    return {
        "losses": losses,
        "weights_equal": all(torch.equal(weights, other) for other in others),
        "calls": world.recorder.total,
        "ddp_calls": by_ddp,
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
