"""Checks of the kernels that reduce CUDA tensors, on a host without a GPU: Triton interprets them on the CPU
(TRITON_INTERPRET=1), or compiles them for an H200. Prints what is wrong."""

from __future__ import annotations

import os
from typing import Any

import torch

from ringway.backends.compose import reduce_rows
from ringway.backends.shm import cuda_kernels
from ringway.backends.shm.cuda_device import reduces_as
from ringway.call import Reduce, reduces

INTERPRETED = tuple(dtype for dtype in cuda_kernels._TYPES if dtype is not torch.bfloat16)
"""The interpreter truncates bfloat16, where the device rounds."""


def check_values() -> list[str]:
    wrong = []
    for dtype in INTERPRETED:
        for kind in (None, *Reduce):
            if kind is not None and (not reduces(dtype, kind) or reduces_as(dtype, kind) is None):
                continue
            for ranks, count, skipped in ((2, cuda_kernels.BLOCK + 7, 0), (3, 37, 1)):
                whole = [(torch.randn(count + skipped) * 50).to(dtype) for _ in range(ranks)]
                ins = [tensor[skipped:] for tensor in whole]
                outs = [torch.zeros(count + 1, dtype=dtype) for _ in range(ranks)]
                addresses = [tensor.data_ptr() for tensor in ins], [tensor.data_ptr() for tensor in outs]
                cuda_kernels.launch(*addresses, count, dtype, kind)
                expected = ins if kind is None else [reduce_rows(ins, kind)] * ranks
                if not all(torch.equal(out[:-1], one) and not out[-1] for out, one in zip(outs, expected, strict=True)):
                    wrong.append(
                        f"{'copies' if kind is None else kind.name} of {dtype}, {ranks} ranks, {count} elements"
                    )
    return wrong


def check_code() -> list[str]:
    """Compiled for an H200: whole vectors are loaded, and nothing is fused."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wrong = []
    names: list[str] = list(cuda_kernels._kernel.arg_names)
    for dtype, kind, ranks in ((torch.float32, Reduce.SUM, 2), (torch.bfloat16, Reduce.AVG, 8), (torch.int64, None, 4)):
        stored, wide = cuda_kernels._TYPES[dtype]
        fixed: dict[str, Any] = {"INS": ranks, "OUTS": ranks, "TYPE": stored, "WIDE": wide}
        fixed |= {"REDUCE": -1 if kind is None else int(kind), "ALIGNED": True, "BLOCK": cuda_kernels.BLOCK}
        signature = {name: "constexpr" if name in fixed else "i64" for name in names}
        source = ASTSource(cuda_kernels._kernel, signature, {(names.index(name),): fixed[name] for name in fixed})
        options = {"num_warps": cuda_kernels.WARPS, "enable_fp_fusion": False}
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        vectors = f"ld.global.v{16 // max(dtype.itemsize, 4)}"
        if vectors not in code or "fma.rn.f32" in code:
            wrong.append(f"{'copies' if kind is None else kind.name} of {dtype}")
    return wrong


if __name__ == "__main__":
    print(check_values() if os.environ.get("TRITON_INTERPRET") == "1" else check_code())
