"""Scenarios for ranks that mpiexec started: `python mpi_ranks.py SCENARIO FOLDER`.

Each rank writes its result to FOLDER/RANK.json.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from launched import SOME, about_the_backend, run_cases, small, training

import ringway as dist
import ringway.backends.several.hierarchical as by_hosts
from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost, UsageError
from ringway.testing.conformance import Setting

LIMIT = timedelta(seconds=60)


def conformance() -> dict[str, Any]:
    """Every case on the world, most on a sub-group without rank 0 and on one of a single rank, and then training.
    All kinds on the world."""
    dist.init_distributed("mpi", timeout=LIMIT, verbose=False)
    size = dist.get_world_size()
    return _on_groups(None, tuple(range(1, size)), (size - 1,), every=1) | training()


def _on_groups(*groups: tuple[int, ...] | None, every: int) -> dict[str, Any]:
    """`every` is for the world: sub-groups run some kinds."""
    findings: list[str] = []
    seconds: dict[str, float] = {}
    size = dist.get_world_size()
    for members in groups:
        setting = Setting("mpi", size, members=members, every=every if members is None else SOME)
        group = None if members is None else dist.new_group(list(members))
        if members is None or dist.get_rank() in members:
            run_cases(setting, group, findings, seconds, report, about_the_backend if members is None else small)
        dist.barrier()
    return {"findings": findings, "cases": len(seconds)}


def hierarchical() -> dict[str, Any]:
    """Every case on the world, and most on two simulated hosts of two ranks each, with MPI between them. Small calls go
    by hosts too, although flat gloo would be as fast: only so do they reach the code of this backend."""
    dist.init_distributed("mpi", timeout=LIMIT, verbose=False)
    found = _on_groups(None, every=SOME)
    by_hosts.host_identity = lambda: f"host {dist.get_rank() // 2}"
    by_hosts._FLAT_UP_TO.clear()
    group = dist.new_group(backend="hierarchical_mpi")
    findings: list[str] = []
    seconds: dict[str, float] = {}
    setting = Setting("hierarchical_mpi", dist.get_world_size(), every=SOME)
    run_cases(setting, group, findings, seconds, report, small)
    made = dist.communicator(group).backend
    parts = [made._backends[part].name for part in ("local", "between", "flat")]
    return {**found, "findings": found["findings"] + findings, "parts": parts, "by hosts": len(seconds)}


def misuse() -> dict[str, Any]:
    """Errors that can be caught and leave other groups usable; asynchronous calls that overlap."""
    import ringway.backends.mpi.buffers as buffers

    dist.init_distributed("mpi", timeout=LIMIT, verbose=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    other = dist.new_group()
    if rank == 0:
        dist.send(torch.ones(3), dst=1)
    elif rank == 1:
        try:
            dist.recv(torch.zeros(5), src=0, group=None)
        except CollectiveMismatch as error:
            found["short message"] = str(error)
    pair = dist.new_group([1, 2])  # which numbers them 0 and 1
    if rank == 1:
        dist.send(torch.ones(3), dst=2, group=pair)
    elif rank == 2:
        try:
            dist.recv(torch.zeros(5), src=1, group=pair)
        except CollectiveMismatch as error:
            found["short message"] = [str(error), error.sides]
    late = dist.new_group()
    dist.communicator(late).set_timeout(1.0)
    if rank != 0:
        try:
            dist.all_reduce(torch.ones(4), group=late)
        except CommTimeout as error:
            found["timeout"] = [str(error), error.waited]
        try:
            dist.all_reduce(torch.ones(4), group=late)
        except CommTimeout as error:
            found["again"] = str(error)
    try:
        dist.send(torch.ones(1), dst=(rank + 1) % size, tag=-1, group=other)
    except UsageError as error:
        found["tag"] = str(error)
    total = torch.ones(1)
    dist.all_reduce(total, group=other)
    found["afterwards"] = total.item()
    if rank == 0:  # makes the collective it missed, so that all ranks can exit normally
        with suppress(CommTimeout):  # or raises because the others have given up
            dist.all_reduce(torch.ones(4), group=late)
    found["overlap"] = overlap(other)
    found["idle"] = idle(other)
    found["mismatch"] = mismatch()
    buffers.MOST = 4
    found["sums in parts"] = sums_in_parts(other)
    found["error between parts"] = [error_between_parts(call) for call in IN_PARTS]
    return found


def mismatch() -> list[Any]:
    """Ranks call different things. The first to arrive is already inside MPI when the others call."""
    rank, group = dist.get_rank(), dist.new_group()
    if rank != 0:
        time.sleep(0.5)
    began = time.monotonic()
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(4), group=group)
        else:
            dist.broadcast(torch.ones(8), 0, group=group)
    except CollectiveMismatch as error:
        return [str(error), time.monotonic() - began]
    return []


def sums_in_parts(group: Any) -> list[list[float]]:
    """Reductions of more elements than MPI can count: ten, where it counts to four."""
    found = []
    for call in (*IN_PARTS, _reduce_scatter):
        tensor = torch.arange(30.0)[: 30 if call is _reduce_scatter else 10]
        found.append(call(tensor, group).tolist())
    return found


def _fast_path(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor


def _general_path(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def _in_background(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
    return tensor


def _to_a_root(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    dist.reduce(tensor, 0, group=group)
    return tensor


def _halves(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    return _fast_path(tensor.to(torch.bfloat16), group)


def _reduce_scatter(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    share = torch.empty(tensor.numel() // dist.get_world_size())
    dist.reduce_scatter_tensor(share, tensor, group=group)
    return share


IN_PARTS = (_fast_path, _general_path, _in_background, _to_a_root, _halves)
"""Reductions that MPI gets in several parts, if it cannot count their elements or would round too often."""


def error_between_parts(call: Callable[[torch.Tensor, Any], torch.Tensor]) -> list[Any]:
    """On rank 1 the second part fails before it starts. What each rank raises, and when."""
    import ringway.backends.mpi.backend as mpi

    group, starts = dist.new_group(), itertools.count()
    dist.barrier(group=group)

    def failing(start: Callable[..., Any]) -> Callable[..., Any]:
        def one(*arguments: Any, **named: Any) -> Any:
            if next(starts) == 1:
                raise LookupError("between two parts")
            return start(*arguments, **named)

        return one

    before = mpi.as_numbers, mpi.MpiBackend._start
    if dist.get_rank() == 1 and call is _fast_path:
        mpi.as_numbers = failing(mpi.as_numbers)
    elif dist.get_rank() == 1:
        mpi.MpiBackend._start = failing(mpi.MpiBackend._start)
    began = time.monotonic()
    try:
        call(torch.ones(10), group)
        said = "no error"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    mpi.as_numbers, mpi.MpiBackend._start = before
    try:
        dist.all_reduce(torch.ones(2), group=group)
        again = "no error"
    except Exception as error:
        again = f"{type(error).__name__}: {error}"
    return [said, took, again]


def idle(group: Any) -> float:
    """The share of a core that a rank uses while it waits two seconds for another."""
    if dist.get_rank() == 0:
        time.sleep(2)
    wall, used = time.monotonic(), time.process_time()
    dist.barrier(group=group)
    waited = time.monotonic() - wall
    came_late = dist.get_rank() == 0 or waited < 1
    return 0.0 if came_late else (time.process_time() - used) / waited


def overlap(group: Any) -> float:
    """The share of an asynchronous all_reduce that is done without a wait: 1 if it overlaps completely."""
    tensor = torch.ones(1 << 20)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    return float(work.is_completed() and bool((tensor == dist.get_world_size()).all()))


def large() -> dict[str, Any]:
    """Messages of more than 2^31 elements: checks both ends of the tensors and a position beyond the limit."""
    dist.init_distributed("mpi", timeout=timedelta(seconds=600), verbose=False)
    rank, count = dist.get_rank(), (1 << 31) + 11
    places = torch.tensor([0, 5, (1 << 31) - 1, (1 << 31) + 3, count - 1])
    tensor = torch.zeros(count, dtype=torch.int8)
    tensor[places] = torch.arange(1, 6, dtype=torch.int8) * (rank + 1)
    dist.broadcast(tensor, 0)
    moved = tensor[places].tolist()
    dist.all_reduce(tensor)
    summed = tensor[places].tolist()
    if rank == 0:
        dist.send(tensor, 1)
    else:
        tensor.zero_()
        dist.recv(tensor, 0)
    return {"broadcast": moved, "all_reduce": summed, "received": tensor[places].tolist()}


def crash() -> dict[str, Any]:
    """One rank fails while the others wait for it."""
    dist.init_distributed("mpi", timeout=LIMIT, verbose=False)
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("this rank has had enough")
    dist.all_reduce(torch.ones(4))
    return {}


def leave() -> dict[str, Any]:
    """One rank calls sys.exit while the others wait for it, which neither Python nor MPI treats as an error."""
    dist.init_distributed("mpi", timeout=timedelta(seconds=200), verbose=False)
    dist.barrier()
    if dist.get_rank() == 1:
        sys.exit(3)
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.recv(torch.ones(4), src=1)
    except PeerLost as error:
        report({"said": str(error), "rank": error.rank})
        dist.barrier(group=dist.new_group([0, 2]))
        raise
    return {}


def torch_only() -> dict[str, Any]:
    """A world size that differs from mpiexec's, and then a program written for torch."""
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    found: dict[str, Any] = {"error": ""}
    try:
        store = c10d.FileStore(str(Path(sys.argv[2]) / f"store{rank}"))
        dist.init_process_group("mpi", store=store, rank=0, world_size=1)
    except dist.errors.BackendUnavailable as error:
        found["error"] = str(error)
    store = c10d.FileStore(str(Path(sys.argv[2]) / "store"))
    c10d.init_process_group("mpi4py", store=store, rank=rank, world_size=size, timeout=LIMIT)
    tensor = torch.ones(3)
    c10d.all_reduce(tensor)
    c10d.destroy_process_group()
    return {**found, "sum": tensor[0].item()}


def alone() -> dict[str, Any]:
    """Started by another MPI's launcher: every process is a world of one."""
    store = c10d.FileStore(str(Path(sys.argv[2]) / "store"))
    import os

    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    try:
        dist.init_process_group("mpi", store=store, rank=rank, world_size=2, timeout=LIMIT)
    except dist.errors.BackendUnavailable as error:
        report({"error": str(error)}, rank)
        os._exit(0)
    raise AssertionError("two MPI worlds of one were taken for one of two")


SCENARIOS = (conformance, hierarchical, misuse, large, crash, leave, torch_only, alone)


def report(found: dict[str, Any], rank: int | None = None) -> None:
    if rank is None:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario = next(function for function in SCENARIOS if function.__name__ == sys.argv[1])
    report(scenario())
