"""The benchmark of a training step runs and reads the recorder correctly. It checks its own speed limits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from ringway.testing import RankContext, RankPool

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "ddp_step.py"


def compared(context: RankContext, backend: str) -> Any:
    spec = importlib.util.spec_from_file_location("ddp_step", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["ddp_step"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = module.compare(context, backend, width=512, layers=4, batch=4, rounds=2)
    module.report(result)
    return result.ratio.median, result.hidden, [(t.nbytes, t.issued, t.completed) for t in result.travels]


def test_a_step_is_compared_and_its_travels_shown(pool: RankPool) -> None:
    for ratio, hidden, travels in pool.run(compared, "gloo", world_size=2):
        assert ratio > 0
        assert 0 < hidden <= 1  # the first bucket was sent before the last gradient was computed
        assert sum(nbytes for nbytes, _, _ in travels) == 4 * (512 * 512 + 512) * 4
        assert all(issued < completed for _, issued, completed in travels)
