"""shm with CUDA tensors on one GPU, with a report for docs/proofs/shm_cuda.md.

    LD_PRELOAD=libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 PYTHONPATH=src python scripts/shm_cuda_proof.py

NCCL from 2.30 on is needed to compare with it: earlier ones refuse several ranks on one GPU. Each part runs in a
process of its own and writes its rows as they come, so a run that is cut short still gives a page.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import proofs
import shm_cuda_ranks
import torch
from cuda_ranks import SYMMETRIC, check_all, train
from shm_cuda_ranks import BACKEND, MIB, Checked, backend_of, started

from ringway.call import ALL_REDUCE
from ringway.testing import RankContext, RankPool
from ringway.testing.conformance import Report, Setting, all_cases, run_setting

PROVES = (
    *("src/ringway/backends/shm", "csrc/shm/device_link.h", "csrc/shm/device_link.cpp", "csrc/shm/device_memory.cpp"),
    *("csrc/shm/message_blocks.cpp", "csrc/shm/launch_order.h"),
    *("csrc/python/shm_device_path.cpp", "csrc/python/shm_device_messages.cpp", "csrc/device/driver.cpp"),
)
sys.path.insert(0, str(proofs.ROOT / "tests" / "backends"))
import shm_programs  # noqa: E402 - a module of the tests

NOT_ON_CUDA = {"a_forked_child_is_no_member"}
"""A forked child cannot use CUDA at all: torch refuses before ringway is asked."""


class Row(NamedTuple):
    title: str
    holds: bool
    said: str


class Rows:
    """The rows of one part, in a file that is whole after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Row] = []

    def add(self, title: str, holds: bool, said: str) -> None:
        self._rows.append(Row(title, holds, said))
        self.write(False)
        print("yes" if holds else "NO ", title, said[:1500], flush=True)

    def write(self, whole: bool) -> None:
        self._path.write_text(json.dumps({"rows": self._rows, "whole": whole}))


@contextmanager
def mps() -> Iterator[None]:
    """CUDA's Multi-Process Service, for processes that start in the block."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        os.environ.update(places)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False, timeout=30)
            for name in places:
                del os.environ[name]


def conformance(rows: Rows, size: int, every: int, direct: bool) -> None:
    report = Report()
    preload = ["shm_cuda_direct"] if direct else []
    began, limit = time.monotonic(), 150.0
    with RankPool(size, preload=preload) as pool:
        names = [name for name in all_cases() if name not in NOT_ON_CUDA]
        for name in names:
            if time.monotonic() - began < limit:
                run_setting(pool, Setting(BACKEND, size, every=every, device="cuda"), [name], report)
    how = "every call direct" if direct else "as it comes"
    findings = "; ".join(f"{finding}"[-700:] for _, finding in report.findings[:6])
    count = len(report.seconds)
    rows.add(
        f"conformance with CUDA tensors, {size} ranks, {how}",
        not report.findings and count == len(names),
        f"{count} of {len(names)} cases, every {every}th kind, {len(report.findings)} findings. {findings}",
    )


def run(rows: Rows, title: str, function: Callable[..., Checked], size: int, *arguments: Any, pool: Any = None) -> None:
    """Runs a check on every rank; it holds if it does on all."""
    with RankPool(size) if pool is None else pool as ranks:
        outcomes = ranks.try_run(function, *arguments, world_size=size, timeout=150)
    values = [outcome.value if outcome.ok else (False, str(outcome)[-900:]) for outcome in outcomes]
    failed = next((value for value in values if not value[0]), None)
    rows.add(f"{title}, {size} ranks", failed is None, str((failed or values[0])[1]))


# What ranks do


def is_direct(context: RankContext) -> Checked:
    dist = started(context)
    tensor = torch.ones(4 * MIB, device="cuda")
    dist.all_reduce(tensor)
    backend = backend_of(dist)
    link = backend._link
    told = backend.why_host or f"{link.open_mappings} mappings, MPS {link.has_mps}, GPU {link.uuid[:8]}"
    return float(tensor[0]) == context.world_size and link is not None, told


def in_graphs(context: RankContext) -> Checked:
    """Collectives of all sizes, captured and replayed, with eager ones in between."""
    dist = started(context)
    size = context.world_size
    tensor, small = torch.zeros(MIB, device="cuda"), torch.zeros(16, device="cuda")
    gathered = torch.zeros(16 * size, device="cuda")
    dist.all_reduce(tensor)
    dist.all_reduce(small)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            tensor.add_(2 * context.rank)
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            small.add_(context.rank)
            dist.all_reduce(small)
            small.div_(size)
            dist.all_gather_into_tensor(gathered, small, async_op=True).wait()
    tensor.zero_()
    for _ in range(5):
        graph.replay()
        tensor.add_(2 * context.rank)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    seen = float(tensor[0]), float(small[0]), float(gathered[-1])
    mean = (size - 1) / 2 * 100
    fine = seen == ((size - 1) * 105.0, mean, mean)
    dist.destroy_process_group()
    return fine, f"60 collectives captured, replayed 5 times with eager calls between: {seen}"


def on_any_stream(context: RankContext) -> Checked:
    """Issued on one stream and awaited on another; the results are right after the wait."""
    dist = started(context)
    size, wrong = context.world_size, 0
    for step in range(30):
        issued, waited = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(issued):
            torch.cuda._sleep(1_000_000)
            tensor = torch.full((MIB,), float(context.rank + step), device="cuda")
            strided = torch.full((512, 512), float(step), device="cuda").t()
            works = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(strided[:, ::2], async_op=True)]
            small, thin = torch.full((3,), float(step), device="cuda"), torch.full((8, 8), float(step), device="cuda")
            works += [dist.all_reduce(small, async_op=True), dist.all_reduce(thin[:, 0], async_op=True)]
        with torch.cuda.stream(waited):
            for work in works:
                work.wait()
            seen = tensor.sum(), strided.sum(), small.sum(), thin.sum()
        torch.cuda.synchronize()
        total = sum(rank + step for rank in range(size))
        expected = [total * MIB, step * 512 * 256 * (size + 1), 3 * step * size, step * (56 + 8 * size)]
        wrong += [float(one) for one in seen] != [float(one) for one in expected]
    return wrong == 0, f"wrong: {wrong} of 30 rounds"


def like_the_cpu(context: RankContext) -> Checked:
    """The bits of every reduction are those of shm on the CPU, on every rank and in every run."""
    dist = started(context)
    from ringway.call import Reduce, reduces
    from ringway.testing.probe import torch_op

    generator = torch.Generator().manual_seed(context.rank)
    dtypes = (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    )
    differ, checks = [], 0
    for dtype in dtypes:
        for reduce in Reduce:
            if not reduces(dtype, reduce):
                continue
            values = torch.randn(1_000_003, generator=generator) * (3 if dtype.is_floating_point else 50)
            host = values.to(dtype)
            device = host.cuda()
            dist.all_reduce(host, op=torch_op(dist, reduce))
            dist.all_reduce(device, op=torch_op(dist, reduce))
            checks += 1
            same = torch.equal(device.cpu().view(torch.uint8), host.view(torch.uint8))
            if not same:
                differ.append(f"{reduce.name} of {dtype}")
    return not differ, f"{checks} reductions of 1,000,003 elements; different: {differ}"


def trains(context: RankContext) -> Checked:
    dist = started(context)
    checks, wrong = check_all(context.rank, context.world_size)
    single, parallel = train(context.rank, context.world_size)
    close = all(abs(a - b) < 1e-5 for a, b in zip(single, parallel, strict=True))
    dist.barrier()
    return not wrong and close, f"{checks} checks, wrong: {wrong[:4]}; DDP {parallel[-1]:.7f}, alone {single[-1]:.7f}"


def mismatched(context: RankContext) -> Checked:
    """Ranks that call different things are told so, and no stream hangs."""
    dist = started(context, group_name="mismatch")
    from ringway.errors import CollectiveMismatch

    tensor = torch.ones(MIB + context.rank, device="cuda")
    try:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        dist.all_reduce(tensor)
    except CollectiveMismatch as error:
        torch.cuda.synchronize()
        return True, str(error)[:200]
    return False, "no error"


def many_groups(context: RankContext, count: int, seconds: float) -> Checked:
    dist = started(context)
    tensor = torch.ones(MIB, device="cuda")
    dist.all_reduce(tensor)
    before = 0
    began = time.monotonic()
    for number in range(count):
        group = dist.new_group(list(range(context.world_size)))
        dist.all_reduce(tensor.fill_(1), group=group)
        dist.destroy_process_group(group)
        if number % 50 == 49:
            late = torch.tensor([time.monotonic() - began > seconds])
            dist.broadcast(late, 0)
            if bool(late):
                break
        if number == 9:
            torch.cuda.synchronize()
            dist.barrier()
            before = torch.cuda.mem_get_info()[0]
            dist.barrier()
    torch.cuda.synchronize()
    dist.barrier()
    lost = before - torch.cuda.mem_get_info()[0]
    spent = time.monotonic() - began
    return lost <= 4 * MIB and float(tensor[0]) == context.world_size, (
        f"{number + 1} groups in {spent:.0f} s: device memory lost {lost / MIB:.1f} MiB from the 10th to the last"
    )


def until_killed(context: RankContext, number: int, nbytes: int) -> Any:
    """One rank is killed at a random moment of a loop of calls. The survivor says how long it took to notice."""
    from ringway.errors import PeerLost

    dist = started(context, group_name=f"kill {number}")
    victim, op = number % 2, list(OPS)[number // 6 % 3]
    tensor = torch.ones(nbytes // 4, device="cuda")
    for _ in range(3):
        OPS[op](dist, None, tensor, 2)
    torch.cuda.synchronize()
    if context.rank == victim:
        moment = random.Random(number).uniform(0.0, 0.02)
        context.store.set(f"dies {number}", "1")
        threading.Thread(target=lambda: (time.sleep(moment), os.kill(os.getpid(), signal.SIGKILL))).start()
    began = time.monotonic()
    try:
        while time.monotonic() < began + 20:
            OPS[op](dist, None, tensor.fill_(1.0), 2)
            if number % 5 == 0:
                torch.cuda.synchronize()
    except PeerLost as error:
        noticed = time.monotonic() - began
        torch.cuda.synchronize()
        named = error.rank == victim
        dist.destroy_process_group()
        works = float((torch.ones(1000, device="cuda") * 2).sum()) == 2000
        del tensor
        torch.cuda.empty_cache()
        return named and works and noticed < 1.2, noticed, str(error)[:200]
    return False, 20.0, "no error"


def kills(rows: Rows, count: int, seconds: float, pairs: int = 6) -> None:
    """Pairs of ranks, all at a time. One of each pair is killed again and again, and the other one survives them all.

    The pairs wait for each other after each round. Free memory is then the same as before the round, if the survivors
    gave back what they had: nobody else has memory of the GPU. The first rounds load the kernels of each op.
    """
    found: list[Any] = []
    free: list[int] = []
    until = time.monotonic() + seconds

    def kill(pool: RankPool, number: int) -> Any:
        nbytes = (8 << 10, 4 * MIB, 64 * MIB)[number % 3]
        survivor = pool.try_run(until_killed, number, nbytes, world_size=2, timeout=60)[1 - number % 2]
        return survivor.value if survivor.ok else (False, 0.0, str(survivor)[-500:])

    with ExitStack() as stack:
        pools = [stack.enter_context(RankPool(2)) for _ in range(pairs)]
        threads = stack.enter_context(ThreadPoolExecutor(pairs))
        for first in range(0, count, pairs):
            if time.monotonic() > until:
                break
            found += threads.map(kill, pools, range(first, min(first + pairs, count)))
            free.append(settled_free(free[3] if len(free) > 3 else None))
    bad = [one for one in found if not one[0]]
    lost = max((free[3] - one for one in free[3:]), default=sys.maxsize)
    slowest = max((one[1] for one in found), default=0.0)
    rows.add(
        f"{len(found)} kills at random moments, without MPS",
        not bad and lost <= 8 * MIB,
        f"{len(found) - len(bad)} survivors named the dead rank and went on; the slowest {slowest:.2f} s after the "
        f"loop began; device memory lost after any round {lost / MIB:.0f} MiB. {bad[:2]}",
    )


def settled_free(before: int | None) -> int:
    """The GPU's free memory, as soon as it is what it was, or stays the same for half a second: processes that were
    killed give theirs back a little later."""
    free, since = torch.cuda.mem_get_info()[0], time.monotonic()
    while free != before and time.monotonic() < since + 0.5:
        time.sleep(0.02)
        now = torch.cuda.mem_get_info()[0]
        if now != free:
            free, since = now, time.monotonic()
    return free


OPS: dict[str, Callable[[Any, Any, torch.Tensor, int], None]] = {
    "all_reduce": lambda dist, group, t, size: dist.all_reduce(t, group=group),
    "broadcast": lambda dist, group, t, size: dist.broadcast(t, 0, group=group),
    "all_gather_into_tensor": lambda dist, group, t, size: dist.all_gather_into_tensor(
        t, t.chunk(size)[dist.get_rank(group)], group=group
    ),
    "reduce_scatter_tensor": lambda dist, group, t, size: dist.reduce_scatter_tensor(
        t.chunk(size)[dist.get_rank(group)], t, group=group
    ),
    "all_to_all_single": lambda dist, group, t, size: dist.all_to_all_single(OTHER["out"][: t.numel()], t, group=group),
    "reduce": lambda dist, group, t, size: dist.reduce(t, 0, group=group),
    "gather": lambda dist, group, t, size: dist.gather(
        t.chunk(size)[dist.get_rank(group)],
        list(t.chunk(size)) if dist.get_rank(group) == 0 else None,
        0,
        group=group,
    ),
    "scatter": lambda dist, group, t, size: dist.scatter(
        t.chunk(size)[dist.get_rank(group)],
        list(t.chunk(size)) if dist.get_rank(group) == 0 else None,
        0,
        group=group,
    ),
    "send and recv": lambda dist, group, t, size: (
        dist.recv(t, dist.get_rank(group) - 1, group=group)
        if dist.get_rank(group) % 2
        else dist.send(t, dist.get_rank(group) + 1, group=group)
    ),
}
OTHER: dict[str, torch.Tensor] = {}


def times(context: RankContext, cases: list[tuple[str, int]], rivals: list[str], rounds: int) -> list[Any]:
    """Seconds of a call on each backend, which take turns; and of a copy of the buffer."""
    if context.world_size > 2:
        os.environ["NCCL_MAX_NCHANNELS"] = "16"  # with more, NCCL's kernels of four ranks were stuck on one GPU
    dist = started(context)
    size = context.world_size
    groups = {"shm": None, **{name: dist.new_group(list(range(size)), backend=name) for name in rivals}}
    found = []
    for op, nbytes in cases:
        tensor = torch.zeros(nbytes // 4, device="cuda")
        OTHER["out"] = torch.zeros(nbytes // 4 if op == "all_to_all_single" else 1, device="cuda")
        taken: dict[str, list[float]] = {name: [] for name in (*groups, "copy")}
        target = torch.empty_like(tensor)
        for group in groups.values():
            OPS[op](dist, group, tensor, size)
        torch.cuda.synchronize()
        for _ in range(rounds if nbytes < 64 * MIB else 3):
            for name, group in groups.items():
                quick = name == "shm" or (name == "nccl" and nbytes < 64 * MIB)
                count = (30 if nbytes < MIB else 5) if quick else (3 if nbytes < 64 * MIB else 1)
                dist.barrier()
                began = time.perf_counter()
                for _ in range(count):
                    OPS[op](dist, group, tensor, size)
                torch.cuda.synchronize()
                taken[name].append((time.perf_counter() - began) / count)
            dist.barrier()
            if context.rank == 0:
                began = time.perf_counter()
                for _ in range(10):
                    target.copy_(tensor)
                torch.cuda.synchronize()
                taken["copy"].append((time.perf_counter() - began) / 10)
            dist.barrier()
        found.append((op, nbytes, {name: statistics.median(each) for name, each in taken.items() if each}))
        if context.rank == 0:
            print(op, nbytes, {name: f"{1e6 * value:.0f}" for name, value in found[-1][2].items()}, flush=True)
        del tensor, target
        OTHER.clear()
        torch.cuda.empty_cache()
    return found


def limit(op: str, nbytes: int, size: int, under: bool, copy: float) -> float:
    """The most seconds that a call may take. A copy reads and writes its bytes once: 2 for each byte."""
    if op == "all_reduce" and nbytes == 4 << 10 and size == 2:
        return 25e-6 if under else 100e-6
    if op == "all_reduce" and nbytes == 1024 * MIB:
        return copy * ((2.4 if under else 3.0) if size == 2 else 1.3 * size)
    if op == "broadcast" and nbytes == 1024 * MIB:
        return copy * 1.2 * size / 2
    return float("inf")


def timed(rows: Rows, size: int, under: bool, quick: bool) -> None:
    cases = [("all_reduce", nbytes) for nbytes in (4 << 10, 64 << 10, 256 << 10, MIB, 64 * MIB, 1024 * MIB)]
    cases += [(op, nbytes) for op in list(OPS)[1:] for nbytes in (4 << 10, 64 << 10, 256 << 10, MIB, 64 * MIB)]
    cases += [("broadcast", 1024 * MIB)]
    if quick:
        cases = [("all_reduce", nbytes) for nbytes in (4 << 10, 256 << 10, MIB, 4 * MIB, 64 * MIB, 1024 * MIB)]
    rivals = [] if quick else ["gloo", "nccl"]
    where = f"{size} ranks, {'under MPS' if under else 'without MPS'}"
    with RankPool(size) as pool:
        outcomes = pool.try_run(times, cases, rivals, 9, world_size=size, timeout=180 if size == 2 else 60)
    if not outcomes[0].ok:
        rows.add(f"times, {where}", False, str(outcomes[0])[-900:])
        return
    for op, nbytes, taken in outcomes[0].value:
        ours, copies = taken["shm"], taken["shm"] / taken["copy"]
        others = {name: value for name, value in taken.items() if name not in ("shm", "copy")}
        most = limit(op, nbytes, size, under, taken["copy"])
        said = (
            f"{1e6 * ours:.0f} µs, {copies:.2f} copies" + (f" (at most {1e6 * most:.0f} µs)" if most < 1 else "") + "; "
        )
        said += ", ".join(f"{name} {1e6 * value:.0f} µs" for name, value in others.items())
        shown = f"{nbytes >> 10} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
        holds = ours <= most and all(ours <= value for value in others.values())
        rows.add(f"{op} of {shown}, {where}", holds, said)


Check = tuple[Any, ...]
"""A title, what a rank does, and its arguments."""


def checks(rows: Rows, size: int, those: Sequence[Check]) -> None:
    with RankPool(size) as pool:
        for title, function, *arguments in those:
            outcomes = pool.try_run(function, *arguments, world_size=size, timeout=90)
            values = [outcome.value if outcome.ok else (False, str(outcome)[-900:]) for outcome in outcomes]
            failed = next((value for value in values if not value[0]), None)
            rows.add(f"{title}, {size} ranks", failed is None, str((failed or values[0])[1]))


BASIC: tuple[Check, ...] = (
    ("device memory is shared", is_direct),
    ("the bits of shm on the CPU", like_the_cpu),
    ("CUDA graphs", in_graphs),
    ("any stream", on_any_stream),
    ("every op, and DDP", trains),
    ("mismatches", mismatched),
)


def gpu_uuid() -> str:
    said = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, check=True)
    return said.stdout.decode().split()[0]


def training(rows: Rows, size: int) -> None:
    those: tuple[Check, ...] = (
        ("DDP has the bits of DDP on the CPU", shm_cuda_ranks.ddp_like_the_cpu),
        ("FSDP2", shm_cuda_ranks.fsdp2),
        ("DTensor", shm_cuda_ranks.dtensor),
    )
    checks(rows, size, those)


def memory(rows: Rows, size: int) -> None:
    uuid = gpu_uuid()
    for title, function, *arguments in (
        ("memory that is freed and allocated again", shm_cuda_ranks.allocated_again),
        ("expandable segments", shm_cuda_ranks.not_exportable),
        ("a rank that names the GPU by its UUID", shm_cuda_ranks.seen_under_another_name, uuid),
        ("a rank that does not come, and Ctrl-C", shm_cuda_ranks.absent),
    ):
        checks(rows, size, ((title, function, *arguments),))  # each changes its processes' settings


def compression(rows: Rows) -> None:
    import numerics_proof

    for title, holds, said in numerics_proof.fixed_runs(BACKEND, "cuda"):
        rows.add(title, holds, said)


def programs(rows: Rows, size: int, seconds: float, direct: bool) -> None:
    """Random programs, ten at a time, until the time is up."""
    first, count, until = random.randrange(1 << 30), 0, time.monotonic() + seconds
    preload = ["shm_cuda_direct"] if direct else []
    failed = ""
    with RankPool(size, preload=preload) as pool:
        while time.monotonic() < until and not failed:
            arguments = (first + count, 10, False, BACKEND, "cuda")
            outcomes = pool.try_run(shm_programs.run_programs, *arguments, world_size=size, timeout=90)
            failed = next((str(outcome)[-900:] for outcome in outcomes if not outcome.ok), "")
            count += 10
    how = "every call direct" if direct else "as it comes"
    rows.add(f"random programs, {size} ranks, {how}", not failed, f"{count} programs from seed {first}. {failed}")


def mixed_calls(context: RankContext) -> Checked:
    """Small calls on shm and large ones on nccl in one group, synchronous and not, eager and in a graph; then DDP."""
    torch.cuda.set_device(0)
    dist = context.start("cpu:shm,cuda:nccl")
    backend, size = backend_of(dist), context.world_size
    chosen = [backend.choose(ALL_REDUCE, nbytes, torch.float32, "cuda") for nbytes in (4, MIB, MIB + 4)]
    wrong = 0
    for step in range(50):
        small, large = torch.full((64,), float(step), device="cuda"), torch.full((MIB,), float(step), device="cuda")
        works = [dist.all_reduce(one, async_op=True) for one in (small, large, small.clone(), large.clone())]
        for work in works:
            work.wait()
        dist.all_reduce(large)
        dist.all_reduce(small)
        dist.broadcast(large, step % size)
        wrong += (float(small[0]), float(large[-1])) != (step * size * size,) * 2
    captured, graph = [torch.zeros(64, device="cuda"), torch.zeros(MIB, device="cuda")], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in captured:
            one.add_(1)
            dist.all_reduce(one)
    for one in captured:
        one.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    del graph  # NCCL closes no communicator of which there is a graph
    expected = sum(size**power for power in range(1, 4))
    wrong += any(float(one[0]) != expected for one in captured)
    checks, failed = check_all(context.rank, size, without=("send",))
    single, parallel = train(context.rank, size)
    close = all(abs(a - b) < 1e-5 for a, b in zip(single, parallel, strict=True))
    dist.destroy_process_group()
    fine = chosen == ["shm", "shm", "nccl"] and not wrong and not failed and close
    return fine, f"chosen {chosen}; wrong {wrong} of 51 rounds; {checks} checks, wrong: {failed[:4]}; DDP {close}"


def mixing(rows: Rows) -> None:
    """A policy that mixes nccl and shm, and the one that `ringway tune` writes."""
    run(rows, "a policy mixes nccl and shm", mixed_calls, 2, pool=RankPool(2, preload=["shm_cuda_mixed"]))
    report, began = Report(), time.monotonic()
    with RankPool(2, preload=["shm_cuda_mixed"]) as pool:
        without = {*NOT_ON_CUDA, *SYMMETRIC, "batch_of_sends_and_receives"}  # messages are nccl's
        names = [name for name in all_cases() if name not in without]
        for name in names:
            if time.monotonic() - began < 60:
                run_setting(pool, Setting("cpu:shm,cuda:nccl", 2, every=61, device="cuda"), [name], report)
    findings = "; ".join(f"{finding}"[-500:] for _, finding in report.findings[:6])
    rows.add(
        "conformance of a group that mixes nccl and shm, 2 ranks",
        not report.findings and len(report.seconds) == len(names),
        f"{len(report.seconds)} of {len(names)} cases, every 61st kind, {len(report.findings)} findings. {findings}",
    )
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "policy.json"
        command = [sys.executable, "-m", "ringway", "tune", "-n", "2", "--device", "cuda", "-o", str(written)]
        command += ["--ops", "all_reduce,broadcast", "--sizes", "4096,1048576,67108864", "--rounds", "5"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        made = json.loads(written.read_text()) if written.exists() else {}
        measured = made.get("measured", {}).get("microseconds on cuda", {})
        names_measured = {name for by_size in measured.values() for times in by_size.values() for name in times}
        rules = [
            f"{rule['op']}: {rule['backend']} up to {rule.get('up_to', 'any size')}" for rule in made.get("rules", [])
        ]
        holds = done.returncode == 0 and {"nccl", "shm", "gloo"} <= names_measured
        rows.add(
            "ringway tune --device cuda",
            holds,
            f"{'; '.join(rules)}; {measured} {done.stderr[-400:] if not holds else ''}",
        )


def _under_mps(part: Callable[[Rows], None]) -> Callable[[Rows], None]:
    def run_part(rows: Rows) -> None:
        with mps():
            part(rows)

    return run_part


PARTS: dict[str, Callable[[Rows], None]] = {
    "checks": lambda rows: checks(rows, 2, BASIC),
    "checks4": lambda rows: checks(rows, 4, BASIC),
    "checks_mps": _under_mps(lambda rows: checks(rows, 2, BASIC)),
    "training": lambda rows: training(rows, 2),
    "memory": lambda rows: memory(rows, 2),
    "compression": compression,
    "programs2": lambda rows: programs(rows, 2, 30.0, False),
    "programs2_direct": lambda rows: programs(rows, 2, 30.0, True),
    "programs4_mps": _under_mps(lambda rows: programs(rows, 4, 30.0, True)),
    "conformance2": lambda rows: conformance(rows, 2, 7, False),
    "direct2": lambda rows: conformance(rows, 2, 3, True),
    "direct4": lambda rows: conformance(rows, 4, 31, True),
    "direct8": lambda rows: conformance(rows, 8, 61, True),
    "times": lambda rows: timed(rows, 2, False, False),
    "times_mps": _under_mps(lambda rows: timed(rows, 2, True, False)),
    "times4_mps": _under_mps(lambda rows: timed(rows, 4, True, False)),
    "mixing": mixing,
    "mixing_mps": _under_mps(mixing),
    "quick": lambda rows: timed(rows, 2, False, True),
    "quick_mps": _under_mps(lambda rows: timed(rows, 2, True, True)),
    "groups": lambda rows: run(rows, "many groups", many_groups, 2, 1000, 60.0),
    "kills": lambda rows: kills(rows, 200, 600.0),
    "kills_short": lambda rows: kills(rows, 200, 30.0),
}
DEFAULT = ("checks", "checks4", "checks_mps", "training", "memory", "compression")
DEFAULT += ("programs2", "programs2_direct", "programs4_mps", "mixing", "conformance2", "direct2", "direct4", "direct8")
DEFAULT += ("times", "times_mps", "times4_mps", "groups", "kills")


def page(rows: Sequence[Row]) -> str:
    lines = [
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {proofs.loaded_nccl()}.",
        "Ranks share the one GPU. A time holds if neither gloo nor NCCL is quicker in the same run, where they take",
        "turns, and if it is within its limit. Among 4 ranks NCCL has at most 16 channels each.",
        "",
        "| what | holds | seen |",
        "|---|---|---|",
    ]
    return "\n".join(
        [
            *lines,
            *(
                f"| {row.title} | {'yes' if row.holds else 'NO'} | {row.said.replace(chr(10), ' ').replace('|', '/')} |"
                for row in rows
            ),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=proofs.FOLDER / "shm_cuda.md")
    parser.add_argument("--commit")
    parser.add_argument("--parts", default=",".join(DEFAULT), help="parts joined by + run at the same time")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for all parts; the page says what was cut short")
    parser.add_argument("--rows", type=Path, help="run one part, and write its rows into this folder")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if arguments.rows is not None:
        rows = Rows(arguments.rows / f"{parts[0]}.json")
        PARTS[parts[0]](rows)
        rows.write(True)
        return 0
    folder = Path(tempfile.mkdtemp())
    until, found = time.monotonic() + arguments.seconds, []
    program = [sys.executable, __file__, "--rows", str(folder), "--parts"]
    for together in parts:
        began = time.monotonic()
        running = {part: subprocess.Popen([*program, part]) for part in together.split("+")}
        for part, process in running.items():
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.terminate()
            written = folder / f"{part}.json"
            given = json.loads(written.read_text()) if written.exists() else {"rows": [], "whole": False}
            found += [Row(*each) for each in given["rows"]]
            if not given["whole"]:
                found.append(Row(f"the part '{part}'", False, "was cut short after the rows above"))
        print(f"{together}: {time.monotonic() - began:.1f} s", flush=True)
        proofs.write(arguments.output, "shm with CUDA tensors", PROVES, page(found), arguments.commit)
    return 0 if all(row.holds for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
