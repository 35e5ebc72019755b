"""The cost of observability: a small call with the comms logger on and off, and a DDP step with everything on.

    python benchmarks/observe_cost.py [--backend shm] [--ranks 2] [--seconds 60] [--json FILE] [--check]

All candidates run on the same ranks in the same run, in turns, so a disturbance affects all of them. "Off" is what
every program has: the recorder and the stall watch, which are always on. "On" adds the logger, and for the step also a
trace and a sink that writes JSON lines every second. Asserts that the timed calls are in the log. DeepSpeed's own
logger is timed in the same way, on its own functions over gloo, from a folder filled by `pip install --target
.cache/deepspeed --no-build-isolation deepspeed`.

Rounds are added until the interval of the median lies on one side of the limit, or the time is up. With `--check`, it
fails if the logger costs 1 µs per call or more, or a DDP step with everything on is at least 2 % slower. Takes about
three minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringway
from ringway.bench.runner import Candidate, Estimate, Measured, Ranks, measure, median_interval, paired_ratio
from ringway.bench.table import in_ratio, in_time, machine
from ringway.groups.world import world
from ringway.observe.sinks import JsonLines, publish
from ringway.testing import RankContext, RankPool

ROOT = Path(__file__).resolve().parent.parent
MOST_SECONDS_A_CALL = 1e-6
MOST_STEP_RATIO = 1.02
ROUNDS_AT_A_TIME = 40
OFF, ON = "logger off", "logger on"


@dataclass(frozen=True)
class Cost:
    """One comparison: the time of each side, and the ratio of the second to the first, round by round."""

    what: str
    ranks: int
    seconds: dict[str, Estimate]
    difference: Estimate
    ratio: Estimate
    logged: int


def _differences(off: Measured, on: Measured) -> Estimate:
    return median_interval([b - a for a, b in zip(off.samples, on.samples, strict=True)])


def _cost(what: str, ranks: int, off: Measured, on: Measured, logged: int) -> Cost:
    seconds = {m.name: m.seconds for m in (off, on)}
    return Cost(what, ranks, seconds, _differences(off, on), paired_ratio(on, off), logged)


def _measure_until(
    candidates: Sequence[Candidate],
    ranks: Ranks,
    seconds: float,
    sample_seconds: float,
    decided: Callable[[Measured, Measured], bool],
) -> tuple[Measured, Measured]:
    """Rounds of off and on until the result is clear or the time is up. Every rank sees the same samples."""
    began = time.monotonic()
    off, on = measure(candidates, ranks, rounds=ROUNDS_AT_A_TIME, sample_seconds=sample_seconds)
    while not decided(off, on):
        (spent,) = ranks.slowest([time.monotonic() - began])
        if spent > seconds:
            break
        more = measure(candidates, ranks, rounds=ROUNDS_AT_A_TIME, warmup_rounds=1, sample_seconds=sample_seconds)
        off, on = (
            replace(known, samples=[*known.samples, *new.samples]) for known, new in zip((off, on), more, strict=True)
        )
    return off, on


def _decided(estimate: Estimate, limit: float) -> bool:
    return estimate.high < limit or estimate.low > limit


def _logging(enabled: bool) -> None:
    ringway.configure(enabled=enabled, prof_all=True, verbose=False, debug=False)


def small_call(context: RankContext, backend: str, seconds: float) -> Cost:
    dist = context.start(backend)
    control = c10d.new_group(backend="gloo")
    tensor = torch.ones(8)

    def call() -> None:
        dist.all_reduce(tensor)

    _logging(True)
    dist.reset_log()
    off, on = _measure_until(
        [
            Candidate(OFF, call, prepare=lambda: _logging(False)),
            Candidate(ON, call, prepare=lambda: _logging(True)),
        ],
        Ranks(control),
        seconds,
        0.01,
        # Over gloo, a microsecond is too small to measure: its rows are for comparison only.
        lambda off, on: backend == "gloo" or _decided(_differences(off, on), MOST_SECONDS_A_CALL),
    )
    logged, timed = dist.get_comm_operation_count(), len(on.samples) * on.calls_per_sample
    if logged < timed:
        raise AssertionError(f"{timed} calls were timed with the logger on, {logged} logged")
    _logging(False)
    return _cost(f"all_reduce of 8 floats, {backend}", context.world_size, off, on, logged)


class Everything:
    """The logger, a trace, and a sink."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._sink = ExitStack()

    def switch(self, on: bool) -> None:
        self._sink.close()
        _logging(on)
        if on:
            world.recorder.start_trace(200_000)
            self._sink.enter_context(publish(JsonLines(f"{self._folder}/comms-{{rank}}.jsonl"), every=1.0))
        else:
            world.recorder.stop_trace()


def ddp_step(context: RankContext, backend: str, seconds: float, folder: str) -> Cost:
    """A step of about a tenth of a second: eight layers of 1024, 33 MB of gradients in buckets of 8 MB."""
    dist = context.start(backend)
    control = c10d.new_group(backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.ReLU())))
    parallel = DistributedDataParallel(model, bucket_cap_mb=8)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    batch = torch.randn(64, 1024)
    everything = Everything(folder)

    def step() -> None:
        optimizer.zero_grad()
        parallel(batch).square().mean().backward()
        optimizer.step()

    dist.reset_log()
    off, on = _measure_until(
        [
            Candidate("watching off", step, prepare=lambda: everything.switch(False)),
            Candidate("logger, trace, sink on", step, prepare=lambda: everything.switch(True)),
        ],
        Ranks(control),
        seconds,
        0.1,
        lambda off, on: _decided(paired_ratio(on, off), MOST_STEP_RATIO),
    )
    everything.switch(False)
    steps = len(on.samples) * on.calls_per_sample
    # Every gradient was reduced by a call that is in the log: as many bytes as the model has, each step.
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    moved = sum(size * line["count"] for size, line in _logged_sizes(dist).items())
    if moved < steps * gradients:
        raise AssertionError(f"DDP reduced {steps} times {gradients} bytes with the logger on, the log has {moved}")
    return _cost(f"DDP step, {backend}", context.world_size, off, on, dist.get_comm_operation_count())


def _logged_sizes(dist: Any) -> dict[int, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        sizes: dict[int, Any] = dist.log_summary(return_dict=True)["summary"]["all_reduce"]
    return sizes


def deepspeed_call(context: RankContext, seconds: float, folder: str) -> Cost | str:
    """The same call through deepspeed.comm on gloo, with its logger on and off; or the reason why not."""
    context.start("gloo", module="torch.distributed")
    sys.path.append(folder)
    try:
        import deepspeed.comm as dist
    except ImportError as error:
        return str(error)
    dist.init_distributed(dist_backend="gloo", verbose=False)
    control = c10d.new_group(backend="gloo")
    tensor = torch.ones(8)

    def call() -> None:
        dist.all_reduce(tensor)

    def logging(enabled: bool) -> None:
        dist.configure(enabled=enabled, prof_all=True, verbose=False, debug=False)

    off, on = _measure_until(
        [
            Candidate("DeepSpeed's logger off", call, prepare=lambda: logging(False)),
            Candidate("DeepSpeed's logger on", call, prepare=lambda: logging(True)),
        ],
        Ranks(control),
        seconds,
        0.01,
        lambda off, on: True,
    )
    return _cost("deepspeed.comm.all_reduce of 8 floats, gloo", context.world_size, off, on, 0)


def show(cost: Cost) -> None:
    print(f"{cost.what}, {cost.ranks} rank{'s' if cost.ranks > 1 else ''}")
    for name, seconds in cost.seconds.items():
        print(f"  {name:24} {in_time(seconds.median):>10} ({in_time(seconds.low)} to {in_time(seconds.high)})")
    scale, unit = (1e3, "ms") if max(s.median for s in cost.seconds.values()) > 0.01 else (1e9, "ns")
    extra = cost.difference.scaled(scale)
    digits = 2 if unit == "ms" else 0
    interval = f"({extra.low:.{digits}f} to {extra.high:.{digits}f} {unit})"
    print(
        f"  {'on costs':24} {extra.median:>7.{digits}f} {unit} {interval}, {in_ratio(cost.ratio)} times, "
        f"{cost.ratio.count} rounds"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="shm", help="for the calls and the DDP step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="time limit of the step; a call gets a quarter")
    parser.add_argument("--deepspeed", type=Path, default=ROOT / ".cache" / "deepspeed", help="a folder with deepspeed")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--check", action="store_true", help="fail if observing costs more than the limits")
    options = parser.parse_args()
    short = options.seconds / 4
    with RankPool(options.ranks) as pool, tempfile.TemporaryDirectory() as folder:
        alone = pool.run(small_call, options.backend, short, world_size=1, timeout=600)[0]
        small = pool.run(small_call, options.backend, short, timeout=600)[0]
        gloo = pool.run(small_call, "gloo", short, timeout=600)[0]
        step = pool.run(ddp_step, options.backend, options.seconds, folder, timeout=1200)[0]
        costs = [alone, small, gloo, step]
        pool.replace()
        theirs = pool.run(deepspeed_call, short, str(options.deepspeed), timeout=600)[0]
    if isinstance(theirs, str):
        print(f"DeepSpeed's logger is not in this table: {theirs}", file=sys.stderr)
    else:
        costs.append(theirs)
    for cost in costs:
        show(cost)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "costs": [asdict(c) for c in costs]}, indent=2))
    if not options.check:
        return 0
    dear = [c.what for c in (alone, small) if c.difference.median >= MOST_SECONDS_A_CALL]
    slow = [step.what] if step.ratio.median >= MOST_STEP_RATIO else []
    for what in dear + slow:
        print(f"too expensive: {what}", file=sys.stderr)
    return int(bool(dear + slow))


if __name__ == "__main__":
    sys.exit(main())
