"""The overhead of ringway: `ringway.all_reduce` of 8 floats on gloo compared with `torch.distributed.all_reduce`.

    python benchmarks/overhead.py [--rounds N] [--json FILE] [--check]

Both run on the same ranks in the same run, in turns: ringway on its own group over gloo with the recorder on (it always
is), torch on a plain gloo group. The recorder must hold every timed call. Also measured: the cost of the recorder
alone, to begin and end a record whose call site is found through two of ringway's frames.

With `--check`, it fails if ringway is slower at world size 1, or if the recorder takes more than 300 ns per call.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ringway
import ringway._core as _core
from ringway.bench import (
    CASES,
    Candidate,
    Estimate,
    Measured,
    Place,
    Ranks,
    Row,
    measure,
    median_interval,
    print_table,
    rows,
    to_json,
)
from ringway.bench.table import in_time
from ringway.call import ALL_REDUCE, DTYPE_CODE, Reduce
from ringway.testing import RankContext, RankPool

NBYTES = 8 * 4
CHECKED_CALLS = 200
MOST_SECONDS_A_RECORD = 300e-9


def all_reduce_against_torch(context: RankContext, rounds: int) -> list[Measured]:
    """Runs on each rank. torch comes first, as the baseline."""
    dist = context.start("gloo", module="torch.distributed")
    own = ringway.new_group(backend="gloo")
    assert_recorded(own)
    candidates = [
        CASES["all_reduce"].candidate(name, module, Place(context.rank, context.world_size, NBYTES, group))
        for name, module, group in (("torch.distributed", dist, dist.group.WORLD), ("ringway", ringway, own))
    ]
    before = ringway.status()["calls"]
    results = measure(candidates, Ranks(dist.group.WORLD), rounds=rounds, sample_seconds=0.01)
    timed, recorded = rounds * results[1].calls_per_sample, ringway.status()["calls"] - before
    if recorded < timed:
        raise AssertionError(f"{timed} calls of ringway were timed, and the recorder saw {recorded}")
    return results


def assert_recorded(group: Any) -> None:
    """Check that each call is in the recorder: completed, with its size, on its group, made by this function."""
    tensor = torch.ones(8)
    for _ in range(CHECKED_CALLS):
        ringway.all_reduce(tensor.fill_(1.0), group=group)
    expected = ("all_reduce", NBYTES, ringway.communicator(group).name, "completed", "assert_recorded")
    for call in ringway.recent_calls(CHECKED_CALLS):
        if (call.op, call.nbytes, call.group, call.state, call.site and call.site[2]) != expected:
            raise AssertionError(f"the recorder holds {call}; expected {expected}")


def recorder_cost(rounds: int) -> Estimate:
    """Seconds to begin and end a record, including the call site but not the frames that lead there."""
    recorder = _core.Recorder(4096)
    record = _core.GroupRecord(recorder, "overhead")
    arguments = (ALL_REDUCE.code, NBYTES, DTYPE_CODE[torch.float32], int(Reduce.SUM), -1, 0)
    frames, full = measure(
        [
            Candidate("frames", in_ringways_frames("pass", record)),
            Candidate("recorder", in_ringways_frames(f"end(begin{arguments}, True)", record)),
        ],
        rounds=rounds,
        sample_seconds=0.005,
        most_calls=20_000,
        clock_ns=time.thread_time_ns,
    )
    (site,) = (row[8] for row in recorder.recent(1))
    if site is None or Path(site[0]).name != "runner.py":
        raise AssertionError(f"the record's call site is {site}, not the loop that made the call")
    return median_interval([a - b for a, b in zip(full.samples, frames.samples, strict=True)])


def in_ringways_frames(statement: str, record: _core.GroupRecord) -> Callable[[], None]:
    """The statement at the end of two functions that count as ringway's own, as in a user's call."""
    source = f"def outer():\n    inner()\ndef inner():\n    {statement}\n"
    names: dict[str, Any] = {"begin": record.begin, "end": record.end}
    exec(compile(source, str(Path(ringway.__file__).with_name("api.py")), "exec"), names)
    outer: Callable[[], None] = names["outer"]
    return outer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=101, help="samples per candidate")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--check", action="store_true", help="fail if a limit is exceeded")
    options = parser.parse_args()

    table: list[Row] = []
    with RankPool(2) as pool:
        for size in (1, 2):
            results = pool.run(all_reduce_against_torch, options.rounds, world_size=size, timeout=300)[0]
            table += rows(CASES["all_reduce"], Place(0, size, NBYTES), results)
    record = recorder_cost(options.rounds)

    print_table(table, "all_reduce of 8 floats on gloo")
    print(f"recorder: {in_time(record.median)} a call ({in_time(record.low)} to {in_time(record.high)})")
    if options.json:
        options.json.write_text(to_json(table, recorder_seconds=record.median))
    return check(table, record) if options.check else 0


def check(table: list[Row], record: Estimate) -> int:
    """Report the limits that are clearly exceeded: the whole interval lies on the wrong side."""
    broken = [
        f"ringway takes {row.ratio.median:.2f} times as long as torch at world size 1"
        for row in table
        if row.ranks == 1 and row.ratio is not None and row.ratio.low > 1
    ]
    if record.low > MOST_SECONDS_A_RECORD:
        broken.append(f"the recorder takes {in_time(record.median)} a call")
    for sentence in broken:
        print(f"broken: {sentence}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
