"""What ranks of an nccl group do for the proofs: two or four ranks on one GPU (NCCL 2.30 or later)."""

from __future__ import annotations

import gc
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from cuda_ranks import check_all
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringway.errors import PeerLost, RingwayError
from ringway.observe.report import figures
from ringway.observe.report.events import read as read_trace
from ringway.testing import RankContext

Checked = tuple[bool, str]


def join(context: RankContext, seconds: float = 60.0, **more: Any) -> Any:
    """ringway, with a world of nccl that is connected."""
    torch.cuda.set_device(0)
    dist = context.start("nccl", timeout=timedelta(seconds=seconds), group_name=str(time.monotonic_ns()), **more)
    warm = torch.ones(1024, device="cuda")
    dist.all_reduce(warm)
    torch.cuda.synchronize()
    assert warm[0].item() == context.world_size
    return dist


def torchs_group() -> Any:
    """torch's own nccl group of all ranks."""
    group = c10d.new_group(backend="nccl", timeout=timedelta(seconds=120))
    c10d.all_reduce(torch.ones(4, device="cuda"), group=group)
    torch.cuda.synchronize()
    return group


def every_op(context: RankContext) -> Checked:
    join(context)
    # A ring in which every rank sends before it receives: on NCCL that needs a batch.
    checks, wrong = check_all(context.rank, context.world_size, without=("send",))
    return not wrong, f"{checks} checks, wrong: {wrong[:5]}"


# Training


class Block(torch.nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.inward, self.outward = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = [
            part.view(batch, length, 8, width // 8).transpose(1, 2) for part in self.inward(self.before(x)).chunk(3, -1)
        ]
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.outward(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))


def transformer(width: int = 256, layers: int = 4) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Block(width) for _ in range(layers))).cuda()


def wrapped(how: str, group: Any) -> tuple[torch.nn.Module, Any]:
    """A transformer that trains on the group, and its optimizer."""
    model = transformer()
    if how == "DDP":
        model = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cuda")
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    model(batch).square().mean().backward()
    optimizer.step()


def same_bits(context: RankContext, how: str) -> Checked:
    join(context)
    both = {"ringway": c10d.group.WORLD, "torch": torchs_group()}
    trained = {}
    for name, group in both.items():
        model, optimizer = wrapped(how, group)
        generator = torch.Generator("cuda").manual_seed(context.rank)
        for _ in range(5):
            step(model, optimizer, torch.randn(4, 32, 256, device="cuda", generator=generator))
        torch.cuda.synchronize()
        trained[name] = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    equal = [torch.equal(a, b) for a, b in zip(trained["ringway"], trained["torch"], strict=True)]
    return all(equal), f"{sum(equal)} of {len(equal)} parameters have the same bits after 5 steps"


class Ratio(NamedTuple):
    """Of two medians, with its interval (95 %)."""

    middle: float
    low: float
    high: float


def ratio(ours: list[float], own: list[float]) -> Ratio:
    low, high = interval(ours, own)
    return Ratio(statistics.median(ours) / statistics.median(own), low, high)


def step_times(context: RankContext, how: str, logged: bool, seconds: float) -> tuple[Ratio, Ratio, float, int]:
    """The time of a step on ringway's group divided by that on torch's; the same for two groups of torch's, which shows
    what else tells models apart; torch's milliseconds; and the number of steps of each. They take turns, step by step,
    in random order."""
    dist = join(context)
    groups = {"torch": torchs_group(), "ringway": c10d.group.WORLD, "torch again": torchs_group()}
    sides = {name: wrapped(how, group) for name, group in groups.items()}
    batch = torch.randn(2, 16, 256, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = Random(7)  # the same on every rank

    def take_turns(count: int) -> None:
        for _ in range(count):
            for name in order.sample(list(sides), len(sides)):
                torch.cuda.synchronize()
                began = time.perf_counter()
                step(*sides[name], batch)
                torch.cuda.synchronize()
                times[name].append(time.perf_counter() - began)

    gc.collect()
    gc.disable()
    with dist.trace(os.devnull) if logged else nullcontext():
        if logged:
            dist.configure(enabled=True)
        take_turns(20)
        fitting = torch.tensor([int(seconds / sum(taken[-1] for taken in times.values()))], device="cuda")
        c10d.broadcast(fitting, 0)  # the ranks must make the same number of steps
        for taken in times.values():
            taken.clear()
        take_turns(min(max(int(fitting.item()), 50), 4000))
    gc.enable()
    own, again = times["torch"], times["torch again"]
    both = [(a + b) / 2 for a, b in zip(own, again, strict=True)]
    return ratio(times["ringway"], both), ratio(again, own), 1e3 * statistics.median(both), len(own)


def interval(ours: list[float], own: list[float]) -> tuple[float, float]:
    """Of the ratio of the medians, 95 %, by drawing the rounds again."""
    random, rounds = Random(1), range(len(own))
    ratios = []
    for _ in range(200):
        drawn = random.choices(rounds, k=len(own))
        ratios.append(statistics.median([ours[i] for i in drawn]) / statistics.median([own[i] for i in drawn]))
    ratios.sort()
    return ratios[5], ratios[194]


# Costs of a call


def costs(context: RankContext, rounds: int = 60) -> dict[str, dict[str, tuple[float, float, float]]]:
    """How long a call of 4 KiB holds its caller, in turns: microseconds on torch's own group, and the ratios of
    ringway's function and of torch's function on ringway's group, each with its interval (95 %)."""
    dist = join(context)
    own = torchs_group()
    size, other = context.world_size, 1 - context.rank
    tensor, whole, copy = (torch.zeros(1024 * n, device="cuda") for n in (1, size, size))
    calls: dict[str, Callable[[Any, Any, bool], Any]] = {
        "all_reduce": lambda of, group, later: of.all_reduce(tensor, group=group, async_op=later),
        "all_gather_into_tensor": lambda of, group, later: of.all_gather_into_tensor(
            whole, tensor, group=group, async_op=later
        ),
        "reduce_scatter_tensor": lambda of, group, later: of.reduce_scatter_tensor(
            tensor, whole, group=group, async_op=later
        ),
        "all_to_all_single": lambda of, group, later: of.all_to_all_single(whole, copy, group=group, async_op=later),
        "broadcast": lambda of, group, later: of.broadcast(tensor, 0, group=group, async_op=later),
    }
    if size == 2:
        calls["send/recv"] = lambda of, group, later: (
            (of.isend if later else of.send)(tensor, other, group)
            if context.rank == 0
            else (of.irecv if later else of.recv)(tensor, other, group)
        )
    sides = {"torch": (c10d, own), "ringway": (dist, None), "bridge": (c10d, None)}

    def run(name: str, side: str, later: bool) -> None:
        work = calls[name](*sides[side], later)
        if later:
            work.wait()

    times: dict[tuple[str, str, bool], list[float]] = {
        (name, side, later): [] for name in calls for later in (False, True) for side in sides
    }
    for kind in times:
        run(*kind)
        torch.cuda.synchronize()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for kind, measured in times.items():
            block = []
            for _ in range(10):
                began = time.perf_counter()
                run(*kind)
                block.append(time.perf_counter() - began)
            torch.cuda.synchronize()
            measured.append(statistics.median(block))
    gc.enable()
    found = {}
    for name in calls:
        for later in (False, True):
            own_times = times[name, "torch", later]
            middle = statistics.median(own_times)
            row = {"torch": (1e6 * middle, 0.0, 0.0)}
            for side in ("ringway", "bridge"):
                ours = times[name, side, later]
                row[side] = ratio(ours, own_times)
            found[name + (", asynchronous" if later else "")] = row
    return found


def settling(context: RankContext) -> tuple[float, float, float]:
    """Microseconds: settled() with nothing in flight, an all_reduce and settled(), an all_reduce and synchronize()."""
    dist = join(context)
    tensor = torch.zeros(1024, device="cuda")

    def median(action: Callable[[], None]) -> float:
        times = []
        for _ in range(200):
            began = time.perf_counter()
            action()
            times.append(time.perf_counter() - began)
        return 1e6 * statistics.median(times)

    def then(last: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            dist.all_reduce(tensor)
            last()

        return both

    return median(dist.settled), median(then(dist.settled)), median(then(torch.cuda.synchronize))


def device_times(context: RankContext) -> Checked:
    """The times of logger, recorder and trace are the device's: those of events around the call, although the host was
    done long before. The trace names the stream, and so does the report."""
    dist = join(context)
    dist.configure(enabled=True)
    source = torch.ones(64 << 20, device="cuda")
    whole = torch.empty(context.world_size * source.numel(), device="cuda")
    said, fine = [], True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(context.store.get("trace").decode() if context.rank else folder) / "trace.json"
        if context.rank == 0:
            context.store.set("trace", folder)
        with dist.trace(path):
            for later in (False, True):
                for _ in range(3):
                    torch.cuda.synchronize()
                    c10d.barrier()
                    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    torch.cuda._sleep(100_000_000)
                    began = time.monotonic_ns()
                    first.record()
                    work = dist.all_gather_into_tensor(whole, source, async_op=later)
                    if work is not None:
                        work.wait()
                    last.record()
                    issued = time.monotonic_ns() - began
                    torch.cuda.synchronize()
                    time.sleep(0.05)
                events = first.elapsed_time(last)
                call = next(one for one in reversed(dist.recent_calls(8)) if one.op == "all_gather_into_tensor")
                recorded = 1e3 * (call.duration or 0.0)
                fine &= abs(recorded - events) < 0.1 * events + 0.1 and issued < 20e6
                how = "asynchronous" if later else "synchronous"
                said.append(
                    f"{how}: events {events:.3f} ms, recorded {recorded:.3f} ms, host done after {issued / 1e6:.2f} ms"
                )
        if context.rank == 0:
            events_of = read_trace(path).calls
            gathered = [one for one in events_of if one.op == "all_gather_into_tensor" and one.rank == 0]
            table = figures.streams(events_of)
            besides = sorted({one.beside for one in gathered})
            fine &= besides == [False, True] and all(one.stream for one in gathered)
            fine &= {row[4] for row in table} == {False, True}
            said.append(
                f"trace: {len(gathered)} gathers on {len({one.stream for one in gathered})} streams; report {table}"
            )
    dist.configure(enabled=False)
    return fine, "; ".join(said)


# Graphs, compilation, faults


def graphs(context: RankContext) -> Checked:
    """A captured all_reduce, replayed, with calls outside the graph in between."""
    dist = join(context)
    tensor = torch.ones(1 << 16, device="cuda")
    dist.all_reduce(torch.ones(4, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.mul_(2.0)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    for _ in range(3):
        graph.replay()
        dist.all_reduce(torch.ones(4, device="cuda"))
    dist.settled()
    reached = tensor[0].item()
    del graph
    dist.destroy_process_group()
    return reached == (2.0 * context.world_size**2) ** 3, f"captured twice, replayed three times: {reached:g}"


def compiled(context: RankContext) -> Checked:
    """A compiled function with a collective in it, and a compiled DDP model."""
    dist = join(context)

    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled + 1

    got = torch.compile(scaled)(torch.ones(256, device="cuda"))[0].item()
    losses = []
    for compile_it in (False, True):
        torch.manual_seed(3)
        model: Any = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), process_group=c10d.group.WORLD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        forward = torch.compile(model) if compile_it else model
        batch = torch.randn(8, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(context.rank))
        for _ in range(3):
            optimizer.zero_grad()
            loss = forward(batch).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    fine = got == 2 * context.world_size + 1 and abs(losses[0] - losses[1]) < 1e-5
    return fine, f"all_reduce in a compiled function: {got:g}; DDP's loss {losses[1]:.6f}, not compiled {losses[0]:.6f}"


def train_on(dist: Any, store: Any, ranks: list[int], rank: int, name: str) -> float:
    """The ranks that are left make a new world and train. Returns the sum of the ranks' ones."""
    dist.destroy_process_group()
    survivors = c10d.PrefixStore(name, store)
    dist.init_process_group("nccl", store=survivors, rank=ranks.index(rank), world_size=len(ranks))
    model, optimizer = wrapped("DDP", c10d.group.WORLD)
    for _ in range(3):
        step(model, optimizer, torch.randn(2, 16, 256, device="cuda"))
    total = torch.ones(8, device="cuda")
    dist.all_reduce(total)
    dist.settled()
    return total[0].item()


def mesh_with_a_death(context: RankContext) -> Any:
    """A 2 x 2 mesh whose last rank is killed while each rank has calls in flight on its row and its column."""
    dist = join(context)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("row", "column"))
    groups = {name: mesh.get_group(name) for name in ("row", "column")}
    tensor = torch.ones(4096, device="cuda")
    for group in groups.values():
        dist.all_reduce(tensor, group=group)
    dist.settled()
    dist.barrier()
    if context.rank == 3:
        context.store.set("died", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    began = float(context.store.get("died"))
    said = ""
    try:
        while time.monotonic() - began < 30:
            for group in groups.values():
                if 3 in c10d.get_process_group_ranks(group):
                    dist.all_reduce(tensor, group=group)
            dist.all_reduce(tensor)
            dist.settled()
    except PeerLost as error:
        said = str(error)
    took = time.monotonic() - began
    time.sleep(1.0)
    faults = {
        name: dist.communicator(group).fault is not None
        for name, group in {**groups, "world": c10d.group.WORLD}.items()
    }
    expected = {name: 3 in c10d.get_process_group_ranks(group) for name, group in groups.items()} | {"world": True}
    context.store.set(f"saw {context.rank}", "1")
    context.store.wait([f"saw {rank}" for rank in range(3)])
    total = train_on(dist, context.store, [0, 1, 2], context.rank, "after")
    return "rank 3" in said and faults == expected and total == 3.0, took, faults


def alive_after_a_fault(context: RankContext) -> Any:
    """Rank 1 is killed. Rank 0 must still be there when torch's monitor would have ended it, and train."""
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = "10"
    dist = join(context)
    tensor = torch.ones(4096, device="cuda")
    if context.rank == 1:
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    said = ""
    try:
        for _ in range(10_000):
            dist.all_reduce(tensor)
            dist.settled()
    except RingwayError as error:
        said = type(error).__name__
    time.sleep(60)
    return said, train_on(dist, c10d.HashStore(), [0], 0, "alone")
