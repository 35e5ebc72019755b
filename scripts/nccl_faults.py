"""What happens when ranks of an nccl group fail: two ranks on one GPU, with a report for docs/proofs/nccl_faults.md.

NCCL refuses two ranks on one GPU before 2.30. From then on NCCL_MULTI_RANK_GPU_ENABLE=1 allows it; LD_PRELOAD puts a
newer NCCL under an older torch:

    LD_PRELOAD=libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 PYTHONPATH=src python scripts/nccl_faults.py --rounds 20
"""

from __future__ import annotations

import argparse
import atexit
import os
import platform
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import proofs
import torch

from ringway.errors import RingwayError
from ringway.testing import RankContext, RankPool

sys.path.insert(0, str(proofs.ROOT / "tests" / "groups"))
import rank_reconfigure

PROVES = ("src/ringway/backends/nccl", "src/ringway/groups", "src/ringway/observe/stall")
LIMIT = 2.5
"""Seconds until a call is overdue."""
SURVIVORS = [("1", (0, 2, 3.0)), ("1", (1, 2, 3.0))]
"""What the ranks that live return after rank 1 has died."""
MISMATCHES = ("op", "size", "dtype", "root")
_AT_ONCE = 10


def _join(context: RankContext) -> Any:
    torch.cuda.set_device(0)
    dist = context.start("nccl", timeout=timedelta(seconds=LIMIT), group_name=str(time.monotonic_ns()))
    warm = torch.ones(1024, device="cuda")
    dist.all_reduce(warm)
    torch.cuda.synchronize()
    assert warm[0].item() == context.world_size
    return dist


def _told(dist: Any, began: float, action: Callable[[], Any]) -> tuple[str, str, float]:
    """The error that `action` and what follows raises, and after how long."""
    try:
        action()
        dist.settled()
        return "nothing", "", time.monotonic() - began
    except RingwayError as error:
        return type(error).__name__, str(error)[:300], time.monotonic() - began


def _alive_after(dist: Any, kept: torch.Tensor) -> None:
    """The CUDA context works, and memory that nothing behind the aborted call writes is intact."""
    torch.cuda.synchronize()
    assert kept.eq(7).all()
    assert torch.ones(8, device="cuda").sum().item() == 8
    dist.destroy_process_group()


def _go_on_alone(dist: Any) -> None:
    survivors = torch.ones(1024, device="cuda")
    dist.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    dist.all_reduce(survivors)
    dist.settled()
    dist.destroy_process_group()


def mismatch(context: RankContext, kind: str) -> Any:
    dist = _join(context)
    kept, tensor = torch.full((1 << 20,), 7.0, device="cuda"), torch.ones(4096, device="cuda")
    began = time.monotonic()
    first = context.rank == 0
    calls: dict[str, Callable[[], Any]] = {
        "op": lambda: dist.all_reduce(tensor) if first else dist.broadcast(tensor, 0),
        "size": lambda: dist.all_reduce(tensor if first else tensor[:100].clone()),
        "dtype": lambda: dist.all_reduce(tensor if first else tensor.double()),
        "root": lambda: dist.broadcast(tensor, 0 if first else 1),
    }

    def call_and_go_on() -> None:
        calls[kind]()
        if kind == "root":  # a root may have sent all before the other rank came: it is told at its next call
            time.sleep(1.0)
            dist.all_reduce(tensor)

    said = _told(dist, began, call_and_go_on)
    _alive_after(dist, kept)
    return said


def missing_call(context: RankContext) -> Any:
    dist = _join(context)
    kept, tensor = torch.full((1 << 20,), 7.0, device="cuda"), torch.ones(4096, device="cuda")
    began = time.monotonic()
    if context.rank == 0:
        said = _told(dist, began, lambda: dist.all_reduce(tensor))
    else:
        time.sleep(LIMIT + 3)
        said = ("absent", "", 0.0)
    _alive_after(dist, kept)
    return said


def victim(context: RankContext, how: str) -> Any:
    """Rank 1 ends, or stops, while rank 0 is in a training loop."""
    dist = _join(context)
    kept, tensor = torch.full((1 << 20,), 7.0, device="cuda"), torch.ones(4096, device="cuda")
    for _ in range(5):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    context.store.set(f"ready{context.rank}", "1")
    context.store.wait(["ready0", "ready1"])
    if context.rank == 1:
        context.store.set("time", str(time.monotonic()))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exception":  # as the interpreter does at the end of a program that raised
            sys.last_value = KeyError("the program's own error")
            atexit._run_exitfuncs()
            os._exit(1)
        else:
            context.store.set("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return ("resumed", "", 0.0)
    began = float(context.store.get("time"))

    def train() -> None:
        for _ in range(10_000):
            dist.all_reduce(tensor)
            dist.settled()

    said = _told(dist, began, train)
    if how == "stop":
        os.kill(int(context.store.get("pid")), signal.SIGCONT)
    _alive_after(dist, kept)
    _go_on_alone(dist)
    return said


def dies_while_connecting(context: RankContext) -> Any:
    """Rank 1 is killed before, during or soon after the first call, in which NCCL makes its communicators."""
    torch.cuda.set_device(0)
    dist = context.start("nccl", timeout=timedelta(seconds=20), group_name=str(time.monotonic_ns()))
    kept, tensor = torch.full((1 << 20,), 7.0, device="cuda"), torch.ones(4096, device="cuda")
    torch.cuda.synchronize()
    context.store.set(f"ready{context.rank}", "1")
    context.store.wait(["ready0", "ready1"])
    delay = random.choice([0.0, random.uniform(0.0, 1.0)])
    if context.rank == 1:
        context.store.set("time", str(time.monotonic() + delay))
        if delay:
            threading.Timer(delay, os.kill, [os.getpid(), signal.SIGKILL]).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for _ in range(10_000):
            dist.all_reduce(tensor)
            dist.settled()

    said = _told(dist, float(context.store.get("time")), train)
    _alive_after(dist, kept)
    _go_on_alone(dist)
    return said


def torchs_options(context: RankContext) -> Any:
    """What the user sets for torch's group reaches it, and the group works."""
    torch.cuda.set_device(0)
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 2
    dist = context.start("nccl", timeout=timedelta(seconds=20), pg_options=options, group_name=str(time.monotonic_ns()))
    sub = dist.new_group([0, 1], pg_options=options)
    tensor = torch.ones(16, device="cuda")
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=sub)
    dist.settled()
    inner = [group._get_backend(torch.device("cuda")).options for group in (torch.distributed.group.WORLD, sub)]
    found = tensor[0].item(), [(each.is_high_priority_stream, each.config.max_ctas) for each in inner]
    dist.destroy_process_group()
    return found


def memory_pool(context: RankContext) -> Any:
    """Tensors in memory that NCCL has registered, and has allocated if this torch was built with an NCCL that can."""
    dist = _join(context)
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cuda"))
    try:
        pool = torch.cuda.MemPool(backend.mem_allocator)
    except RuntimeError:  # torch's own groups raise it too
        pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(1 << 20, device="cuda")
    backend.register_mem_pool(pool)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.settled()
    value = tensor[-1].item()
    backend.deregister_mem_pool(pool)
    dist.destroy_process_group()
    return value


def training_is_recorded(context: RankContext) -> Any:
    dist = _join(context)
    before = len(dist.recent_calls(4096))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device="cuda"))
    for _ in range(3):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    time.sleep(0.05)
    seen = dist.recent_calls(4096)[before:]
    states = {call.state for call in seen}
    ops = [call.op for call in seen]
    return len(seen), sorted(set(ops)), sorted(states), type(torch.distributed.group.WORLD).__name__


def messages_in_a_batch(context: RankContext) -> Any:
    """Each rank receives before it sends, through ringway and through torch."""
    dist = _join(context)
    other = 1 - context.rank
    found = []
    for of in (dist, torch.distributed):
        got, sent = torch.zeros(1024, device="cuda"), torch.full((1024,), float(context.rank), device="cuda")
        operations = [of.P2POp(of.irecv, got, other), of.P2POp(of.isend, sent, other)]
        for work in of.batch_isend_irecv(operations):
            work.wait()
        dist.settled()
        found.append(got[0].item() == other)
    return found


def first_calls(context: RankContext, backend: str) -> Any:
    """Each kind of call as the first one of its group, in which NCCL connects; once on a stream of the program's."""
    torch.cuda.set_device(0)
    dist = context.start(backend, timeout=timedelta(seconds=30), group_name=str(time.monotonic_ns()))
    rank, other = context.rank, 1 - context.rank
    found = []

    def message(group: Any) -> float:
        tensor = torch.full((8,), 5.0 if rank == 0 else 0.0, device="cuda")
        dist.send(tensor, 1, group=group) if rank == 0 else dist.recv(tensor, 0, group=group)
        return tensor[0].item()

    def batch(group: Any) -> float:
        tensor = torch.zeros(8, device="cuda")
        mine = torch.full((8,), 5.0, device="cuda")
        operations = [dist.P2POp(dist.irecv, tensor, other, group), dist.P2POp(dist.isend, mine, other, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return tensor[0].item()

    def gather(group: Any) -> float:
        with torch.inference_mode():
            parts = [torch.zeros(8, device="cuda") for _ in range(2)]
            dist.all_gather(parts, torch.full((8,), 2.5, device="cuda"), group=group)
            return float(parts[0][0] + parts[1][0])

    def barrier(group: Any) -> float:
        dist.barrier(group=group)
        return 5.0

    def on_a_stream(group: Any) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.zeros(1 << 24, device="cuda")
            for _ in range(50):
                tensor += 0.05
            work = dist.all_reduce(tensor, group=group, async_op=True)
            work.wait()
            return round(tensor[-1].item(), 3)

    for call in (message, batch, gather, barrier, on_a_stream):
        found.append(call(dist.new_group([0, 1])))
    on_cpu = torch.ones(1)
    dist.all_reduce(on_cpu)
    dist.settled()
    dist.destroy_process_group()
    return found, on_cpu.item()


def sub_groups(context: RankContext) -> Any:
    """new_group with a non-member, and split_group, on a world that is bound to its device."""
    torch.cuda.set_device(0)
    dist = context.start(
        "nccl", timeout=timedelta(seconds=20), device_id=torch.device("cuda", 0), group_name=str(time.monotonic_ns())
    )
    alone = dist.new_group([0])
    both = dist.new_group([0, 1])
    tensor = torch.ones(16, device="cuda")
    dist.all_reduce(tensor, group=both)
    split = torch.distributed.split_group(split_ranks=[[0, 1]])
    dist.all_reduce(tensor, group=split)
    if context.rank == 0:
        dist.all_reduce(tensor, group=alone)
    dist.settled()
    value = tensor[0].item()
    dist.destroy_process_group()
    return value, type(split).__name__, str(both.bound_device_id)


def coalesced(context: RankContext) -> Any:
    dist = _join(context)
    several = [torch.ones(8, device="cuda") for _ in range(3)]
    with torch.distributed._coalescing_manager(device=torch.device("cuda", 0), async_ops=True) as block:
        for one in several:
            torch.distributed.all_reduce(one)
    block.wait()
    outputs = [torch.zeros(16, device="cuda") for _ in range(2)]
    inputs = [torch.full((8,), float(context.rank), device="cuda") for _ in range(2)]
    with torch.distributed._coalescing_manager():
        for output, part in zip(outputs, inputs, strict=True):
            torch.distributed.all_gather_into_tensor(output, part)
    dist.settled()
    torch.cuda.synchronize()
    return [one[0].item() for one in several], [output[[0, 8]].tolist() for output in outputs]


def reconfigured(context: RankContext, how: str) -> Any:
    torch.cuda.set_device(0)
    return getattr(rank_reconfigure, how)(context, "nccl", "cuda")


class Row(NamedTuple):
    title: str
    holds: bool
    values: list[Any]
    """Of each rank."""


class Check(NamedTuple):
    title: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    fine: Callable[[list[Any]], bool]
    ranks: int = 2


def _rounds(rounds: int, check: Check, until: float, found: Callable[[Row], None]) -> None:
    with RankPool(check.ranks) as pool:
        for _ in range(rounds):
            if time.monotonic() < until:
                found(_run(pool, check))


def _run(pool: RankPool, check: Check) -> Row:
    outcomes = pool.try_run(check.function, *check.arguments, world_size=check.ranks, timeout=40, grace=12)
    values = [outcome.value if outcome.ok else str(outcome)[-1500:] for outcome in outcomes]
    try:
        holds = check.fine(values)
    except Exception as error:
        holds, values = False, [*values, repr(error)]
    print(("yes" if holds else "NO "), check.title, values, flush=True)
    if not holds:
        print(*(outcome.output[-3000:] for outcome in outcomes), sep="\n", flush=True)
    return Row(check.title, holds, values)


def _named(kind: str, seconds: float, *names: str) -> Callable[[list[Any]], bool]:
    return lambda values: values[0][0] == kind and values[0][2] < seconds and all(n in values[0][1] for n in names)


def _both(kind: str) -> Callable[[list[Any]], bool]:
    return lambda values: all(value[0] == kind for value in values)


ONCE = (
    Check("DDP's calls are recorded", training_is_recorded, (), lambda v: v[0][0] >= 4 and v[0][3] == "Bridge"),
    Check("messages in a batch", messages_in_a_batch, (), lambda v: v == [[True, True]] * 2),
    Check("coalesced blocks", coalesced, (), lambda v: v[0][0] == [2.0] * 3 and v[0][1] == [[0.0, 1.0]] * 2),
    Check("a group's members change", reconfigured, ("changes",), lambda v: v == list(rank_reconfigure.CHANGES), 3),
    Check("a group goes on without a dead rank", reconfigured, ("survivors",), lambda v: v[::2] == SURVIVORS, 3),
    *(
        Check(f"first calls on {backend}", first_calls, (backend,), lambda v: v == [([5.0] * 5, 2.0)] * 2)
        for backend in ("nccl", "cpu:shm,cuda:nccl")
    ),
    Check("torch's options", torchs_options, (), lambda v: v == [(4.0, [(True, 2)] * 2)] * 2),
    Check("memory that NCCL registered", memory_pool, (), lambda v: v == [8.0, 8.0]),
    Check("sub-groups of a bound world", sub_groups, (), lambda v: v[0][0] == 4.0 and v[0][1] == "Bridge"),
)
FAULTS = (
    Check("SIGSTOP", victim, ("stop",), _named("CommTimeout", LIMIT + 4, "rank 1")),
    Check("a missing call", missing_call, (), _named("CommTimeout", LIMIT + 3, "rank 1")),
    Check("kill -9", victim, ("kill",), _named("PeerLost", 1.0, "rank 1")),
    Check("an exception", victim, ("exception",), _named("PeerLost", 3.0, "rank 1")),
    Check("kill -9 while communicators are made", dies_while_connecting, (), _named("PeerLost", 6.0, "rank 1")),
    *(Check(f"a mismatch of {kind}", mismatch, (kind,), _both("CollectiveMismatch")) for kind in MISMATCHES),
)
"""The longest first."""
SLOW = ("SIGSTOP", "a missing call")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=proofs.FOLDER / "nccl_faults.md")
    parser.add_argument("--commit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9, help="no round starts after these")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    # The slow ones in two halves, at the same time.
    halves = [check for check in FAULTS for _ in range(2 if check.title in SLOW else 1)]
    plan = [(arguments.rounds // 2 if check.title in SLOW else arguments.rounds, check) for check in halves]
    plan += [(1, check) for check in ONCE]
    # Each in processes of its own, which form groups again and again. A rank that died is replaced from a fork server.
    rows: list[Row] = []
    writing = threading.Lock()
    chosen = [(rounds, check) for rounds, check in plan if arguments.only in check.title]
    titles = [check.title for _, check in chosen]

    def found(row: Row) -> None:
        """Writes the page with what there is: the run may be broken off."""
        with writing:
            rows.append(row)
            rows.sort(key=lambda each: titles.index(each.title))
            title = "Faults of nccl groups, two ranks on one GPU"
            proofs.write(arguments.output, title, PROVES, _page(rows), arguments.commit)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(lambda given: _rounds(*given, until, found), chosen))
    holding = sum(row.holds for row in rows)
    print(f"{holding} of {len(rows)} hold")
    return 0 if holding == len(rows) else 1


def _page(rows: list[Row]) -> str:
    lines = [
        "    LD_PRELOAD=libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 PYTHONPATH=src python scripts/nccl_faults.py",
        "",
        f"{torch.cuda.get_device_name(0)}, {platform.machine()}, Python {platform.python_version()},"
        f" torch {torch.__version__}, NCCL {proofs.loaded_nccl()}.",
        "",
        "| what | holds | seconds until the error, least to most |",
        "|---|---|---|",
    ]
    for title in dict.fromkeys(row.title for row in rows):
        alike = [row for row in rows if row.title == title]
        told = sorted(value[2] for row in alike for value in row.values if isinstance(value, tuple) and len(value) == 3)
        told = [seconds for seconds in told if isinstance(seconds, float) and seconds > 0]
        held, range_of = sum(row.holds for row in alike), f"{told[0]:.2f} to {told[-1]:.2f}" if told else ""
        lines.append(f"| {title} | {held} of {len(alike)} | {range_of} |")
    lines += [
        "",
        "A round holds if each survivor raised the named error in time, its process and its CUDA context lived, and",
        "memory that nothing behind the call writes was intact; after a kill, an exception and a stop, the survivor",
        f"also made a new group of its own and used it. {_AT_ONCE} checks ran at the same time on the one GPU, whose",
        "kernels take turns.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
