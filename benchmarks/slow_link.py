"""Compressed against plain all-reduce over a link of 1 Gbit/s, with the bytes on the wire counted.

    sudo python benchmarks/slow_link.py [--rate 1gbit] [--json FILE]

Two network namespaces joined by a veth pair, each end limited to 1 Gbit/s by `tc tbf`: a real link for TCP, with one
rank at each end. Times are the median of several calls on 64 MB of fp32 on the slower rank; bytes are those that rank
0's veth sent per call. `auto` must decide to compress here; on shm, without the link, it must not.

Needs root, `ip` and `tc`. Exits with 1 unless onebit is at least 10 times and int8 at least 3 times as fast as gloo's
plain all_reduce.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import machine

SPACES = ("ringway-slow-0", "ringway-slow-1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
LINKS = ("rwslow0", "rwslow1")
PORT = 29713
NUMEL = 16 << 20
LIMITS = {"onebit": 10.0, "int8": 3.0}
ROUNDS = 5


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


@contextlib.contextmanager
def slow_link(rate: str) -> Iterator[None]:
    """Two namespaces and the link between them, removed afterwards."""
    remove_link()
    try:
        for space in SPACES:
            shell(f"ip netns add {space}")
        shell(f"ip link add {LINKS[0]} netns {SPACES[0]} type veth peer name {LINKS[1]} netns {SPACES[1]}")
        for space, link, address in zip(SPACES, LINKS, ADDRESSES, strict=True):
            inside = f"ip netns exec {space}"
            shell(f"{inside} ip addr add {address}/24 dev {link}")
            shell(f"{inside} ip link set lo up")
            shell(f"{inside} ip link set {link} up")
            shell(f"{inside} tc qdisc add dev {link} root tbf rate {rate} burst 256kb latency 50ms")
        yield
    finally:
        remove_link()


def remove_link() -> None:
    for space in SPACES:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def sent_bytes(link: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def rank_main(rank: int, result: Path) -> None:
    """One of the two ranks, in its namespace."""
    import torch

    import ringway as dist
    from ringway.compress import ErrorFeedback, compressed_all_reduce

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LINKS[rank]
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=2)
    tensor = torch.randn(NUMEL)

    def timed(step: Callable[[], Any], rounds: int = ROUNDS) -> dict[str, float]:
        step()
        times, sent = [], []
        for _ in range(rounds):
            dist.barrier()
            before = sent_bytes(LINKS[rank])
            began = time.perf_counter()
            step()
            taken = torch.tensor([time.perf_counter() - began])
            sent.append(sent_bytes(LINKS[rank]) - before)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times.append(taken.item())
        return {"seconds": statistics.median(times), "sent": statistics.median(sent)}

    results: dict[str, Any] = {"plain": timed(lambda: dist.all_reduce(tensor))}
    for spec in ("onebit", "onebit:tensor", "int4", "int8", "fp8"):
        tensor.normal_()
        feedback = ErrorFeedback()
        results[spec] = timed(lambda spec=spec, feedback=feedback: compressed_all_reduce(tensor, feedback, spec))
    feedback = ErrorFeedback()
    results["auto"] = timed(lambda: compressed_all_reduce(tensor, feedback, "auto"))
    results["auto says"] = str(feedback.report)
    if rank == 0:
        result.write_text(json.dumps(results))
    dist.destroy_process_group()


def auto_on_shm(context: Any) -> str:
    """What `auto` decides without the link."""
    import torch

    from ringway.compress import ErrorFeedback, compressed_all_reduce

    context.start("shm")
    feedback = ErrorFeedback()
    compressed_all_reduce(torch.randn(NUMEL), feedback, "auto")
    return str(feedback.report)


def run_ranks(result: Path) -> None:
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, __file__, "--rank", str(rank), "--result", str(result)]
        )
        for rank, space in enumerate(SPACES)
    ]
    codes = [rank.wait(timeout=600) for rank in ranks]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


def report(results: dict[str, Any], rate: str) -> bool:
    plain = results["plain"]
    megabytes = NUMEL * 4 / 1e6
    print(f"{megabytes:.0f} MB of fp32, 2 ranks, {rate}, medians of {ROUNDS} calls")
    print(f"{'gloo all_reduce':16} {plain['seconds'] * 1e3:8.1f} ms  {plain['sent'] / 1e6:7.2f} MB sent by rank 0")
    fine = True
    for name, result in results.items():
        if name == "plain" or not isinstance(result, dict):
            continue
        gain = plain["seconds"] / result["seconds"]
        limit = LIMITS.get(name)
        held = limit is None or gain >= limit
        fine &= held
        print(
            f"{name:16} {result['seconds'] * 1e3:8.1f} ms  {result['sent'] / 1e6:7.2f} MB  {gain:5.1f} x as fast, "
            f"{plain['sent'] / result['sent']:5.1f} x fewer bytes"
            f"{'' if limit is None else f' (at least {limit:.0f} x as fast)'}{'' if held else '   TOO SLOW'}"
        )
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="the link's rate, as tc spells it")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.result)
        return 0
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        with slow_link(options.rate):
            run_ranks(result)
        results = json.loads(result.read_text())
    if options.json is not None:
        measured = {"facts": machine(), "rate": options.rate, "megabytes": NUMEL * 4 / 1e6, "results": results}
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    fine = report(results, options.rate)
    from ringway.testing import RankPool

    with RankPool(2) as pool:
        on_shm = pool.run(auto_on_shm, world_size=2)[0]
    yes = " 0 compressed calls" not in results["auto says"]
    no = " 0 compressed calls" in on_shm
    print(f"auto on this link: {results['auto says']}")
    print(f"auto on shm:       {on_shm}")
    if not (yes and no):
        print("auto decided wrong")
    return 0 if fine and yes and no else 1


if __name__ == "__main__":
    sys.exit(main())
