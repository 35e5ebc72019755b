"""Checks every collective on CUDA tensors, for the proofs on a host with one GPU.

mpiexec -n 2 python scripts/cuda_ranks.py mpi       prints the number of checks and those that failed
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch

import ringway
from ringway.bench import CASES, Place, WrongResult
from ringway.call import Reduce, reduces
from ringway.testing.probe import torch_op
from ringway.testing.reference import reduced, relative_tolerance, small_values

SIZES = (4, 4 << 10, 4 << 20)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64, torch.bool)


def check_cases(rank: int, size: int, without: Collection[str] = ()) -> tuple[int, list[str]]:
    """The bench's cases on the GPU. Their results are exact."""
    checks, wrong = 0, []
    for name, case in CASES.items():
        if size < case.min_size or name in without:
            continue
        for nbytes in SIZES:
            place = Place(rank, size, nbytes, device="cuda")
            checks += 1
            try:
                case.candidate(name, ringway, place, torch.cuda.synchronize).verify()  # type: ignore[misc]
            except WrongResult as error:
                wrong.append(str(error))
    return checks, wrong


def check_reductions(rank: int, size: int) -> tuple[int, list[str]]:
    """Every reduction of the common dtypes, synchronous and asynchronous, compared with one process's arithmetic."""
    checks, wrong = 0, []
    for dtype in DTYPES:
        for reduce in Reduce:
            if not reduces(dtype, reduce):
                continue
            inputs = [small_values(1031, dtype, member, reduce) for member in range(size)]
            expected, rtol = reduced(inputs, reduce), relative_tolerance(dtype, reduce, size)
            for async_op in (False, True):
                tensor = inputs[rank].cuda()
                work = ringway.all_reduce(tensor, torch_op(ringway, reduce), async_op=async_op)
                if work is not None:
                    work.wait()
                checks += 1
                if not torch.allclose(tensor.cpu().double(), expected.double(), rtol=rtol, atol=0):
                    wrong.append(f"all_reduce {reduce.name} of {dtype}, async_op={async_op}")
    return checks, wrong


SYMMETRIC = {
    "both_send_first",
    "receives_posted_before_sends",
    "tags_are_kept_apart",
    "messages_of_one_tag_keep_their_order",
    "recv_from_any_source",
    "recv_from_any_source_by_tag",
    "strided_messages",
    "messages_and_collectives_do_not_mix",
    "every_pair_at_once",
}
"""Cases that NCCL cannot pass, with or without ringway."""


def check_all(rank: int, size: int, without: Collection[str] = ()) -> tuple[int, list[str]]:
    torch.cuda.set_device(0)
    cases, reductions = check_cases(rank, size, without), check_reductions(rank, size)
    return cases[0] + reductions[0], cases[1] + reductions[1]


def train(rank: int, size: int) -> tuple[list[float], list[float]]:
    """The losses of DDP on the GPU, and of one process with the whole batch."""
    single, parallel = _losses(0, 1, wrapped=False, whole=size), _losses(rank, size, wrapped=True, whole=size)
    return single, parallel


def _losses(rank: int, size: int, *, wrapped: bool, whole: int) -> list[float]:
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).cuda()
    if wrapped:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(5):
        batch = torch.randn(4 * whole, 8, generator=generator).cuda()
        share = batch.shape[0] // size
        loss = model(batch[rank * share : (rank + 1) * share]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if wrapped:
            ringway.all_reduce(total, ringway.ReduceOp.AVG)
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    ringway.init_distributed(sys.argv[1], verbose=False)
    checks, wrong = check_all(ringway.get_rank(), ringway.get_world_size())
    everybody = ringway.allgather_object(wrong)
    if ringway.get_rank() == 0:
        everything = [text for said in everybody for text in said]
        print(f"{checks} checks on {ringway.get_world_size()} ranks, wrong: {everything}")
    ringway.destroy_process_group()
    sys.exit(1 if any(everybody) else 0)
