"""How fast one core compresses, compared with its own `copy_` and the numpy recipe.

    python benchmarks/onebit_cpu.py

Encoding with feedback reads the values and the residual, and writes the residual and the frames: 12.1 bytes per
element. It takes one pass with a scale per block. With one scale per tensor, the scale is measured first, which reads 8
more bytes.

The baselines and the timing were fixed before any figure was seen:

- The numpy recipe is DeepSpeed's own sequence of operations (`NcclBackend.compressed_allreduce`, first phase), with
  numpy instead of torch and CuPy: in place where DeepSpeed works in place, a new array where it creates one.
- Next to it, without a limit: the leanest numpy for the same result, each operation once.
- The process is bound to one core, and the libraries under numpy to one thread. The process's CPU time is measured, so
  the work of all its threads counts, and other processes do not.
- All candidates take turns; the median of all rounds counts. Takes about 10 seconds.

Exits with 1 unless onebit with a scale per block moves at least half as many bytes as `copy_`, and is at least 8 times
as fast as numpy's recipe, and unless topk at 1 % moves at least 0.3 as many bytes as `copy_`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"  # read when the libraries are loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402

import ringway._core as _core  # noqa: E402
from ringway.compress import get_codec, kernels_for  # noqa: E402
from ringway.compress.windows import Sharding, new_frames  # noqa: E402

NUMEL = 1 << 24
ROUNDS = 15
CPU = torch.device("cpu")


class Encode:
    """One codec's encoding with feedback, on a single rank."""

    def __init__(self, spec: str, values: torch.Tensor, residual_dtype: torch.dtype = torch.float32) -> None:
        self.codec = get_codec(spec)
        self.kernels = kernels_for(self.codec, CPU)
        self.values = values
        self.residual = torch.zeros(values.numel(), dtype=residual_dtype)
        (self.window,) = Sharding(values.numel(), 1).windows(values.numel())
        self.frames = new_frames(self.codec, 1, values.numel(), CPU)
        passes = 2 if self.codec.tensor_scale else 1
        per_element = passes * (4 + self.residual.element_size()) + self.residual.element_size()
        self.nbytes = per_element * values.numel() + self.frames.numel()

    def __call__(self) -> None:
        scale = None
        if self.codec.tensor_scale:
            statistic = self.kernels.measure(self.values, self.residual)
            scale = self.codec.scale(statistic, self.values.numel())
        self.kernels.encode(self.values, self.residual, self.window, self.frames, scale)


class NumpyRecipe:
    """DeepSpeed's worker phase, operation by operation:

    buffer.add_(error); scale = norm(buffer) / sqrt(n);
    error.set_(buffer - scale * buffer.sign().add_(1).bool().float().add_(-0.5).mul_(2.0));
    packbits(buffer.sign_().add_(1).bool())
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.numpy()
        self.buffer = np.empty_like(self.values)
        self.error = np.zeros_like(self.values)
        self.packed = np.zeros(0, dtype=np.uint8)

    def refill(self) -> None:
        """The recipe leaves signs in its buffer; a training step would have new values there."""
        np.copyto(self.buffer, self.values)

    def __call__(self) -> None:
        buffer = self.buffer
        buffer += self.error
        scale = np.linalg.norm(buffer) / np.float32(np.sqrt(buffer.size))
        signs = np.sign(buffer)
        signs += 1
        ones = signs.astype(bool).astype(np.float32)
        ones += np.float32(-0.5)
        ones *= np.float32(2.0)
        self.error = buffer - scale * ones
        np.sign(buffer, out=buffer)
        buffer += 1
        self.packed = np.packbits(buffer.astype(bool))


class LeanNumpy:
    """The same result with the fewest numpy operations."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.numpy()
        self.error = np.zeros_like(self.values)
        self.packed = np.zeros(0, dtype=np.uint8)

    def __call__(self) -> None:
        total = self.values + self.error
        scale = np.linalg.norm(total) / np.float32(np.sqrt(total.size))
        signs = total >= 0
        self.error = total - np.where(signs, scale, -scale)
        self.packed = np.packbits(signs)


def median_times(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            if isinstance(step, NumpyRecipe):
                step.refill()
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each candidate is timed")
    rounds = parser.parse_args().rounds
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    values = torch.randn(NUMEL)
    target = torch.empty_like(values)
    specs = ("onebit:1024", "onebit:tensor", "int8:256", "int4:128", "fp8:256", "topk:0.01:2")
    encodes = {spec: Encode(spec, values) for spec in specs}
    encodes["onebit:1024, bf16 residual"] = Encode("onebit:1024", values, torch.bfloat16)
    steps: dict[str, Callable[[], object]] = {"copy_": lambda: target.copy_(values), **encodes}
    steps["numpy packbits"] = NumpyRecipe(values)
    steps["numpy packbits, leanest"] = LeanNumpy(values)
    taken = median_times(steps, rounds)
    copied = 8 * NUMEL / taken["copy_"]
    print(f"one core ({_core.pack_instructions()}), {NUMEL / 1e6:.0f} M fp32, medians of {rounds} rounds, CPU time")
    print(f"{'copy_':28} {taken['copy_'] * 1e3:7.1f} ms  {copied / 1e9:6.2f} GB/s read plus written")
    for name, encode in encodes.items():
        rate = encode.nbytes / taken[name]
        print(
            f"{name:28} {taken[name] * 1e3:7.1f} ms  {rate / 1e9:6.2f} GB/s, {rate / copied:4.2f} of copy_, "
            f"{taken['numpy packbits'] / taken[name]:5.1f} x numpy"
        )
    for name in ("numpy packbits", "numpy packbits, leanest"):
        print(f"{name:28} {taken[name] * 1e3:7.1f} ms, {taken[name] / taken['onebit:1024']:4.1f} times onebit:1024")
    share = encodes["onebit:1024"].nbytes / taken["onebit:1024"] / copied
    gain = taken["numpy packbits"] / taken["onebit:1024"]
    held = share >= 0.5 and gain >= 8
    verdict = "holds" if held else "TOO SLOW"
    print(f"onebit:1024: {share:.2f} of copy_ (at least 0.5), {gain:.1f} x numpy (at least 8): {verdict}")
    sparse = encodes["topk:0.01:2"].nbytes / taken["topk:0.01:2"] / copied
    print(f"topk:0.01:2: {sparse:.2f} of copy_ (at least 0.3): {'holds' if sparse >= 0.3 else 'TOO SLOW'}")
    return 0 if held and sparse >= 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
