"""What users see of an elastic job goes on across generations: the recorder, the trace, the report, and verdicts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

import ringway
from elastic_model import SECONDS
from ringway.job.elastic.job import ElasticJob
from ringway.launch.run import store_of_a_run
from ringway.observe.report import report
from ringway.observe.report.events import read
from ringway.observe.report.figures import generations, lateness
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

RANKS = 4


def _observed(context: RankContext, path: str) -> dict[str, Any]:
    """Rank 3 is killed in step 2, and rank 2 in step 4."""
    leave(ringway)
    torch.set_num_threads(1)
    size = str(context.world_size)
    os.environ.update(RANK=str(context.rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1")
    faults = []
    with ElasticJob() as job, ringway.trace(path):
        for attempt in job.steps({}, until=6):
            with attempt:
                if (attempt.step, context.rank) in ((2, 3), (4, 2)):
                    os.kill(os.getpid(), signal.SIGKILL)
                ringway.all_reduce(torch.ones(4), log_name=f"step {attempt.step}")
                attempt.commit()
            if attempt._fault is not None:
                faults.append([getattr(attempt._fault, "rank", None), str(attempt._fault)])
    calls = [(call.group, call.label, call.sequence) for call in ringway.recent_calls(1000) if call.label]
    return {"faults": faults, "calls": calls}


def test_recorder_trace_report_and_verdicts_go_on(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with store_of_a_run() as variables:
        ended = pool.try_run(
            _observed, str(path), world_size=RANKS, timeout=SECONDS, environment={**variables}, grace=60
        )
    pool.replace()
    assert [outcome.ok for outcome in ended] == [True, True, False, False], "\n".join(map(str, ended))
    for outcome in ended[:2]:
        (first, text), (second, other_text) = outcome.value["faults"]
        assert (first, second) == (3, 2), outcome
        assert "rank 3" in text
        assert "rank 2" in other_text
        groups = [group for group, label, _ in outcome.value["calls"] if label in ("step 0", "step 3", "step 5")]
        assert groups == ["generation 1", "generation 2", "generation 3"]
    calls = read(path).calls
    rows = generations(calls)
    assert [row[:2] for row in rows] == [[1, 4], [2, 3], [3, 2]]
    assert all(row[4] is None or row[4] > 0 for row in rows)
    # Each generation counts its calls from 0: calls of different generations did not meet.
    assert max(lateness(calls)["end"], 0) > rows[-1][2] * 1e3
    page = tmp_path / "report.html"
    report(path, page)
    text = page.read_text()
    figures = json.loads(text.split('id="figures">')[1].split("</script>")[0])
    assert figures["generations"] == rows
