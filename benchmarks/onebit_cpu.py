"""How fast one core compresses, beside its own `copy_` and the numpy recipe.

    python benchmarks/onebit_cpu.py

Encode with feedback reads the values and the residual and writes the residual and the frames: 12.1 bytes an
element. One pass with a scale a block; with one scale a tensor the scale is measured first, which reads 8
bytes more. Times are those of the core (thread time), the least of several runs: what disturbs only ever adds.

Exits with 1 unless onebit with a scale a block moves at least half the bytes that `copy_` moves, and is at
least 8 times as fast as numpy's recipe.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from ringway import _core
from ringway.compress import get_codec, kernels_for
from ringway.compress.layout import Layout, new_frames

NUMEL = 1 << 24
ROUNDS = 15
CPU = torch.device("cpu")


class Encode:
    """One codec's encode with feedback, of one rank alone."""

    def __init__(self, spec: str, values: torch.Tensor, residual_dtype: torch.dtype = torch.float32) -> None:
        self.codec = get_codec(spec)
        self.kernels = kernels_for(self.codec, CPU)
        self.values = values
        self.residual = torch.zeros(values.numel(), dtype=residual_dtype)
        (self.window,) = Layout(values.numel(), 1).windows(values.numel())
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
    """Encode with feedback by DeepSpeed's formulas, numpy in CuPy's place: one pass an operation."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.numpy()
        self.residual = np.zeros_like(self.values)
        self.packed = np.zeros(0, dtype=np.uint8)

    def __call__(self) -> None:
        total = self.values + self.residual
        scale = np.linalg.norm(total) / np.float32(np.sqrt(total.size))
        signs = (np.sign(total) + 1).astype(bool)
        self.residual = total - scale * ((signs.astype(np.float32) - np.float32(0.5)) * 2)
        self.packed = np.packbits(signs)


def least_times(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            began = time.thread_time()
            step()
            times[name].append(time.thread_time() - began)
    return {name: min(taken) for name, taken in times.items()}


def main() -> int:
    torch.set_num_threads(1)
    values = torch.randn(NUMEL)
    target = torch.empty_like(values)
    encodes = {
        spec: Encode(spec, values) for spec in ("onebit:1024", "onebit:tensor", "int8:256", "int4:128", "fp8:256")
    }
    encodes["onebit:1024, bf16 residual"] = Encode("onebit:1024", values, torch.bfloat16)
    steps: dict[str, Callable[[], object]] = {"copy_": lambda: target.copy_(values), **encodes}
    steps["numpy packbits"] = NumpyRecipe(values)
    taken = least_times(steps)
    copied = 8 * NUMEL / taken["copy_"]
    print(f"one core ({_core.pack_instructions()}), {NUMEL / 1e6:.0f} M fp32, the least of {ROUNDS} runs")
    print(f"{'copy_':28} {taken['copy_'] * 1e3:7.1f} ms  {copied / 1e9:6.2f} GB/s read plus written")
    for name, encode in encodes.items():
        rate = encode.nbytes / taken[name]
        print(
            f"{name:28} {taken[name] * 1e3:7.1f} ms  {rate / 1e9:6.2f} GB/s, {rate / copied:4.2f} of copy_, "
            f"{taken['numpy packbits'] / taken[name]:5.1f} x numpy"
        )
    print(f"{'numpy packbits':28} {taken['numpy packbits'] * 1e3:7.1f} ms")
    share = encodes["onebit:1024"].nbytes / taken["onebit:1024"] / copied
    gain = taken["numpy packbits"] / taken["onebit:1024"]
    held = share >= 0.5 and gain >= 8
    verdict = "holds" if held else "TOO SLOW"
    print(f"onebit:1024: {share:.2f} of copy_ (at least 0.5), {gain:.1f} x numpy (at least 8): {verdict}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
