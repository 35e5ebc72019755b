"""benchmarks/backends.py: when it adds rounds, and when it fails."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ringway.bench
import ringway.bench.tune
from ringway.bench import Measured

FILE = Path(__file__).parents[2] / "benchmarks" / "backends.py"


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("backends_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _compared(module: ModuleType, monkeypatch: pytest.MonkeyPatch, policy_times: list[float]) -> dict[str, Any]:
    """A row in which shm always takes 1 s, gloo 3 s, and the policy the given times, in every measurement."""

    def measure(candidates: Any, control: Any, *, rounds: int, warmup_rounds: int = 3) -> list[Measured]:
        times = {"shm": [1.0] * rounds, "gloo": [3.0] * rounds, "policy": policy_times[:rounds]}
        return [Measured(name, samples, 1, True) for name, samples in times.items()]

    monkeypatch.setattr(ringway.bench, "measure", measure)
    monkeypatch.setattr(ringway.bench.tune, "in_one_place", lambda op, nbytes, groups: [])
    found: dict[str, Any] = module.compared("all_reduce", 8, {}, None, len(policy_times))
    return found


def test_rounds_are_added_until_the_interval_decides(
    benchmark_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = _compared(benchmark_module, monkeypatch, [1.01, 1.02, 1.0] * 5)
    assert clear["best"] == "shm"
    assert clear["ratio"]["count"] == 15
    undecided = _compared(benchmark_module, monkeypatch, [0.9, 1.2] * 8)
    assert undecided["ratio"]["count"] == 4 * 16
    assert undecided["seconds"]["policy"]["count"] == 4 * 16


def test_a_policy_that_is_too_slow_is_a_failure(
    benchmark_module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(ranks=2, mpi="none")
    good = _compared(benchmark_module, monkeypatch, [1.05] * 15)
    assert benchmark_module.show([good], arguments) == 0
    bad = _compared(benchmark_module, monkeypatch, [1.2] * 15)
    assert benchmark_module.show([good, bad], arguments) == 1
    assert "over 1.1: all_reduce of 8 bytes: 1.20 × shm" in capsys.readouterr().out
