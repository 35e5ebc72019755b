"""Compression on a GPU, with a report for docs/proofs/numerics_gpu.md.

The Triton kernels are compared with the reference on the CPU, and random programs (tests/compress/random_programs.py)
run on ranks that share one GPU: through gloo, and through nccl. NCCL before 2.30 refuses two ranks on one GPU; then the
programs run on nccl with one rank. A failure prints the first elements that differ, or the smallest program that fails.

    PYTHONPATH=src python scripts/numerics_proof.py --seconds 600
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import proofs
import torch

from ringway.testing import RankContext, RankPool

sys.path.insert(0, str(proofs.ROOT / "tests" / "compress"))
import kernel_checks
import random_programs

PROVES = (
    "src/ringway/compress",
    "src/ringway/parallel/data.py",
    "src/ringway/parallel/compression.py",
    "tests/compress/kernel_checks.py",
    "tests/compress/random_programs.py",
)
SPECS = ("onebit:64", "onebit:1024", "onebit:tensor", "int8:64", "int8:tensor", "int4:64", "int4:tensor", "fp8:256")
SIZES = (1, 13, 777, 100_003)
KERNELS = ("triton", "reference")

Row = tuple[str, bool, str]


def compared_kernels(device: str) -> Iterator[Row]:
    """Triton on the device, case by case."""
    name, place = ("triton" if device == "cuda" else "native"), torch.device(device)
    for spec in SPECS:
        cases = list(kernel_checks.cases(SIZES, (spec,)))
        apart = [(case, found) for case in cases if (found := kernel_checks.differences(case, name, place))]
        for case, found in apart:
            print(case, *found, sep="\n    ", flush=True)
        title = f"{name} {spec} and the reference, " + ("scales to 2^-17" if "onebit" in spec else "bit by bit")
        first = "" if not apart else f"; first: {apart[0][0]} {apart[0][1][0]}"
        yield title, not apart, f"{len(apart)} of {len(cases)} cases differ{first}"


def meets(context: RankContext, backend: str, device: str) -> None:
    dist = context.start(backend)
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.all_reduce(torch.ones(4, device=device))
    dist.destroy_process_group()


def random_runs(backend: str, ranks: int, device: str, seconds: float, first_seed: int) -> Row:
    """Random programs until the time is up. A failure is reduced without a limit."""
    title = f"{backend}, {ranks} rank{'s' if ranks > 1 else ''}: random programs on {device} tensors"
    kernels = KERNELS if device == "cuda" else ("native", "reference")
    programs = random_programs.programs((backend,), (ranks,), kernels)
    with RankPool(ranks) as pool:
        outcomes = pool.try_run(meets, backend, device, world_size=ranks, timeout=90, grace=10)
        if not all(outcome.ok for outcome in outcomes):
            return title, True, f"not available here: {outcomes[0].detail.strip().splitlines()[-1][:200]}"
        try:
            ran = random_programs.run_for(seconds, first_seed, programs, pool, device)
        except BaseException as error:
            notes = "\n".join(getattr(error, "__notes__", []))
            print(error, notes, sep="\n", flush=True)
            return title, False, f"{notes[:600]} {str(error)[-600:]}"
    return title, True, f"{ran} programs, 0 differences"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=proofs.FOLDER / "numerics_gpu.md")
    parser.add_argument("--commit")
    parser.add_argument("--seconds", type=float, default=600.0, help="for the random programs of each backend")
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--device", default="cuda", help="cpu tries the script on a machine without a GPU")
    arguments = parser.parse_args()
    device = arguments.device
    rows = []
    for row in compared_kernels(device):
        rows.append(row)
        print(*row, flush=True)
    for backend, ranks in (("gloo", 2), ("nccl" if device == "cuda" else "shm", 2), ("nccl", 1)):
        if backend == "nccl" and device == "cpu":
            continue
        if backend == "nccl" and ranks == 1 and "not available" not in rows[-1][2]:
            continue  # two ranks are the harder test
        rows.append(random_runs(backend, ranks, device, arguments.seconds, arguments.seed))
        print(*rows[-1], flush=True)
    name = torch.cuda.get_device_name(0) if device == "cuda" else platform.machine()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if device == "cuda":
        import triton

        versions += f", Triton {triton.__version__}, NCCL {proofs.loaded_nccl()}"
    command = f"    PYTHONPATH=src python scripts/numerics_proof.py --seconds {arguments.seconds:g}"
    lines = [command, "", f"{name}, {versions}, seed {arguments.seed}.", "", "| what | holds | seen |", "|---|---|---|"]
    lines += [
        f"| {title} | {'yes' if fine else 'NO'} | {said.replace(chr(10), ' ').replace('|', '/')} |"
        for title, fine, said in rows
    ]
    title = "Compression in float64, on ranks that share a GPU"
    proofs.write(arguments.output, title, PROVES, "\n".join(lines), arguments.commit)
    return 0 if all(fine for _, fine, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
