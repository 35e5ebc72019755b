"""The cost of the job's secret: the start of a job, an object message, a small collective.

    python benchmarks/door_cost.py [--ranks 8] [--rounds 15] [--check] [--output docs/proofs/door_cost.md]

Each is measured without a secret, with a secret on rank 0's TCP store, and with the private store of `ringway run`, in
turns on the same ranks. The time of a round is that of the slowest rank. The table has the best round, which other load
on the machine disturbs least, and the median of the rounds' ratios with its 95 % interval. With `--check`, it fails if
a start takes 100 ms longer, or if the whole interval of a ratio lies above 1.05, for an object message of 1 MB or an
8-byte all_reduce. With `--output`, it writes the table to that page too (`make door-cost`).
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ringway as dist
from ringway.bench import median_interval
from ringway.launch.identity import job_key
from ringway.launch.secret import SECRET, SECRET_FILE, PrivateSecret
from ringway.launch.store_server import PrivateSocket, StoreServer
from ringway.testing import RankContext, RankPool

OPEN, KEYED, PRIVATE = "no secret", "a secret", "ringway run"
MOST_START, MOST_RATIO = 0.1, 1.05
OBJECT = 1 << 20
PROVES = (
    "benchmarks/door_cost.py",
    "csrc/pack/keyed_hash.cpp",
    "src/ringway/groups/object_frames.py",
    "src/ringway/keys.py",
    "src/ringway/launch",
    "src/ringway/store.py",
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _round(context: RankContext, variables: dict[str, str], backend: str) -> dict[str, float]:
    """One job: how long it took to start, and what its calls cost."""
    place = {"RANK": context.rank, "WORLD_SIZE": context.world_size, "LOCAL_WORLD_SIZE": context.world_size}
    os.environ.update(variables | {name: str(value) for name, value in place.items()})
    context.store.add(variables["MASTER_PORT"], 1)
    while context.store.add(variables["MASTER_PORT"], 0) < context.world_size:
        time.sleep(0.001)
    began = time.perf_counter()
    dist.init_distributed(dist_backend=backend, verbose=False, timeout=120)
    costs = {f"start, {backend}": time.perf_counter() - began}
    pair = dist.new_group([0, 1], backend=backend)
    if context.rank < 2:
        array, small = np.zeros(OBJECT, dtype=np.uint8), torch.zeros(2)
        costs[f"object of 1 MB, {backend}"] = _timed_in(pair, lambda: dist.broadcast_object(array, 0, pair), 30)
        costs[f"all_reduce of 8 bytes, {backend}"] = _timed_in(pair, lambda: dist.all_reduce(small, group=pair), 500)
    dist.barrier()
    dist.destroy_process_group()
    for name in (*variables, *place):
        os.environ.pop(name, None)
    return costs


def _timed_in(group: Any, call: Any, times: int) -> float:
    for _ in range(max(1, times // 10)):
        call()
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def _measure(pool: RankPool, ranks: int, kind: str, backend: str) -> dict[str, float]:
    port = _free_port()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if kind == KEYED:
        variables[SECRET] = secrets.token_hex(32)
    if kind != PRIVATE:
        costs = pool.run(_round, variables, backend, world_size=ranks)
    else:
        with PrivateSecret() as secret, PrivateSocket() as listening:
            server = StoreServer(listening.listener, f"{port:032}", job_key(secret.key, str(port), ""))
            variables |= {"RINGWAY_RUN_ID": str(port), "RINGWAY_RUN_STORE": listening.path, SECRET_FILE: secret.path}
            costs = pool.run(_round, variables, backend, world_size=ranks)
            server.close()
    return {what: max(cost.get(what, 0.0) for cost in costs) for cost in costs for what in cost}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--output", type=Path, help="the page to write")
    parser.add_argument("--commit", help="the commit of a tree without git history")
    arguments = parser.parse_args()
    samples: dict[str, dict[str, list[float]]] = {}
    with RankPool(arguments.ranks) as pool:
        for turn in range(arguments.rounds):
            kinds = [OPEN, KEYED, PRIVATE]
            for kind in kinds if turn % 2 == 0 else reversed(kinds):
                for backend in ("shm", "gloo"):
                    for what, seconds in _measure(pool, arguments.ranks, kind, backend).items():
                        samples.setdefault(what, {}).setdefault(kind, []).append(seconds)
    table, too_slow = _table(samples, arguments.ranks, arguments.rounds)
    print("\n".join(table), flush=True)
    if arguments.output is not None:
        _write_page(arguments.output, table, too_slow, arguments.commit)
    if too_slow:
        print(f"too slow: {'; '.join(too_slow)}", file=sys.stderr)
    return 1 if too_slow and arguments.check else 0


def _table(samples: dict[str, dict[str, list[float]]], ranks: int, rounds: int) -> tuple[list[str], list[str]]:
    """The lines of the table, and what is above its limit."""
    too_slow = []
    lines = [f"| µs, the best of {rounds}, {ranks} ranks | {OPEN} | {KEYED} | {PRIVATE} |", "|---|---|---|---|"]
    for what, by_kind in samples.items():
        best = {kind: min(seconds) for kind, seconds in by_kind.items()}
        cells = []
        for kind in (OPEN, KEYED, PRIVATE):
            more, start = best[kind] - best[OPEN], what.startswith("start")
            ratio = median_interval([one / other for one, other in zip(by_kind[kind], by_kind[OPEN], strict=True)])
            shown = f"{more * 1e3:+.0f} ms" if start else f"{ratio.median:.3f}: {ratio.low:.3f} to {ratio.high:.3f}"
            cells.append(f"{best[kind] * 1e6:.1f} ({shown})")
            if (start and more > MOST_START) or (not start and ratio.low > MOST_RATIO):
                too_slow.append(f"{what}, {kind}")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return lines, too_slow


def _write_page(path: Path, table: list[str], too_slow: list[str], commit: str | None) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    import proofs

    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}, "
    limits = f"a start may take {MOST_START * 1e3:.0f} ms longer, and no interval of a ratio may lie above {MOST_RATIO}"
    outcome = f"Above its limit: {'; '.join(too_slow)}." if too_slow else "Nothing is above its limit."
    text = [
        f"`python benchmarks/{Path(__file__).name} {proofs.arguments()}` on {machine}torch {torch.__version__}.",
        "",
        *table,
        "",
        "In brackets: how much longer a start takes, or the median of the rounds' ratios to a job without a secret,",
        f"with its 95 % interval. The limits: {limits}.",
        outcome,
    ]
    proofs.write(path, "What a job's secret costs", PROVES, "\n".join(text), commit)


if __name__ == "__main__":
    sys.exit(main())
