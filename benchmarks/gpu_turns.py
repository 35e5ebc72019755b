"""What it costs two processes to take turns on one GPU, and how to avoid it.

    ringway run -n 2 benchmarks/gpu_turns.py           needs a GPU; with and without MPS

Without MPS, a GPU runs the work of one process at a time. Both ranks of this job work on 4 KiB of the same GPU, in
several ways that could be steps of a small all_reduce. The shared memory of the CPU keeps the two in step. Each line is
the median of the rounds, in microseconds:

- a kernel of one rank, and one of each rank at once: the difference is a turn;
- a copy to the host and one back, of each rank, or both ranks' copies made by rank 0, which maps the other's memory;
- a kernel of rank 0 that reads and writes both ranks' memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

import ringway as dist

NBYTES = 4 << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    dist.init_distributed("shm", verbose=False)
    rank = dist.get_rank()
    torch.cuda.set_device(0)
    mine = torch.ones(NBYTES // 4, device="cuda")
    handles: list[object] = [None, None]
    dist.all_gather_object(handles, reduce_tensor(mine)[1])
    host = [torch.ones(NBYTES // 4).pin_memory() for _ in range(2)]
    devices = (mine, rebuild_cuda_tensor(*handles[1 - rank]))  # type: ignore[misc]

    def kernel() -> None:
        mine.add_(1)
        torch.cuda.synchronize()

    def copies(count: int) -> Callable[[], None]:
        def copy() -> None:
            for i in range(count):
                host[i].copy_(devices[i], non_blocking=True)
            torch.cuda.synchronize()
            host[0].add_(host[1])
            for i in range(count):
                devices[i].copy_(host[i], non_blocking=True)
            torch.cuda.synchronize()

        return copy

    def both() -> None:
        torch.add(*devices, out=mine)
        devices[1].copy_(mine)
        torch.cuda.synchronize()

    def nothing() -> None:
        pass

    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "nothing": (nothing, nothing),
        "a kernel of rank 0": (kernel, nothing),
        "a kernel of each rank": (kernel, kernel),
        "copies of rank 0, of its memory": (copies(1), nothing),
        "copies of each rank, of its own memory": (copies(1), copies(1)),
        "copies of rank 0, of both ranks' memory": (copies(2), nothing),
        "kernels of rank 0, on both ranks' memory": (both, nothing),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(rounds + 20):
        for name, work in ways.items():
            dist.barrier()
            began = time.perf_counter()
            work[rank]()
            dist.barrier()
            if step >= 20:
                taken[name].append(time.perf_counter() - began)
    if rank == 0:
        for name, each in taken.items():
            print(f"{name:42} {1e6 * statistics.median(each):7.1f} µs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
