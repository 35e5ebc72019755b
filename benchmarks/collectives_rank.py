"""One rank of one peer of benchmarks/collectives.py, which starts it: `python collectives_rank.py PEER ADDRESS`.

It connects to the run's socket, reports that it is ready, and measures what the run orders until the orders end.
An order is {"op", "bytes", "calls"}; the answer is the seconds that one call took here. If the order says "each", every
call is timed, and the answer is {"mean", "p99"}.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

Action = Callable[[], object]
Prepare = Callable[[str, int], Action]


def serve(peer: str, address: str) -> None:
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link, ExitStack() as ends:
        link.connect(address)
        lines = link.makefile("rw")
        try:
            if "BENCH_SOURCE" in os.environ:
                _use_source(os.environ["BENCH_SOURCE"])
            prepare, barrier = _MAKERS[peer](rank, int(os.environ["BENCH_RANKS"]), ends)
        except Exception as error:  # the run continues without this peer, and reports why
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(json.dumps({"rank": rank, "error": reason}), file=lines, flush=True)
            return
        print(json.dumps({"rank": rank}), file=lines, flush=True)
        _measure(lines, prepare, barrier)


def _use_source(folder: str) -> None:
    """Imports ringway from a checkout. An editable installation would come first, whatever PYTHONPATH says."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
    sys.path.insert(0, folder)
    import ringway._core

    if not str(ringway._core.__file__).startswith(folder):
        raise ImportError(f"{folder} has no built core: run scripts/build_in_place.sh of that checkout")


def _measure(lines: Any, prepare: Prepare, barrier: Action) -> None:
    what: tuple[str, int] | None = None
    action: Action = barrier
    for line in lines:
        order = json.loads(line)
        if what != (order["op"], order["bytes"]):
            action = barrier  # frees the old buffers before new ones are created
            what = (order["op"], order["bytes"])
            action = prepare(*what)
        barrier()
        timed = _each if order.get("each") else _all
        print(json.dumps(timed(action, order["calls"])), file=lines, flush=True)


def _all(action: Action, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - started) / calls


def _each(action: Action, calls: int) -> dict[str, float]:
    at = [time.perf_counter()]
    for _ in range(calls):
        action()
        at.append(time.perf_counter())
    took = sorted(after - before for before, after in itertools.pairwise(at))
    return {"mean": (at[-1] - at[0]) / calls, "p99": took[min(calls - 1, calls * 99 // 100)]}


def _torch_calls(dist: Any, size: int) -> Prepare:
    import torch

    def prepare(op: str, nbytes: int) -> Action:
        count = nbytes // 4
        part = max(1, count // size)
        if op == "barrier":
            return lambda: dist.barrier()
        if op in ("all_reduce", "broadcast"):
            whole = torch.zeros(count)
            if op == "all_reduce":
                return lambda: dist.all_reduce(whole)
            return _rotating(size, lambda root: lambda: dist.broadcast(whole, root))
        if op in ("all_reduce_max", "all_reduce_async"):
            return _general_path(dist, op, torch.zeros(count))
        if op in ("reduce", "send_recv", "round_trip"):
            return _reduce_or_send(dist, op, torch.zeros(count), torch.zeros(count), size)
        own, fitting = torch.zeros(part), torch.zeros(part * size)
        if op == "all_gather_into_tensor":
            return lambda: dist.all_gather_into_tensor(fitting, own)
        if op == "reduce_scatter_tensor":
            return lambda: dist.reduce_scatter_tensor(own, fitting)
        if op == "all_to_all_single":
            other = torch.zeros(part * size)
            return lambda: dist.all_to_all_single(fitting, other)
        return _with_lists(dist, op, own, list(fitting.chunk(size)), size)

    return prepare


def _rotating(size: int, action_of: Callable[[int], Action]) -> Action:
    """Another root in each call. With one root for all, calls would be timed that a root leaves before they end."""
    actions = itertools.cycle([action_of(root) for root in range(size)])
    return lambda: next(actions)()


def _general_path(dist: Any, op: str, whole: Any) -> Action:
    """Calls that are not plain sums, and so not for a fast path."""
    if op == "all_reduce_max":
        return lambda: dist.all_reduce(whole, dist.ReduceOp.MAX)
    return lambda: dist.all_reduce(whole, async_op=True).wait()


def _reduce_or_send(dist: Any, op: str, whole: Any, other: Any, size: int) -> Action:
    if op == "reduce":
        return _rotating(size, lambda root: lambda: dist.reduce(whole, root))
    rank = dist.get_rank()
    left, right = (rank - 1) % size, (rank + 1) % size
    if op == "round_trip":
        return _round_trip(rank, size, lambda peer: dist.send(whole, peer), lambda peer: dist.recv(other, peer))

    def pass_on() -> None:
        sent = dist.isend(whole, right)
        dist.recv(other, left)
        sent.wait()

    return pass_on


def _round_trip(rank: int, size: int, send: Callable[[int], object], recv: Callable[[int], object]) -> Action:
    """An even rank sends to the next one, which answers. The last one of an odd number of ranks has no partner."""
    partner = rank ^ 1
    if partner >= size:
        return lambda: None
    first, second = (send, recv) if rank % 2 == 0 else (recv, send)

    def there_and_back() -> None:
        first(partner)
        second(partner)

    return there_and_back


def _with_lists(dist: Any, op: str, own: Any, parts: list[Any], size: int) -> Action:
    at = [parts if dist.get_rank() == root else None for root in range(size)]
    return {
        "gather": _rotating(size, lambda root: lambda: dist.gather(own, at[root], root)),
        "scatter": _rotating(size, lambda root: lambda: dist.scatter(own, at[root], root)),
        "all_gather": lambda: dist.all_gather(parts, own),
        "reduce_scatter": lambda: dist.reduce_scatter(own, parts),
    }[op]


def _store(size: int) -> Any:
    import torch.distributed as c10d

    return c10d.FileStore(os.environ["BENCH_STORE"], size)


def _of_ringway(backend: str, logged: bool = False) -> Callable[[int, int, ExitStack], tuple[Prepare, Action]]:
    def make(rank: int, size: int, ends: ExitStack) -> tuple[Prepare, Action]:
        import ringway

        ringway.init_process_group(backend, store=_store(size), rank=rank, world_size=size)
        ends.callback(ringway.destroy_process_group)
        if logged:
            ringway.configure(enabled=True, prof_all=True)
        return _torch_calls(ringway, size), ringway.barrier

    return make


def _gloo(rank: int, size: int, ends: ExitStack) -> tuple[Prepare, Action]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=_store(size), rank=rank, world_size=size)
    ends.callback(dist.destroy_process_group)
    return _torch_calls(dist, size), dist.barrier


def _mpi(rank: int, size: int, ends: ExitStack) -> tuple[Prepare, Action]:
    import torch
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.Get_size() != size:
        raise RuntimeError(f"an MPI world of {world.Get_size()} instead of {size}")

    def zeros(count: int) -> Any:
        """A tensor's memory. numpy's own zeros are not touched, so reading them takes no memory bandwidth, and lie in
        huge pages."""
        return torch.zeros(count).numpy()

    def prepare(op: str, nbytes: int) -> Action:
        count = nbytes // 4
        part = max(1, count // size)
        if op == "barrier":
            return lambda: world.Barrier()
        if op in ("all_reduce", "broadcast"):
            whole = zeros(count)
            if op == "all_reduce":
                return lambda: world.Allreduce(MPI.IN_PLACE, whole)
            return _rotating(size, lambda root: lambda: world.Bcast(whole, root))
        own, fitting = zeros(part), zeros(part * size)
        if op == "all_gather_into_tensor":
            return lambda: world.Allgather(own, fitting)
        if op == "reduce_scatter_tensor":
            return lambda: world.Reduce_scatter_block(fitting, own)
        at = [fitting if rank == root else None for root in range(size)]
        other, sent, received = zeros(part * size), zeros(count), zeros(count)
        return {
            "all_to_all_single": lambda: world.Alltoall(other, fitting),
            "all_gather": lambda: world.Allgather(own, fitting),
            "reduce_scatter": lambda: world.Reduce_scatter_block(fitting, own),
            "gather": _rotating(size, lambda root: lambda: world.Gather(own, at[root], root)),
            "scatter": _rotating(size, lambda root: lambda: world.Scatter(at[root], own, root)),
            "reduce": _rotating(
                size, lambda root: lambda: world.Reduce(sent, received if rank == root else None, MPI.SUM, root)
            ),
            "round_trip": _round_trip(rank, size, lambda to: world.Send(sent, to), lambda of: world.Recv(received, of)),
            "send_recv": lambda: world.Sendrecv(sent, (rank + 1) % size, 0, received, (rank - 1) % size, 0),
        }[op]

    return prepare, world.Barrier


def _deepspeed(rank: int, size: int, ends: ExitStack) -> tuple[Prepare, Action]:
    """Its op supports only all_reduce, and finds its peers through LOCAL_SIZE, MASTER_ADDR and MASTER_PORT."""
    import torch
    import torch.distributed as dist
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    dist.init_process_group("gloo", store=_store(size), rank=rank, world_size=size)
    ends.callback(dist.destroy_process_group)
    ShareMemCommBuilder().load(verbose=False).initialize(size, rank)
    dist.barrier()  # a rank's flags are set only once it has finished `initialize`
    reduce = torch.ops.deepspeed.inference_all_reduce_
    probe = torch.ones(3)
    reduce(probe)
    if probe.tolist() != [float(size)] * 3:
        raise RuntimeError(f"the sum of {size} ones came out as {probe.tolist()}")

    def prepare(op: str, nbytes: int) -> Action:
        tensor = torch.zeros(nbytes // 4)
        return lambda: reduce(tensor)

    return prepare, dist.barrier


def _copy(rank: int, size: int, ends: ExitStack) -> tuple[Prepare, Action]:
    import torch

    torch.set_num_threads(1)

    def prepare(op: str, nbytes: int) -> Action:
        source, target = torch.zeros(nbytes // 4), torch.ones(nbytes // 4)
        return lambda: target.copy_(source)

    return prepare, lambda: None


_MAKERS: dict[str, Callable[[int, int, ExitStack], tuple[Prepare, Action]]] = {
    "ringway": _of_ringway("shm"),
    "ringway-gloo": _of_ringway("gloo"),
    "ringway-logged": _of_ringway("shm", logged=True),
    "gloo": _gloo,
    "mpich": _mpi,
    "openmpi": _mpi,
    "deepspeed": _deepspeed,
    "ccl": _of_ringway("ccl"),
    "copy": _copy,
}


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
