"""The cost of a compressed all-reduce on a GPU, in copies of the buffer, compared with the CuPy recipe.

    PYTHONPATH=src python benchmarks/onebit_gpu.py --output docs/proofs/onebit_gpu.txt

World size 1, but nothing is skipped: every step and both collectives run. Bytes that must move: 36 per element with one
scale per tensor (4.5 copies), 24 with a scale per block (3 copies). Then 2 and 4 ranks share the GPU through gloo, and
their results are compared with the reference in plain torch on the CPU.

Exits with 1 if a limit is exceeded or a result is wrong. Needs no native core: if it is not built, the collectives are
torch's own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

NUMEL = 1 << 28
REPEATS = 20
LIMITS = {"onebit:tensor": 5.5, "onebit:1024": 4.0}
EXTRA_BYTES_LIMIT = 2.0
COMPARED_STEPS = 5


class TorchCommunicator:
    """The two collectives that compression needs, with torch alone."""

    def __init__(self) -> None:
        self.rank, self.size, self.name = dist.get_rank(), dist.get_world_size(), "world"
        self.ranks = list(range(self.size))

    def all_to_all_single(self, output: Any, input: Any, async_op: bool = False, log_name: str = "") -> Any:
        return dist.all_to_all_single(output, input, async_op=async_op)

    def all_gather_into_tensor(self, output: Any, input: Any, async_op: bool = False, log_name: str = "") -> Any:
        return dist.all_gather_into_tensor(output, input, async_op=async_op)


def without_native_core() -> None:
    """Make `ringway.compress` importable if `ringway._core` is not built."""
    home = Path(__file__).resolve().parents[1] / "src" / "ringway"
    package = types.ModuleType("ringway")
    package.__path__ = [str(home)]
    world = types.ModuleType("ringway.groups.world")
    known: list[TorchCommunicator] = []

    def communicator(group: Any = None) -> TorchCommunicator:
        if not known:
            known.append(TorchCommunicator())
        return known[0]

    world.world = types.SimpleNamespace(communicator=communicator)  # type: ignore[attr-defined]
    world.NON_MEMBER = object()  # type: ignore[attr-defined]
    communicators = types.ModuleType("ringway.groups.communicator")
    communicators.Communicator = TorchCommunicator  # type: ignore[attr-defined]
    for module in (package, world, communicators, types.ModuleType("ringway._core")):
        sys.modules[module.__name__] = module
        setattr(package, module.__name__.rpartition(".")[2], module)


def join(backend: str, rank: int, size: int, path: str) -> str:
    """Join a group: ringway's own if it is built, torch's otherwise. Returns whose it is."""
    whose = "ringway"
    joined: Any
    try:
        import ringway as joined
    except ImportError:
        for name in [name for name in sys.modules if name.split(".")[0] == "ringway"]:
            del sys.modules[name]
        without_native_core()
        joined, whose = dist, "torch (the native core is not built)"
    torch.cuda.set_device(0)
    joined.init_process_group(backend, store=dist.FileStore(path, size), rank=rank, world_size=size)
    return whose


def milliseconds(step: Callable[..., Any], *arguments: Any, repeats: int = REPEATS) -> float:
    """The median time of `step(*arguments)` on the device."""
    times = []
    for _ in range(3):
        step(*arguments)
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step(*arguments)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


class CupyRecipe:
    """The 1-bit all-reduce as DeepSpeed 0.19 did it at world size 1, without its collectives: CuPy packs bits, torch
    does the rest, with one pass over memory per operation."""

    def __init__(self, numel: int) -> None:
        import cupy

        self._cupy = cupy
        self._worker = torch.zeros(numel, device="cuda")
        self._server = torch.zeros(numel, device="cuda")

    def __call__(self, buffer: torch.Tensor) -> None:
        average = self._phase(buffer, self._worker)
        buffer.copy_(self._phase(average, self._server))

    def _phase(self, buffer: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        buffer.add_(error)
        scale = torch.linalg.norm(buffer) / buffer.numel() ** 0.5
        error.copy_(buffer - scale * buffer.sign().add_(1).bool().float().add_(-0.5).mul_(2.0))
        signs = self._cupy.from_dlpack(buffer.sign_().add_(1).bool().to(torch.uint8))
        packed = self._cupy.packbits(signs)
        self._cupy.cuda.get_current_stream().synchronize()
        unpacked = torch.from_dlpack(self._cupy.unpackbits(packed))
        return unpacked.float().add_(-0.5).mul_(2.0).mul_(scale)


def measure(say: Callable[[str], None]) -> bool:
    from ringway.compress import ErrorFeedback, compressed_all_reduce

    buffer = torch.randn(NUMEL, device="cuda")
    copy = milliseconds(torch.empty_like(buffer).copy_, buffer)
    say(f"{NUMEL / 1e6:.0f} M fp32, one copy {copy:.3f} ms ({8 * NUMEL / copy / 1e9:.2f} TB/s read plus written)")
    fine = True
    for spec, residual in (
        ("onebit:tensor", torch.float32),
        ("onebit:1024", torch.float32),
        ("onebit:tensor", torch.bfloat16),
        ("onebit:1024", torch.bfloat16),
        ("int8:256", torch.float32),
        ("int4:128", torch.float32),
        ("fp8:256", torch.float32),
    ):
        feedback = ErrorFeedback(residual_dtype=residual)
        residual_bytes = 2 * NUMEL * residual.itemsize
        before = torch.cuda.memory_allocated() + residual_bytes
        torch.cuda.reset_peak_memory_stats()
        compressed_all_reduce(buffer, feedback, spec)  # compiles, and creates the residuals and the frames
        took = milliseconds(compressed_all_reduce, buffer, feedback, spec)
        extra = (torch.cuda.max_memory_allocated() - before) / NUMEL
        limit = LIMITS.get(spec) if residual is torch.float32 else None
        held = (limit is None or took / copy <= limit) and extra <= EXTRA_BYTES_LIMIT
        fine &= held
        say(
            f"{spec:14} residuals {str(residual).removeprefix('torch.'):9} {took:7.3f} ms = {took / copy:5.2f} copies"
            f"{'' if limit is None else f' (at most {limit})'}, {extra:.2f} bytes per element beyond residuals"
            f"{'' if held else '   TOO MUCH'}"
        )
        if limit is not None:
            show_kernels(say, compressed_all_reduce, buffer, feedback, spec)
        del feedback
        buffer.normal_()
    try:
        recipe = CupyRecipe(NUMEL)
    except ImportError as missing:
        say(f"the CuPy recipe was not run: {missing}")
        return fine
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    took = milliseconds(recipe, buffer, repeats=5)
    extra = (torch.cuda.max_memory_allocated() - before) / NUMEL
    say(
        f"the CuPy recipe, no collectives {took:7.3f} ms = {took / copy:5.2f} copies, {extra:.1f} bytes per element "
        "(torch's alone)"
    )
    return fine


def show_kernels(say: Callable[[str], None], step: Callable[..., Any], *arguments: Any) -> None:
    """Where the time of one step goes on the device."""
    from torch.profiler import ProfilerActivity, profile

    steps = 5
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step(*arguments)
        torch.cuda.synchronize()
    rows = [row for row in profiler.key_averages() if row.self_device_time_total > 0]
    for row in sorted(rows, key=lambda row: -row.self_device_time_total)[:8]:
        say(f"    {row.self_device_time_total / steps / 1e3:7.3f} ms  {row.count / steps:4.1f} times  {row.key[:70]}")


def compare_kernels(say: Callable[[str], None]) -> bool:
    """Compare Triton's bytes on the device with the reference's, for every codec and dtype."""
    from ringway.compress import get_codec, kernels_for
    from ringway.compress.windows import HEADER_BYTES, Sharding, new_frames

    fine = True
    cuda = torch.device("cuda")
    for spec in ("onebit:tensor", "onebit:1024", "int8:256", "int8:tensor", "int4:128", "fp8:256"):
        codec = get_codec(spec)
        differing, codes = 0, 0
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            values = torch.randn(1_000_003, device=cuda).to(dtype)
            sharding = Sharding(values.numel(), 3)
            (window,) = sharding.windows(sharding.shard)
            written = []
            for name in ("reference", "triton"):
                kernels = kernels_for(codec, cuda, name)
                residual = torch.linspace(-0.1, 0.1, values.numel(), device=cuda)
                scale = None
                if codec.tensor_scale:
                    scale = codec.scale(kernels.measure(values, residual), values.numel())
                frames = new_frames(codec, 3, window.columns, cuda)
                kernels.encode(values, residual, window, frames, scale)
                used = HEADER_BYTES + codec.nbytes(window.count(2))
                scales = HEADER_BYTES + 4 * -(-window.count(2) // (codec.block or window.columns))
                written.append((frames[2, scales:used].clone(), residual))
            differing += int((written[0][0] != written[1][0]).sum())
            codes += written[0][0].numel()
            # A code on an edge may fall on either side; everything else in the residual is equal.
            apart = ((written[0][1] - written[1][1]).abs() > 1e-4).float().mean().item()
            fine &= apart < 1e-5
        fine &= differing <= 1e-5 * codes
        say(f"{spec:14} triton against reference: {differing} of {codes} bytes differ")
    return fine


def shared_rank(rank: int, size: int, path: str, results: str) -> None:
    """One of several ranks on the same GPU: the average over a few steps, by Triton on the device through gloo and by
    the reference on the CPU."""
    join("gloo", rank, size, path)
    from ringway.compress import ErrorFeedback, compressed_all_reduce

    worst = 0.0
    for spec in ("onebit:tensor", "onebit:1024", "int8:256", "int4:128", "fp8:256"):
        on_gpu, on_cpu = ErrorFeedback(), ErrorFeedback()
        generator = torch.Generator().manual_seed(rank)
        totals = [torch.zeros(100_003), torch.zeros(100_003)]
        for _ in range(COMPARED_STEPS):
            values = torch.randn(100_003, generator=generator)
            on_device, on_host = values.cuda(), values.clone()
            compressed_all_reduce(on_device, on_gpu, spec)
            compressed_all_reduce(on_host, on_cpu, spec, kernels="reference")
            totals[0] += on_device.cpu()
            totals[1] += on_host
        # Elements on an edge may take the other code; the sum over the steps shows only those.
        worst = max(worst, ((totals[0] - totals[1]).abs() > 1e-3).float().mean().item())
    Path(f"{results}.{rank}").write_text(str(worst))
    dist.destroy_process_group()


def share_the_gpu(say: Callable[[str], None]) -> bool:
    fine = True
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (size, f"{folder}/store", f"{folder}/result")
            torch.multiprocessing.spawn(shared_rank, args=arguments, nprocs=size)
            worst = max(float(Path(f"{folder}/result.{rank}").read_text()) for rank in range(size))
        held = worst < 1e-3
        fine &= held
        say(
            f"{size} ranks on one GPU through gloo: {worst:.1e} of elements differ from the reference"
            f"{'' if held else '   TOO MANY'}"
        )
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the output to this file")
    options = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        whose = join("nccl" if dist.is_nccl_available() else "gloo", 0, 1, f"{folder}/store")
        say(f"collectives: {dist.get_backend()} through {whose}")
        fine = measure(say)
        torch.cuda.empty_cache()
        fine &= compare_kernels(say)
        dist.destroy_process_group()
    fine &= share_the_gpu(say)
    say("all limits hold" if fine else "a limit was passed")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
