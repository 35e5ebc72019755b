"""How long an elastic job stands still when a rank is killed, and how fast a newcomer gets the state.

    python benchmarks/elastic.py [--ranks 4] [--rounds 20] [--mib 256] [--two-hosts] [--check]
    python benchmarks/elastic.py --chaos --ranks 32 --minutes 8 --every 29 [--calm 40] [--output PAGE] [--check]

In each round a rank kills itself in the middle of a step. Measured on the others: from the kill until they have the
error, until the new group is formed, and until their next step begins. Then a rank joins, and copies a state of `--mib`
MiB; its rate is compared with the rate of a broadcast of the same size. All processes are on this host, and no timeout
is set. With `--two-hosts` (root, iproute2), half of the ranks are in a second network namespace behind a link of
`--rate`, the rank that is killed and the newcomer among them, and the store is in rank 0. With `--cuda`, the state is
on the GPU, which all ranks share, and each step reduces a tensor there by nccl. With `--check`, it fails if a next step
begins more than 1 s after a kill (3 s with `--cuda`), if the median time to make the group is above 50 ms (one host),
or if the state comes at less than half the rate of a broadcast.

With `--chaos`, a rank is killed or joins every `--every` seconds, and the job's throughput is compared with that of the
same job without events (`elastic_chaos.py`). With `--check`, it fails below 98.5 %, if no step was completed for 10 s,
or if the ranks' states differ at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import elastic_chaos

import ringway
import slow_link
from ringway.bench import median_interval
from ringway.job.elastic import state as elastic_state
from ringway.job.elastic.job import ElasticJob
from ringway.launch import processes
from ringway.launch.run import store_of_a_run
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

Hosts = tuple[slow_link.Host, ...]
"""Two, or none: all ranks are on this host."""

MOST_PAUSE, MOST_CUDA_PAUSE, MOST_FORMING, LEAST_RATE = 1.0, 3.0, 0.05, 0.5


class Timed(ElasticJob):
    """Notes when the last group began to form, and when it was there."""

    began = formed = 0.0

    def _form(self, generation: Any) -> None:
        self.began = time.monotonic()
        super()._form(generation)
        self.formed = time.monotonic()


def _enter_host(context: RankContext, hosts: Hosts) -> None:
    """Moves a rank to its host. Deaths are not visible there in the process table of the other."""
    host = hosts[2 * context.rank // context.world_size]
    slow_link.enter(host.namespace)
    own = processes.pid_namespace()
    processes.pid_namespace = lambda: f"{own} {host.namespace}"
    os.environ.update(GLOO_SOCKET_IFNAME=host.interface, MASTER_ADDR=hosts[0].address, MASTER_PORT="29537")


def _rank(context: RankContext, mib: int, hosts: Hosts, device: str) -> dict[str, float]:
    """The last rank is killed in step 3. The one before it joins only then."""
    leave(ringway)
    torch.set_num_threads(1)
    size, joins = context.world_size, context.world_size - 2
    os.environ.update(RANK=str(context.rank), WORLD_SIZE=str(size - 1), MASTER_ADDR="127.0.0.1")
    if hosts:
        _enter_host(context, hosts)
    else:
        os.environ["LOCAL_WORLD_SIZE"] = str(size - 1)
    if context.rank == size - 1:
        os.environ["RANK"] = str(joins)
    if context.rank == joins:
        os.environ["RANK"] = str(size - 2)
        context.store.wait(["a step after the kill"])
    # Written, as the weights of a model are: memory that was never touched costs a page fault for each page.
    state: dict[str, Any] = {"weights": torch.ones(mib << 18, device=device)}
    result: dict[str, float] = {}
    told = 0.0
    # Left to itself, the job would take shm for the GPU that its ranks share.
    with Timed(backend="cpu:shm,cuda:nccl" if device == "cuda" else None) as job:
        for attempt in job.steps(state):
            if told and "pause" not in result:
                killed = float(context.store.get("killed").decode())
                result |= {"told": told - killed, "pause": time.monotonic() - killed, "forming": job.formed - job.began}
                context.store.set("a step after the kill", "")
            if told and job.size == size - 1:
                break  # the newcomer is there
            if context.rank == joins:
                result["copying"] = copying[0]
                break
            try:
                with attempt:
                    if attempt.step == 3 and context.rank == size - 1:
                        context.store.set("killed", str(time.monotonic()))
                        os.kill(os.getpid(), signal.SIGKILL)
                    if device == "cuda":
                        ringway.all_reduce(torch.ones(1 << 20, device=device))
                    attempt.commit()
            finally:
                told = told or (time.monotonic() if attempt._fault is not None else 0.0)
    return result


copying: list[float] = []


def _time_copying() -> None:
    copy_from = elastic_state.State.copy_from

    def timed(self: elastic_state.State, sources: Any) -> None:
        began = time.monotonic()
        copy_from(self, sources)
        copying[:] = [time.monotonic() - began]

    elastic_state.State.copy_from = timed  # type: ignore[method-assign]


def _broadcast(context: RankContext, mib: int, hosts: Hosts) -> float:
    if hosts:
        _enter_host(context, hosts)
        os.environ.update(RANK=str(context.rank), WORLD_SIZE=str(context.world_size), RINGWAY_JOB_SECRET="5" * 64)
        ringway.init_distributed("gloo")
    else:
        context.start("shm")
    tensor = torch.zeros(mib << 18)
    for _ in range(2):
        ringway.barrier()
        began = time.monotonic()
        ringway.broadcast(tensor, 0)
    return time.monotonic() - began


def _measured_rank(context: RankContext, mib: int, hosts: Hosts, device: str) -> dict[str, float]:
    _time_copying()
    return _rank(context, mib, hosts, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--two-hosts", action="store_true")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--rate", default="10gbit", help="of the link between two hosts")
    parser.add_argument("--chaos", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the run with events")
    parser.add_argument("--every", type=float, default=29.0, help="seconds between two events")
    parser.add_argument("--calm", type=float, default=40.0, help="seconds of each of the two runs without events")
    parser.add_argument("--width", type=int, default=512, help="of the network that is trained")
    parser.add_argument("--batch", type=int, default=256, help="samples of a rank in a step")
    parser.add_argument("--output", type=Path, help="the page to write")
    parser.add_argument("--commit", help="the commit of a tree without git history")
    options = parser.parse_args()
    if options.chaos:
        sys.exit(elastic_chaos.measure(options))
    with slow_link.two_hosts(options.rate) if options.two_hosts else nullcontext(()) as hosts:
        measure(options, tuple(hosts))


def measure(options: argparse.Namespace, hosts: Hosts) -> None:
    told, pauses, forming, rates = [], [], [], []
    device = "cuda" if options.cuda else "cpu"
    with RankPool(options.ranks + 1, preload=("ringway.job.elastic.job",)) as pool:
        for number in range(1, options.rounds + 1):
            whole = pool.run(_broadcast, options.mib, hosts, world_size=options.ranks)
            pool.replace()
            with nullcontext({"RINGWAY_JOB_SECRET": "5" * 64}) if hosts else store_of_a_run() as variables:
                ended = pool.try_run(
                    _measured_rank,
                    options.mib,
                    hosts,
                    device,
                    world_size=options.ranks + 1,
                    environment={**variables},
                    grace=120.0,
                )
            pool.replace()
            survivors = [outcome.value for outcome in ended[: options.ranks - 1]]
            if not all(survivors):
                sys.exit("\n".join(map(str, ended)))
            told.append(max(each["told"] for each in survivors))
            pauses.append(max(each["pause"] for each in survivors))
            forming.append(max(each["forming"] for each in survivors))
            rates.append(max(whole) / ended[options.ranks - 1].value["copying"])
            print(f"round {number}: the next step began {pauses[-1] * 1e3:.0f} ms after the kill", file=sys.stderr)
    where = f"two hosts with a link of {options.rate}" if hosts else f"this host, {device}"
    print(f"{options.ranks} ranks on {where}, {options.rounds} rounds; slowest rank of each round")
    print("| from the kill until | median | 95 % interval | slowest |")
    print("|---|---|---|---|")
    print(_row("the others have the error", told))
    print(_row("their next step begins", pauses))
    print(_row("(making the group alone)", forming))
    rate = median_interval(rates)
    interval = f"{rate.low:.2f} to {rate.high:.2f}"
    print(f"\nThe state of {options.mib} MiB comes at {rate.median:.2f} ({interval}) of a broadcast's rate on the CPU.")
    if options.check and (
        max(pauses) > (MOST_CUDA_PAUSE if options.cuda else MOST_PAUSE)
        or (not hosts and not options.cuda and median_interval(forming).median > MOST_FORMING)
        or (not options.cuda and rate.high < LEAST_RATE)
    ):
        sys.exit(json.dumps({"pauses": pauses, "forming": forming, "rates": rates}))


def _row(name: str, values: list[float]) -> str:
    found = median_interval(values)
    interval = f"{found.low * 1e3:.0f} to {found.high * 1e3:.0f} ms"
    return f"| {name} | {found.median * 1e3:.0f} ms | {interval} | {max(values) * 1e3:.0f} ms |"


if __name__ == "__main__":
    main()
