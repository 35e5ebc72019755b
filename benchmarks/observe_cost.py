"""What watching costs: a small call with the comms logger on against off, and a DDP step with everything on.

    python benchmarks/observe_cost.py [--backend shm] [--rounds N] [--json FILE] [--check]

All candidates run on the same ranks in the same run, taking turns, so what disturbs one disturbs all. "Off" is what
every program has: the recorder and the stall watch, which are always on. "On" adds the logger, and for the step a
trace. The calls that were timed are asserted to be in the log. Where DeepSpeed is installed, its own logger is
timed in the same way, on its own functions over gloo.

With `--check` it fails if the logger costs 1 µs a call or more, or a DDP step with everything on is 2 % slower.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringway
from ringway.bench.runner import Candidate, Estimate, Measured, Ranks, measure, median_interval, paired_ratio
from ringway.bench.table import in_ratio, in_time, machine
from ringway.testing import RankContext, RankPool
from ringway.world import world

MOST_SECONDS_A_CALL = 1e-6
MOST_STEP_RATIO = 1.02
OFF, ON = "logger off", "logger on"


@dataclass(frozen=True)
class Cost:
    """One comparison: the time of each side, and of the second over the first, round by round."""

    what: str
    ranks: int
    seconds: dict[str, Estimate]
    difference: Estimate
    ratio: Estimate
    logged: int


def _cost(what: str, ranks: int, off: Measured, on: Measured, logged: int) -> Cost:
    differences = [b - a for a, b in zip(off.samples, on.samples, strict=True)]
    return Cost(
        what, ranks, {m.name: m.seconds for m in (off, on)}, median_interval(differences), paired_ratio(on, off), logged
    )


def _logging(enabled: bool) -> None:
    ringway.configure(enabled=enabled, prof_all=True, verbose=False, debug=False)


def small_call(context: RankContext, backend: str, rounds: int) -> Cost:
    dist = context.start(backend)
    control = c10d.new_group(backend="gloo")
    tensor = torch.ones(8)

    def call() -> None:
        dist.all_reduce(tensor)

    _logging(True)
    dist.reset_log()
    call()
    before = dist.get_comm_operation_count()
    off, on = measure(
        [
            Candidate(OFF, call, prepare=lambda: _logging(False)),
            Candidate(ON, call, prepare=lambda: _logging(True)),
        ],
        Ranks(control),
        rounds=rounds,
        sample_seconds=0.01,
    )
    logged = dist.get_comm_operation_count() - before
    if logged < rounds * on.calls_per_sample:
        raise AssertionError(f"{rounds * on.calls_per_sample} calls were timed with the logger on, {logged} logged")
    _logging(False)
    return _cost(f"all_reduce of 8 floats, {backend}", context.world_size, off, on, logged)


def _watch_everything(enabled: bool) -> None:
    _logging(enabled)
    if enabled:
        world.recorder.start_trace(200_000)
    else:
        world.recorder.stop_trace()


def ddp_step(context: RankContext, backend: str, rounds: int) -> Cost:
    dist = context.start(backend)
    control = c10d.new_group(backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(512, 512), nn.ReLU())))
    parallel = DistributedDataParallel(model, bucket_cap_mb=2)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    batch = torch.randn(32, 512)

    def step() -> None:
        optimizer.zero_grad()
        parallel(batch).square().mean().backward()
        optimizer.step()

    _logging(True)
    dist.reset_log()
    before = dist.get_comm_operation_count()
    off, on = measure(
        [
            Candidate("watching off", step, prepare=lambda: _watch_everything(False)),
            Candidate("logger and trace on", step, prepare=lambda: _watch_everything(True)),
        ],
        Ranks(control),
        rounds=rounds,
        sample_seconds=0.05,
    )
    _watch_everything(False)
    logged = dist.get_comm_operation_count() - before
    buckets = [size for size, line in _logged_sizes(dist).items() if line["count"] >= rounds]
    if logged < rounds * on.calls_per_sample or not buckets:
        raise AssertionError(f"DDP made {rounds * on.calls_per_sample} steps with the logger on, {logged} calls logged")
    return _cost(f"DDP step, {backend}", context.world_size, off, on, logged)


def _logged_sizes(dist: Any) -> dict[int, Any]:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        sizes: dict[int, Any] = dist.log_summary(return_dict=True)["summary"]["all_reduce"]
    return sizes


def deepspeed_call(context: RankContext, rounds: int) -> Cost:
    """The same call through deepspeed.comm on gloo, its logger on against off."""
    context.start("gloo", module="torch.distributed")
    import deepspeed.comm as dist

    dist.init_distributed(dist_backend="gloo", verbose=False)
    control = c10d.new_group(backend="gloo")
    tensor = torch.ones(8)

    def call() -> None:
        dist.all_reduce(tensor)

    def logging(enabled: bool) -> None:
        dist.configure(enabled=enabled, prof_all=True, verbose=False, debug=False)

    off, on = measure(
        [
            Candidate("DeepSpeed's logger off", call, prepare=lambda: logging(False)),
            Candidate("DeepSpeed's logger on", call, prepare=lambda: logging(True)),
        ],
        Ranks(control),
        rounds=rounds,
        sample_seconds=0.01,
    )
    return _cost("deepspeed.comm.all_reduce of 8 floats, gloo", context.world_size, off, on, 0)


def show(cost: Cost) -> None:
    print(f"{cost.what}, {cost.ranks} rank{'s' if cost.ranks > 1 else ''}")
    for name, seconds in cost.seconds.items():
        print(f"  {name:24} {in_time(seconds.median):>10} ({in_time(seconds.low)} to {in_time(seconds.high)})")
    difference = cost.difference.scaled(1e9)
    print(
        f"  {'on costs':24} {difference.median:>7.0f} ns ({difference.low:.0f} to {difference.high:.0f} ns), "
        f"{in_ratio(cost.ratio)} times"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with RankPool(options.ranks) as pool:
        alone = pool.run(small_call, options.backend, options.rounds, world_size=1, timeout=600)[0]
        small = pool.run(small_call, options.backend, options.rounds, timeout=600)[0]
        gloo = pool.run(small_call, "gloo", options.rounds, timeout=600)[0]
        step = pool.run(ddp_step, options.backend, options.rounds, timeout=1200)[0]
        costs = [alone, small, gloo, step]
        if importlib.util.find_spec("deepspeed") is not None:
            pool.replace()
            costs.append(pool.run(deepspeed_call, options.rounds, timeout=600)[0])
        else:
            print("DeepSpeed is not installed: its logger is not in this table", file=sys.stderr)
    for cost in costs:
        show(cost)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "costs": [asdict(c) for c in costs]}, indent=2))
    if not options.check:
        return 0
    dear = [c.what for c in (alone, small) if c.difference.median >= MOST_SECONDS_A_CALL]
    slow = [step.what] if step.ratio.median > MOST_STEP_RATIO else []
    for what in dear + slow:
        print(f"too dear: {what}", file=sys.stderr)
    return int(bool(dear + slow))


if __name__ == "__main__":
    sys.exit(main())
