"""vLLM's own communicator and ringway's beside each other, on two ranks: what they compute, and how long they take.

    torchrun --nproc-per-node 2 vllm_op.py

Rank 0 prints one line of JSON: by kind and bytes, the seconds of one call in each round, for both. The two take turns.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_DIST_IDENT", f"op-{os.getppid()}")

import torch
import torch.distributed as dist
import vllm.platforms
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from ringway.compat.vllm.communicator import RingwayCommunicator

vllm.platforms.current_platform.import_kernels()
ROUNDS, CALLS = 15, 300
# vLLM's wheel for aarch64 needs the CPU's bf16 instructions, and is killed by SIGILL without them.
HAS_BF16 = platform.machine() != "aarch64" or " bf16" in Path("/proc/cpuinfo").read_text()
HALF = torch.bfloat16 if HAS_BF16 else torch.float16


def same(ours: Any, theirs: Any) -> None:
    """Everything that vLLM asks of a communicator, on both."""
    rank = dist.get_rank()
    for dtype in (HALF, torch.float32):
        data = torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)).to(dtype)
        assert torch.equal(ours.all_reduce(data.clone()), theirs.all_reduce(data.clone())), dtype
        for dim in (0, 1, -1):
            assert torch.equal(ours.all_gather(data, dim), theirs.all_gather(data, dim)), (dtype, dim)
            mine, other = ours.gather(data, 1, dim), theirs.gather(data, 1, dim)
            assert (mine is None and other is None) if rank != 1 else torch.equal(mine, other), (dtype, dim)
        expected = data.clone()
        dist.broadcast(expected, 1)
        assert torch.equal(ours.broadcast(data.clone(), 1), expected)
    several = {"hidden": torch.arange(12.0).view(3, 4).t(), "none": torch.empty(0, 5), "word": "of no tensor"}
    if rank == 0:
        ours.send_tensor_dict(several, 1)
        ours.send(several["hidden"].contiguous(), 1)
    else:
        arrived = ours.recv_tensor_dict(0)
        assert list(arrived) == list(several)
        assert all(
            torch.equal(arrived[key], value) if isinstance(value, torch.Tensor) else arrived[key] == value
            for key, value in several.items()
        )
        assert torch.equal(ours.recv(torch.Size((4, 3)), torch.float32, 0), several["hidden"])


def timed(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> float:
    dist.barrier()
    for _ in range(20):
        call(tensor)
    began = time.perf_counter()
    for _ in range(CALLS):
        call(tensor)
    return (time.perf_counter() - began) / CALLS


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    theirs = CpuCommunicator(dist.group.WORLD, None, dist.group.WORLD, "tp:0")
    assert theirs.supports_tensor_dict, "vLLM's own shared memory is not in use"
    ours = RingwayCommunicator(dist.group.WORLD, None, dist.group.WORLD, "tp:1")
    same(ours, theirs)
    found: dict[str, dict[str, list[float]]] = {}
    for kind, calls in {
        "all_reduce": (theirs.all_reduce, ours.all_reduce),
        "all_gather": (theirs.all_gather, ours.all_gather),
    }.items():
        for nbytes in (4096, 8192, 16384, 32768, 65536):
            tensor = torch.zeros(8, nbytes // 16, dtype=HALF)
            rounds = [[timed(call, tensor) for call in calls] for _ in range(ROUNDS)]
            found[f"{kind} {nbytes}"] = {"vllm": [one for one, _ in rounds], "ringway": [two for _, two in rounds]}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"dtype": str(HALF), "times": found}), flush=True)
    ours.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
