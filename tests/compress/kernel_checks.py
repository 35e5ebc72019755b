"""Compares kernels with the reference. Run by the tests, and on its own under Triton's interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringway.compress import Codec, get_codec, kernels_for
from ringway.compress.codecs.scaled import ScaledCodec
from ringway.compress.kernels.base import SCALE_TOLERANCE
from ringway.compress.windows import Sharding, body, new_frames, statuses

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    spec: str
    numel: int
    ranks: int
    dtype: torch.dtype
    residual: torch.dtype | None
    split: bool


def cases(sizes: tuple[int, ...], specs: tuple[str, ...]) -> Iterator[Case]:
    """Every codec with each size and number of ranks, cycling through dtypes and residuals."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    residuals = (torch.float32, None, torch.bfloat16)
    turn = 0
    for spec in specs:
        for numel in sizes:
            for ranks in (1, 3):
                yield Case(spec, numel, ranks, dtypes[turn % 3], residuals[turn // 3 % 3], bool(turn % 2))
                turn += 1


@dataclass
class Trace:
    """Everything the kernels wrote."""

    codes: list[Tensor]
    scales: list[Tensor]
    worker: Tensor | None
    server: Tensor | None
    decoded: Tensor
    mean: Tensor


def trace(case: Case, name: str, device: torch.device) -> Trace:
    """All steps for the rank that serves the first shard, from the same values. The result is on the CPU."""
    kernels = kernels_for(get_codec(case.spec), device, name)
    codec = kernels.codec
    generator = torch.Generator().manual_seed(case.numel)
    values = torch.randn(case.numel, generator=generator).to(device, case.dtype)
    lost = (torch.randn(case.numel, generator=generator) * 0.3).to(device)
    sharding = Sharding(case.numel, case.ranks)
    worker = None if case.residual is None else lost.to(case.residual)
    served = sharding.served(0).stop
    server = None if case.residual is None else lost[:served].to(case.residual)
    columns = -(-sharding.shard // 2 // codec.granule) * codec.granule if case.split else sharding.shard
    scale = codec.scale(kernels.measure(values, worker), case.numel) if codec.tensor_scale else None
    codes, scales, means = [], [], []
    decoded = torch.full_like(values, 7.0)
    for window in sharding.windows(max(columns, codec.granule)):
        frames = new_frames(codec, case.ranks, window.columns, device)
        kernels.encode(values, worker, window, frames, scale)
        assert not statuses(frames).any()
        kernels.decode(frames, window, decoded)
        for row, where in window.rows(case.ranks):
            _take(codec, frames[row], where.stop - where.start, codes, scales)
        count = window.count(0)
        arrived = torch.stack([frames[0]] * case.ranks)
        mine = None if server is None else server[window.start : window.start + count]
        server_scale = None
        if codec.tensor_scale:
            server_scale = codec.scale(kernels.measure_mean(arrived, mine, count), count)
        out = new_frames(codec, 1, window.columns, device)[0]
        kernels.encode_mean(arrived, mine, count, out, server_scale)
        _take(codec, out, count, codes, scales)
        mean = torch.empty(count, dtype=case.dtype, device=device)
        kernels.decode_mean(arrived, count, mean)
        means.append(mean)
    kept = [None if one is None else one.cpu() for one in (worker, server)]
    return Trace(codes, scales, *kept, decoded.cpu(), torch.cat(means).cpu())


def _take(codec: Codec, frame: Tensor, count: int, codes: list[Tensor], scales: list[Tensor]) -> None:
    head = 4 * codec.scale_count(count) if isinstance(codec, ScaledCodec) else 0
    scales.append(body(frame)[:head].clone().view(torch.float32).cpu())
    codes.append(body(frame)[head : codec.nbytes(count)].cpu())


def differences(case: Case, name: str, device: torch.device = CPU) -> list[str]:
    """Where kernels `name` on a device do not write what the reference writes on the CPU, with the first elements that
    differ. Scales of onebit are sums and may differ by `SCALE_TOLERANCE`; so may one sign, of a value next to zero."""
    ours, theirs = trace(case, name, device), trace(case, "reference", CPU)
    exact = not case.spec.startswith("onebit")
    found = []
    for mine, reference in zip(ours.scales, theirs.scales, strict=True):
        found += _apart("scales", mine, reference, 0.0 if exact else SCALE_TOLERANCE)
    flips = sum(int((a != b).sum()) for a, b in zip(ours.codes, theirs.codes, strict=True))
    if flips > (0 if exact else 1):
        for mine, reference in zip(ours.codes, theirs.codes, strict=True):
            found += _apart("codes", mine, reference, 0.0)
    if flips:
        return found
    for what in ("worker", "server", "decoded", "mean"):
        mine, reference = getattr(ours, what), getattr(theirs, what)
        if reference is not None:
            interpreted = name == "triton" and device.type == "cpu"  # there, bfloat16 is cut off instead of rounded
            coarse = {torch.float16: 1e-2, torch.bfloat16: 1e-2}.get(reference.dtype, 1e-5)
            tolerance = coarse if not exact or (interpreted and reference.dtype is torch.bfloat16) else 0.0
            found += _apart(what, mine, reference, tolerance, absolute=not exact)
    return found


def _apart(what: str, mine: Tensor, reference: Tensor, tolerance: float, absolute: bool = False) -> list[str]:
    """Describes the first elements that differ by more than the tolerance, relative and, if asked, absolute."""
    a, b = mine.double(), reference.double()
    (places,) = torch.nonzero((a - b).abs() > tolerance * (b.abs() + absolute), as_tuple=True)
    if not len(places):
        return []
    shown = ", ".join(f"[{i}] {a[i].item()!r} instead of {b[i].item()!r}" for i in places[:4].tolist())
    return [f"{what}: {len(places)} of {a.numel()} differ: {shown}"]


def compare(case: Case, name: str, device: torch.device = CPU) -> None:
    """Kernels `name` write what the reference writes, except for elements on an edge."""
    assert not (found := differences(case, name, device)), (case, found)


POISONS = (float("nan"), float("inf"), -float("inf"))


def check_not_finite(spec: str, name: str, poisons: Sequence[float] = POISONS, device: torch.device = CPU) -> None:
    """A value that is not finite sets the frame's status and leaves the residuals unchanged."""
    codec = get_codec(spec)
    kernels = kernels_for(codec, device, name)
    for poison in poisons:
        sharding = Sharding(400, 2)
        (window,) = sharding.windows(sharding.shard)
        values = torch.linspace(-1, 1, 400, device=device)
        values[17] = poison
        worker = torch.full((400,), 0.5, device=device)
        server = torch.full((sharding.shard,), 0.25, device=device)
        scale = codec.scale(kernels.measure(values, worker), 400) if codec.tensor_scale else None
        frames = new_frames(codec, 2, window.columns, device)
        kernels.encode(values, worker, window, frames, scale)
        assert statuses(frames)[0] == 1, (spec, poison)
        assert torch.isfinite(worker).all()
        assert worker[17] == 0.5
        sound = new_frames(codec, 2, window.columns, device)
        known = None if scale is None else torch.tensor(0.1, device=device)
        kernels.encode(torch.linspace(-1, 1, 400, device=device), None, window, sound, known)
        arrived = torch.stack([sound[0], frames[0]])
        out = new_frames(codec, 1, window.columns, device)[0]
        mean_scale = None
        if codec.tensor_scale:
            mean_scale = codec.scale(kernels.measure_mean(arrived, server, window.count(0)), window.count(0))
        kernels.encode_mean(arrived, server, window.count(0), out, mean_scale)
        assert statuses(out.unsqueeze(0))[0] == 2, "the second frame was the bad one"
        assert server.unique().tolist() == [0.25]
        result = torch.zeros(400, device=device)
        kernels.decode(torch.stack([out, sound[1]]), window, result)
        assert torch.isnan(result[17])
        assert torch.isfinite(result[sharding.shard :]).all()


def main(name: str) -> None:
    """All sizes and all values that are not finite in make soak. Else some for each codec: an interpreter is slow."""
    specs = ("onebit:64", "onebit:tensor", "int8:64", "int8:tensor", "int4:64", "fp8:64")
    soak = bool(os.environ.get("RINGWAY_SOAK"))
    for case in cases((1, 13, 777) if soak else (1, 777), specs):
        compare(case, name)
    largest = ("topk:0.01:2", "topk:0.1:4", "topk:0.5:8")
    for case in cases((1, 13, 777, 9000) if soak else (777,), largest):
        compare(case, name)
    if not soak:
        compare(next(case for case in cases((9000,), largest[:1])), name)  # several records, two of them whole
    for number, spec in enumerate((*specs, *largest)):
        check_not_finite(spec, name, POISONS if soak else POISONS[number % 3 :][:1])


class _NoGpu:
    """What Triton asks of a driver when it compiles for an H200 and launches nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compile_largest() -> None:
    """The kernels of `topk` compile for an H200 as every step calls them, and nothing is fused."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from ringway.compress.kernels.gpu_topk import TritonTopK

    run, compiled = JITFunction.run, []
    driver.set_active(_NoGpu())  # type: ignore[arg-type]
    JITFunction.run = lambda *given, **options: compiled.append(run(*given, **{**options, "warmup": True}))
    codec = get_codec("topk:0.01:2")
    kernels = TritonTopK(codec)
    sharding = Sharding(9000, 2)
    (window,) = sharding.windows(sharding.shard)
    values, residual = torch.zeros(9000, dtype=torch.bfloat16), torch.zeros(9000)
    frames = new_frames(codec, 2, window.columns, CPU)
    for feedback in (residual, None):
        kernels.encode(values, feedback, window, frames, None)
    kernels.encode_mean(frames, residual, window.count(0), frames[0], None)
    kernels.decode(frames, window, values)
    kernels.decode_mean(frames, window.count(0), values)
    assert len(compiled) == 6, len(compiled)
    assert not any("fma.rn.f32" in kernel.asm["ptx"] for kernel in compiled)


if __name__ == "__main__":
    compile_largest() if sys.argv[1] == "compile" else main(sys.argv[1])
