"""What the ranks of scripts/shm_cuda_proof.py do on shm with CUDA tensors: training, memory of all kinds, faults."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from nccl_ranks import step, transformer, wrapped
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ringway.errors import CommTimeout
from ringway.testing import RankContext

BACKEND = "cpu:shm,cuda:shm"
MIB = 1 << 20
Checked = tuple[bool, str]


def started(context: RankContext, **options: Any) -> Any:
    torch.cuda.set_device(0)
    return context.start(BACKEND, **options)


def backend_of(dist: Any) -> Any:
    return dist.communicator().devices._backends["cuda"]


# Training


class Elementwise(torch.nn.Module):
    """Its gradients are products of single numbers, so a GPU computes the same bits as a CPU."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(count, generator=generator).to(dtype))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.weight * given


def ddp_like_the_cpu(context: RankContext) -> Checked:
    """DDP on CPU tensors and on CUDA tensors: the losses and the weights have the same bits."""
    started(context)
    checks, differ = 0, []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        trained = {}
        for device in ("cpu", "cuda"):
            model = DistributedDataParallel(Elementwise(300_001, dtype).to(device))
            generator, losses = torch.Generator().manual_seed(context.rank), []
            for _ in range(6):
                given = torch.randn(300_001, generator=generator).to(dtype).to(device)
                found = model(given)
                found.backward(found.detach())
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.sub_(weight.grad.mul(0.0625))  # two roundings: a GPU would fuse `alpha`
                        weight.grad = None
                losses.append(found.detach().cpu().double().square().sum())
            trained[device] = (torch.stack(losses), model.module.weight.detach().cpu())
        checks += 1
        if any(not torch.equal(a, b) for a, b in zip(trained["cpu"], trained["cuda"], strict=True)):
            differ.append(str(dtype))
    return not differ, f"{checks} dtypes, 6 steps of 300,001 weights; different: {differ}"


def fsdp2(context: RankContext) -> Checked:
    """A sharded transformer, against one process that has every rank's batch."""
    started(context)
    size, group = context.world_size, c10d.group.WORLD
    sharded, optimizer = wrapped("FSDP2", group)
    alone = transformer()
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=1e-2)
    generators = [torch.Generator("cuda").manual_seed(rank) for rank in range(size)]
    for _ in range(4):
        batches = [torch.randn(4, 32, 256, device="cuda", generator=each) for each in generators]
        step(sharded, optimizer, batches[context.rank])
        step(alone, alone_optimizer, torch.cat(batches))
    pairs = list(zip(sharded.parameters(), alone.parameters(), strict=True))
    furthest = max(float((mine.full_tensor() - own).abs().max()) for mine, own in pairs)  # type: ignore[attr-defined]
    return furthest < 1e-4, f"{len(pairs)} parameters after 4 steps are within {furthest:.1e} of one process"


def dtensor(context: RankContext) -> Checked:
    started(context)
    size, generator = context.world_size, torch.Generator("cuda").manual_seed(5)
    mesh = DeviceMesh.from_group(c10d.group.WORLD, "cuda")
    left, right = (torch.randn(64 * size, 64 * size, device="cuda", generator=generator) for _ in range(2))
    expected, wrong = left @ right, []
    placements = (Shard(0), Shard(1), Replicate())
    for one in placements:
        for other in placements:
            product = distribute_tensor(left, mesh, [one]) @ distribute_tensor(right, mesh, [other])
            for placed in placements:
                found = product.redistribute(mesh, [placed]).full_tensor()
                if not torch.allclose(found, expected, rtol=1e-3, atol=1e-2):
                    wrong.append(f"{one} @ {other} to {placed}")
    return not wrong, f"27 products of sharded matrices; wrong: {wrong}"


# Memory


def allocated_again(context: RankContext) -> Checked:
    """Tensors are freed, and others are allocated at their addresses, while the peers have the memory mapped."""
    dist = started(context)
    generator, wrong, rounds = random.Random(7), 0, 120
    for number in range(rounds):
        count = generator.choice((1000, 300_000, MIB, 5 * MIB, 20 * MIB))
        tensor = torch.full((count,), float(context.rank + number), device="cuda")
        dist.all_reduce(tensor)
        size = context.world_size
        right = size * (size - 1) / 2 + size * number
        wrong += not bool((tensor == right).all())
        del tensor
        if generator.random() < 0.4:
            torch.cuda.empty_cache()
    mappings = backend_of(dist)._link.open_mappings
    return wrong == 0, f"wrong: {wrong} of {rounds} rounds; {mappings} mappings at the end"


def not_exportable(context: RankContext) -> Checked:
    """Expandable segments cannot be shared with other processes: a staging buffer is used."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    dist = started(context)
    wrong = []
    for nbytes in (4096, MIB, 64 * MIB):
        tensor = torch.full((nbytes // 4,), float(context.rank + 1), device="cuda")
        dist.all_reduce(tensor)
        own = torch.full((nbytes // 4,), float(context.rank), device="cuda")
        gathered = torch.empty(context.world_size, nbytes // 4, device="cuda")
        dist.all_gather_into_tensor(gathered.view(-1), own)
        total = sum(range(1, context.world_size + 1))
        expected = torch.arange(float(context.world_size), device="cuda")[:, None]
        if not bool((tensor == total).all()) or not bool((gathered == expected).all()):
            wrong.append(nbytes)
    staged = backend_of(dist)._staging[1]
    return not wrong and staged > 0, f"wrong sizes: {wrong}; staging buffer of {staged / MIB:.0f} MiB"


def seen_under_another_name(context: RankContext, uuid: str) -> Checked:
    """Rank 1 names the GPU by its UUID, so the ranks' settings differ."""
    if context.rank == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    dist = started(context)
    tensor = torch.ones(4 * MIB, device="cuda")
    dist.all_reduce(tensor)
    link = backend_of(dist)._link
    right = bool((tensor == context.world_size).all())
    return right and link is not None, f"direct, GPU {'' if link is None else link.uuid[:8]}"


# Faults


def absent(context: RankContext) -> Checked:
    """A rank that does not come is named when the timeout is over, and Ctrl-C ends a wait."""
    dist = started(context)
    group = dist.new_group(list(range(context.world_size)), timeout=timedelta(seconds=1))
    tensor = torch.ones(MIB, device="cuda")
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    if context.rank != 0:
        context.store.wait(["rank 0 was interrupted"])
        return True, ""
    told, began = "no timeout", time.monotonic()
    try:
        dist.all_reduce(tensor, group=group)
    except CommTimeout as error:
        told = str(error)
    waited = time.monotonic() - began
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    interrupted, began = False, time.monotonic()
    try:
        dist.all_reduce(tensor)
    except KeyboardInterrupt:
        interrupted = True
    after = time.monotonic() - began
    torch.cuda.synchronize()
    context.store.set("rank 0 was interrupted", "")
    return "rank 1" in told and 0.9 < waited < 5 and interrupted and after < 3, (
        f"the timeout of 1 s ended the call after {waited:.1f} s; Ctrl-C after 0.3 s ended it after {after:.1f} s"
    )
