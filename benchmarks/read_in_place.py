"""Reading in place against copying through the segment (docs/shm.md), call by call, in one run.

    ringway run -n 8 benchmarks/read_in_place.py [--ops all_to_all ...] [--sizes 1048576 ...] [--rounds 15]

Two groups of the same ranks take turns: one never reads in place, the other always does where shm has a way to. The
table has medians in microseconds, and how many times faster reading is. all_reduce in place exists between two ranks
only. `--sizes` are the bytes of all blocks together, or of an all_reduce or a message.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import ringway as dist
import ringway._core as _core

NEVER = 1 << 60
ALWAYS = 1
TOTAL = 128 << 20
"""About as many bytes go into one sample."""


def calls_of(nbytes: int) -> dict[str, Callable[[dist.ProcessGroup], object]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    count = nbytes // 4
    given, found, block = torch.ones(count), torch.zeros(count), torch.ones(count // size)
    even = count // size * size

    def exchange(group: dist.ProcessGroup) -> None:
        sent = dist.isend(given, (rank + 1) % size, group=group)
        dist.recv(found, (rank - 1) % size, group=group)
        assert sent is not None
        sent.wait()

    return {
        "all_reduce": lambda group: dist.all_reduce(found, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(found[:even], block, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(found[:even], given[:even], group=group),
        "exchange": exchange,
    }


def seconds(call: Callable[[dist.ProcessGroup], object], group: dist.ProcessGroup, calls: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call(group)
    dist.barrier()
    return (time.perf_counter() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=["all_reduce", "all_gather", "all_to_all", "exchange"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1 << each for each in (16, 17, 18, 20, 22, 24, 26)])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    dist.init_distributed("shm")
    groups: dict[str, dist.ProcessGroup] = {}
    for name, least in (("segment", NEVER), ("in place", ALWAYS)):
        _core.shm_set_read_once_from(least)
        groups[name] = dist.new_group(list(range(dist.get_world_size())))
        dist.barrier(group=groups[name])
    _core.shm_set_read_once_from(-1)
    if dist.get_rank() == 0:
        print(f"{'op':12}{'bytes':>10}{'segment':>12}{'in place':>12}   segment / in place")
    for nbytes in arguments.sizes:
        for op, call in calls_of(nbytes).items():
            if op not in arguments.ops:
                continue
            found: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(arguments.rounds):
                for name, group in groups.items():
                    call(group)
                    found[name].append(seconds(call, group, max(2, min(200, TOTAL // nbytes))))
            segment, in_place = (1e6 * statistics.median(each) for each in found.values())
            if dist.get_rank() == 0:
                print(f"{op:12}{nbytes:>10}{segment:>12.1f}{in_place:>12.1f}   {segment / in_place:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
