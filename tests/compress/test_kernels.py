"""The fused kernels write the reference's bytes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import kernel_checks
import pytest
import torch

from ringway.compress import OneBit, get_codec, kernels_for
from ringway.compress.kernels.base import KERNELS_VARIABLE
from ringway.compress.windows import Sharding, new_frames
from ringway.errors import UsageError

SPECS = (
    "onebit:64",
    "onebit:1024",
    "onebit:8192",
    "onebit:tensor",
    "int8:24",
    "int8:256",
    "int8:tensor",
    "int4:64",
    "int4:tensor",
    "fp8:256",
    "fp8:tensor",
    "topk:0.01:2",
    "topk:0.1:4",
    "topk:0.5:8",
)
CPU = torch.device("cpu")


def test_native_kernels_equal_the_reference() -> None:
    for case in kernel_checks.cases((1, 7, 8, 100, 1001, 5003, 140_000), SPECS):
        kernel_checks.compare(case, "native")


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("spec", SPECS)
def test_non_finite_values_are_reported_and_leave_residuals_unchanged(spec: str, name: str) -> None:
    kernel_checks.check_not_finite(spec, name)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.timeout(1000)
@pytest.mark.processes
def test_triton_kernels_equal_the_reference_in_its_interpreter_and_compile() -> None:
    script = Path(__file__).with_name("kernel_checks.py")
    for what, interpreted in (("triton", "1"), ("compile", "0")):
        environment = {**os.environ, "TRITON_INTERPRET": interpreted}
        subprocess.run([sys.executable, str(script), what], env=environment, check=True, timeout=490)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    for spec in ("onebit:1024", "onebit:tensor", "int8:256", "topk"):
        codec = get_codec(spec)
        kernels = kernels_for(codec, CPU, "native")
        (window,) = Sharding(values.numel(), 1).windows(values.numel())
        written = []
        for threads in (1, 4):
            torch.set_num_threads(threads)
            residual = torch.zeros_like(values)
            scale = codec.scale(kernels.measure(values, residual), values.numel()) if codec.tensor_scale else None
            frames = new_frames(codec, 1, window.columns, CPU)
            kernels.encode(values, residual, window, frames, scale)
            written.append((frames[:, : 16 + codec.nbytes(values.numel())], residual))
        torch.set_num_threads(before)
        assert torch.equal(written[0][0], written[1][0])
        assert torch.equal(written[0][1], written[1][1])


def test_the_choice_of_kernels_is_automatic_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    assert kernels_for(OneBit(), CPU).name == "native"
    monkeypatch.setenv(KERNELS_VARIABLE, "reference")
    assert kernels_for(OneBit(), CPU).name == "reference"
    monkeypatch.setenv(KERNELS_VARIABLE, "nativ")
    with pytest.raises(UsageError, match="did you mean 'native'"):
        kernels_for(OneBit(), CPU)
    with pytest.raises(UsageError, match="CUDA"):
        kernels_for(OneBit(), CPU, "triton")


def test_the_largest_of_equal_magnitudes_and_of_zeros() -> None:
    """Ties go to the first, and a chunk with fewer values than it keeps stays exact where it is zero."""
    for spec in ("topk:0.01:2", "topk:0.1:4", "topk:0.5:8"):
        codec = get_codec(spec)
        for values in (
            torch.ones(5000),
            torch.tensor([1.0, -1.0, 0.0, 2.0] * 1500),
            torch.nn.functional.pad(torch.tensor([3.0, -2.0]), (4100, 700)),
            torch.full((4096,), 1e-42),
            torch.full((4096,), 3e38),
        ):
            sharding = Sharding(values.numel(), 1)
            (window,) = sharding.windows(sharding.shard)
            traces = []
            for name in ("reference", "native"):
                kernels = kernels_for(codec, CPU, name)
                frames, residual = new_frames(codec, 1, window.columns, CPU), torch.zeros_like(values)
                kernels.encode(values, residual, window, frames, None)
                decoded = torch.full_like(values, 7.0)
                kernels.decode(frames, window, decoded)
                torch.testing.assert_close(decoded + residual, values)
                assert not decoded[values == 0].any()
                traces.append((frames[:, : 16 + codec.nbytes(values.numel())], residual, decoded))
            assert all(torch.equal(a, b) for a, b in zip(*traces, strict=True)), (spec, values[:4])
