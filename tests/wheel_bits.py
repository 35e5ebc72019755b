"""Prints a hash of the bits that every rank gets, one line a case: `ringway run -n 2 wheel_bits.py`.

scripts/wheel_test.py compares the lines of a wheel with those of the native build, which another compiler made. Every
instruction set gives the same bits, so the core is asked too which ones it has chosen.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection
from pathlib import Path

import torch

import ringway as dist
from ringway import _core
from ringway.compress import ErrorFeedback, compressed_all_reduce

CODECS = ("onebit", "int8", "int4", "fp8", "topk:0.01")
SIZES = (1, 7, 1000, 100_003)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
AVX512 = {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)


def best_instructions(machine: str, flags: Collection[str]) -> dict[str, str]:
    """The widest instructions that the core has for sums and for codecs, on a machine of this kind."""
    if machine == "aarch64":
        return {"sums": "neon", "codecs": "neon"}
    if set(flags) >= AVX512:
        return {"sums": "avx512", "codecs": "avx2"}
    return {"sums": "avx2", "codecs": "avx2"} if "avx2" in flags else {"sums": "plain", "codecs": "baseline"}


def check_instructions() -> None:
    """/proc/cpuinfo lists only what the kernel lets programs use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    best = best_instructions(platform.machine(), flags)
    chosen = {"sums": _core.shm_isa(), "codecs": _core.pack_instructions()}
    assert chosen == best, f"the core has chosen {chosen}, and this CPU has {best}"


def tell(case: str, tensor: torch.Tensor) -> None:
    digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest)
    if dist.get_rank() == 0:
        print("bits:", case, *found, flush=True)


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size + dist.get_rank())
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 3).to(dtype)


def main() -> None:
    check_instructions()
    dist.init_distributed("shm", verbose=False)
    for dtype in (*FLOATS, torch.int32):
        for size in SIZES:
            for op in OPS[:1] + OPS[2:] if dtype is torch.int32 else OPS:
                tensor = values(size, dtype)
                dist.all_reduce(tensor, op=op)
                tell(f"all_reduce {op} {dtype} {size}", tensor)
    for codec in CODECS:
        feedback = ErrorFeedback()
        for step in range(3):
            tensor = values(SIZES[-1], torch.float32)
            compressed_all_reduce(tensor, feedback, codec=codec)
            tell(f"codec {codec} step {step}", tensor)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
