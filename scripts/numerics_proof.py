"""Compression on a GPU, with a report for docs/proofs/numerics_gpu.md.

The Triton kernels are compared with the reference on the CPU. Then two ranks share one GPU, through gloo and through
nccl. They run the tests of mismatched calls, of split models and of `OneBitAdam` with a scaler and with a NaN, and then
random programs (tests/compress/random_programs.py). NCCL before 2.30 refuses two ranks on one GPU; then the random
programs run on nccl with one rank. A failure prints the first elements that differ, the errors of the ranks, or the
smallest program that fails.

    PYTHONPATH=src python scripts/numerics_proof.py --seconds 600
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import proofs
import torch

from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

sys.path.extend(str(proofs.ROOT / "tests" / folder) for folder in ("compress", "parallel", "."))
import kernel_checks
import random_programs
import rank_compress
import rank_gradients
import rank_state

PROVES = (
    "src/ringway/compress",
    "src/ringway/parallel/data.py",
    "src/ringway/parallel/compression.py",
    "src/ringway/parallel/gradients.py",
    "tests/compress/kernel_checks.py",
    "tests/compress/random_programs.py",
    "tests/compress/rank_compress.py",
    "tests/compress/rank_state.py",
    "tests/parallel/rank_gradients.py",
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


def checked(context: RankContext, device: str, check: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if device == "cuda":
        torch.cuda.set_device(0)
    try:
        return check(context, *arguments)
    finally:
        leave()


def named(results: list[list[str]], sides: list[tuple[Any, ...]]) -> bool:
    """Both ranks were told what each of them called."""
    return all(
        f"float32[{numel}]" in side and f"codec {codec}" in side
        for told in results
        for (numel, _, codec), side in zip(sides, told, strict=True)
    )


def skipped_together(results: list[tuple[Any, ...]], steps: int, agreeing: bool = True) -> bool:
    """Equal weights on both ranks after as many steps; with `agreeing`, equal scales too."""
    (first, *mine), (second, *theirs) = results
    same = torch.equal(torch.as_tensor(first), torch.as_tensor(second)) and mine[0] == theirs[0] == steps
    return same and (not agreeing or mine == theirs)


Check = tuple[str, Callable[[list[Any]], bool], Callable[..., Any], tuple[Any, ...]]
"""A title, what must hold for the ranks' results, the function of a rank, and its arguments."""


def checks(backend: str, device: str) -> Iterator[Check]:
    for name in ("codecs of the same length", "lengths with the same padding"):
        sides = rank_compress.MISMATCHES[name]
        words = " against ".join(f"{codec} of {numel}" for numel, _, codec in sides)
        title = f"{words} elements: CollectiveMismatch on both ranks, which names both"
        arguments = (backend, sides, "synchronous", device)
        yield title, partial(named, sides=sides), rank_compress.mismatched, arguments
    for how in ("compressed_all_reduce", "register_data_parallel_hooks", "ddp_hook"):
        title = f"{how} with int8 after new_group([0]): 4 steps have the right mean"
        yield title, all_returned, rank_compress.beside_another_group, (backend, how, device)
    title = "clip_grad_norm_ on a split model: norms and weights of the whole model in float64"
    yield title, all_returned, rank_gradients.clipping, (backend, device)
    title = "GradScaler on a split model: both skip if one has an infinity; weights of the whole model in float64"
    yield title, partial(skipped_together, steps=7), rank_gradients.scaling, (backend, device)
    for agreeing, whose in ((True, "ringway"), (False, "torch")):
        title = f"OneBitAdam with {whose}'s GradScaler: both skip if one has an infinity; equal weights"
        holds = partial(skipped_together, steps=12, agreeing=agreeing)
        yield title, holds, rank_state.scaler_skips_together, (agreeing, backend, device)
    title = "OneBitAdam and a NaN on one rank: NotFinite on both, the state is unchanged, the next step works"
    yield title, all_returned, rank_state.failed_step_changes_nothing, (backend, device)


def all_returned(results: list[Any]) -> bool:
    return len(results) == 2


def fixed_runs(backend: str, device: str) -> Iterator[Row]:
    """The checks, on two ranks."""
    with RankPool(2) as pool:
        if reason := unavailable(pool, backend, device, 2):
            yield f"{backend}, 2 ranks: checks on {device} tensors", True, reason
            return
        for title, holds, check, arguments in checks(backend, device):
            began = time.monotonic()
            outcomes = pool.try_run(checked, device, check, arguments, world_size=2, timeout=60, grace=5)
            took = time.monotonic() - began
            failed = [outcome for outcome in outcomes if not outcome.ok]
            print(*failed, sep="\n", end="\n" if failed else "", flush=True)
            results = [outcome.value for outcome in outcomes]
            if failed:
                said = " ".join(failed[0].detail.strip().splitlines()[-3:])[-600:]
            else:
                said = f"{took:.1f} s" if holds(results) else f"the ranks returned {results}"[:600]
            yield f"{backend}, 2 ranks, {device}: {title}", not failed and holds(results), said


def unavailable(pool: RankPool, backend: str, device: str, ranks: int) -> str:
    outcomes = pool.try_run(meets, backend, device, world_size=ranks, timeout=90, grace=10)
    if all(outcome.ok for outcome in outcomes):
        return ""
    return f"not available here: {outcomes[0].detail.strip().splitlines()[-1][:200]}"


def random_runs(backend: str, ranks: int, device: str, seconds: float, first_seed: int) -> Row:
    """Random programs until the time is up. A failure is reduced without a limit."""
    title = f"{backend}, {ranks} rank{'s' if ranks > 1 else ''}: random programs on {device} tensors"
    kernels = KERNELS if device == "cuda" else ("native", "reference")
    programs = random_programs.programs((backend,), (ranks,), kernels)
    with RankPool(ranks) as pool:
        if reason := unavailable(pool, backend, device, ranks):
            return title, True, reason
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
        if ranks == 2:
            for row in fixed_runs(backend, device):
                rows.append(row)
                print(*row, flush=True)
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
