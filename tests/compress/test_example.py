"""The example runs unchanged, learns, and reports what it saved."""

from __future__ import annotations

import re
from pathlib import Path

from programs import ended_with, ringway_run_variables, run_program
from ringway.testing import RankPool

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_ddp_compressed.py"


def test_the_example_learns_and_reports(pool: RankPool) -> None:
    with ringway_run_variables(2) as environments:
        ranks = run_program(pool, EXAMPLE, "--steps", "60", environments=environments)
    assert all(map(ended_with, ranks)), ranks
    said = ranks[0].output
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]
    assert losses[-1] < losses[0] / 2, said
    assert re.search(r"compression: \d+ compressed calls, .* saved", said), said
