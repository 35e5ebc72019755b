"""The codec `topk` on a GPU: whether its kernels write what the reference writes, and what they cost.

    PYTHONPATH=src python scripts/topk_proof.py

Times are in copies of the buffer, 268 M fp32 elements, medians, in turns with the copy. Encoding with feedback reads
the values and the residual and writes the residual: 12 bytes an element, 1.5 copies. Decoding writes 4: half a copy.
Exits with 1 if a result is wrong, or if encoding at most a tenth of the elements takes more than 6 copies.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import proofs
import torch

from ringway.compress import get_codec, kernels_for
from ringway.compress.windows import Sharding, new_frames

NUMEL = 1 << 28
ROUNDS = 20
DEVICE = torch.device("cuda", 0)
MOST_COPIES = 6.0
LIMITED = ("topk:0.01:2", "topk:0.03:2", "topk:0.1:4")
SPECS = (*LIMITED, "topk:0.5:8")
SIZES = (1, 13, 777, 4096, 9000, 100_003)
PROVES = ("src/ringway/compress/kernels/triton_topk.py", "src/ringway/compress/kernels/gpu_topk.py")


def check(spec: str) -> int:
    """How many cases were compared with the reference. Raises AssertionError if one differs."""
    sys.path.insert(0, str(proofs.ROOT / "tests" / "compress"))
    import kernel_checks

    compared = list(kernel_checks.cases(SIZES, (spec,)))
    for case in compared:
        kernel_checks.compare(case, "triton", DEVICE)
    kernel_checks.check_not_finite(spec, "triton", device=DEVICE)
    return len(compared)


def time_steps(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each step on the device."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            taken[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in taken.items()}


def measure(spec: str) -> dict[str, float]:
    codec = get_codec(spec)
    kernels = kernels_for(codec, DEVICE, "triton")
    sharding = Sharding(NUMEL, 1)
    (window,) = sharding.windows(sharding.shard)
    values, target = torch.randn(NUMEL, device=DEVICE), torch.empty(NUMEL, device=DEVICE)
    residual = torch.zeros(NUMEL, device=DEVICE)
    frames = new_frames(codec, 1, window.columns, DEVICE)
    return time_steps(
        {
            "copy": lambda: target.copy_(values),
            "encode": lambda: kernels.encode(values, residual, window, frames, None),
            "decode": lambda: kernels.decode(frames, window, target),
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=proofs.FOLDER / "topk_gpu.md")
    parser.add_argument("--commit", help="for a tree without git history")
    options = parser.parse_args()
    rows, within = [], True
    for spec in SPECS:
        taken = measure(spec)
        encode, decode = taken["encode"] / taken["copy"], taken["decode"] / taken["copy"]
        within &= spec not in LIMITED or encode <= MOST_COPIES
        rows.append(f"| `{spec}` | {taken['copy']:.2f} ms | {encode:.2f} | {decode:.2f} |")
        print(rows[-1], flush=True)
    # Nearly all the time goes into compiling, on one core each.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        compared = sum(pool.map(check, SPECS))
    lines = [
        f"`python scripts/topk_proof.py` on {torch.cuda.get_device_name(0)}, torch {torch.__version__}.",
        "",
        f"{compared} cases equal the reference. In buffer copies (268 M fp32 elements):",
        "",
        "| codec | a copy | encode | decode |",
        "|---|---|---|---|",
        *rows,
    ]
    print("\n".join(lines), flush=True)
    if within:
        proofs.write(options.output, "The codec topk on a GPU", PROVES, "\n".join(lines), options.commit)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
