"""nccl on one GPU, with a report for docs/proofs/nccl.md.

NCCL refuses two ranks on one GPU. So NCCL, and what ringway does around it (routing, objects, barriers, teardown), is
tested at world size 1. Several ranks share the GPU through gloo with CUDA tensors. With --mpi WHEELS, a folder with the
wheels of mpich and mpi4py, the mpi backend is tested on CUDA tensors too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import proofs
import torch
from cuda_ranks import check_all, train

from ringway.call import ALL_GATHER_SINGLE, ALL_REDUCE, ALL_TO_ALL_SINGLE, BROADCAST, REDUCE_SCATTER_SINGLE
from ringway.testing import RankContext, RankPool
from ringway.testing.conformance import Report, Setting, run_setting

PROVES = (
    "src/ringway/backends/nccl",
    "src/ringway/backends/device_watch.py",
    "src/ringway/backends/torch",
    "src/ringway/backends/mpi/backend.py",
)
WAITS = """Not tested, because it needs two GPUs: NCCL between two ranks (bandwidth, and a peer that dies in the middle
of a collective), a timeout inside a running NCCL kernel under blocking wait, and the abort of a communicator that hangs
there."""

Checked = tuple[bool, str]


def objects_open_no_context(context: RankContext) -> Checked:
    """In a process that has not touched the GPU, object collectives on an nccl group leave it untouched."""
    dist = context.start("nccl")
    before = torch.cuda.is_initialized()
    gathered: list[Any] = [None]
    dist.all_gather_object(gathered, {"rank": context.rank})
    objects = [b"x" * 100_000]
    dist.broadcast_object_list(objects, 0)
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    total = torch.ones(3)
    dist.all_reduce(total)
    after = torch.cuda.is_initialized()
    return (not before and not after and gathered == [{"rank": 0}]), f"CUDA initialized before {before}, after {after}"


def every_op(context: RankContext) -> Checked:
    context.start("nccl")
    checks, wrong = check_all(context.rank, context.world_size)
    return not wrong, f"{checks} checks, wrong: {wrong[:5]}"


def completion_from_the_device(context: RankContext) -> Checked:
    """A call is complete when the device has finished it, not when it was issued: for the recorder alone, which polls
    rarely, with the comms logger on, and with a listener."""
    dist = context.start("nccl")
    from ringway.groups.listener import Listener
    from ringway.groups.world import world

    class Watcher(Listener):
        sees_calls = True

    torch.cuda.set_device(0)
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    said, fine = [], True
    watcher = Watcher()
    for who, lateness in (("recorder", 0.02), ("logger", 0.005), ("listener", 0.005)):
        if who == "logger":
            dist.configure(enabled=True)
        elif who == "listener":
            dist.configure(enabled=False)
            world.listen(watcher)
        torch.cuda._sleep(600_000_000)
        began = time.perf_counter()
        dist.all_reduce(tensor)
        issued_in = time.perf_counter() - began
        torch.cuda.synchronize()
        busy = time.perf_counter() - began
        deadline = time.monotonic() + 5
        while dist.recent_calls(1)[0].duration is None and time.monotonic() < deadline:
            time.sleep(0.001)
        recorded = dist.recent_calls(1)[0].duration or 0.0
        fine &= issued_in < busy / 2 and abs(recorded - busy) < lateness
        times = f"issued in {1e3 * issued_in:.2f} ms, device {1e3 * busy:.1f} ms, recorded {1e3 * recorded:.1f} ms"
        said.append(f"{who}: {times}")
    world.unlisten(watcher)
    return fine, "; ".join(said)


def teardown_is_bounded(context: RankContext) -> Checked:
    dist = context.start("nccl", group_name="teardown")
    torch.cuda.set_device(0)
    dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda._sleep(2_000_000_000)
    dist.all_reduce(torch.ones(4, device="cuda"), async_op=True)
    began = time.monotonic()
    dist.destroy_process_group()
    dist.destroy_process_group()
    spent = time.monotonic() - began
    return spent < 20, f"destroyed with a collective in flight, twice, in {spent:.2f} s"


def graphs_can_be_captured(context: RankContext) -> Checked:
    """Captures collectives in a CUDA graph while earlier ones are still in flight and being polled."""
    dist = context.start("nccl")
    torch.cuda.set_device(0)
    tensor, other, gathered = (torch.zeros(1 << 16, device="cuda") for _ in range(3))
    dist.all_reduce(tensor)
    torch.cuda._sleep(200_000_000)
    waiting = dist.all_reduce(other, async_op=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            tensor.add_(1)
            dist.all_reduce(tensor)
            dist.all_gather_into_tensor(gathered, tensor, async_op=True).wait()
    waiting.wait()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    reached = float(tensor[0]), float(gathered[0])
    dist.destroy_process_group()  # the last collective is part of the graph
    return reached == (150.0, 150.0), f"100 collectives captured, replayed three times: {reached}"


def both_devices(context: RankContext) -> Checked:
    """One group with shm for CPU tensors and nccl for CUDA tensors, named by the user."""
    dist = context.start("cpu:shm,cuda:nccl")
    torch.cuda.set_device(0)
    checks, wrong = check_all(context.rank, context.world_size)
    total = torch.ones(5)
    dist.all_reduce(total)
    single, parallel = train(context.rank, context.world_size)
    close = all(abs(a - b) < 1e-4 for a, b in zip(single, parallel, strict=True))
    backends = sorted(dist.communicator().origins())
    fine = not wrong and close and total.tolist() == [1.0] * 5 and backends == ["cpu", "cuda"]
    return (
        fine,
        f"{checks} checks, wrong: {wrong[:5]}; tensors on {backends}; DDP {parallel[-1]:.6f}, alone {single[-1]:.6f}",
    )


def streams_are_ordered(context: RankContext) -> Checked:
    """Asynchronous calls with a local last step (strided, coalesced, compressed), issued on one stream and awaited on
    another, and one in a graph: the results are visible after the wait."""
    dist = context.start("nccl")
    from ringway.compress import ErrorFeedback, compressed_all_reduce

    torch.cuda.set_device(0)
    wrong = 0
    rows, count = 2048, 20
    for _ in range(count):
        issued, waited = torch.cuda.Stream(), torch.cuda.Stream()
        feedback = ErrorFeedback()
        expected = torch.randn(1 << 22, device="cuda")
        compressed = expected.clone()
        compressed_all_reduce(expected, feedback["first"], "int8")
        torch.cuda.synchronize()
        with torch.cuda.stream(issued):
            strided = torch.arange(rows * rows, device="cuda").view(rows, rows).t()
            torch.cuda._sleep(5_000_000)
            strided.add_(1)
            works = [dist.all_reduce(strided, async_op=True)]
            several = [torch.zeros(n, device="cuda") for n in (1000, 1 << 20)]
            torch._foreach_add_(several, 1.0)
            works.append(dist.all_reduce_coalesced(several, async_op=True))
            works.append(compressed_all_reduce(compressed, feedback["second"], "int8", async_op=True))
        with torch.cuda.stream(waited):
            for work in works:
                work.wait()
            sums = strided.sum(), several[0].sum(), several[1].sum(), (compressed != expected).sum()
        torch.cuda.synchronize()
        seen = [int(one) for one in sums]
        wrong += seen != [rows * rows * (rows * rows + 1) // 2, 1000, 1 << 20, 0]
        wrong += not all(work.is_success() for work in works)
    graph, square = torch.cuda.CUDAGraph(), torch.zeros(64, 64, device="cuda")
    with torch.cuda.graph(graph):
        square.add_(1)
        dist.all_reduce(square.t()[::2], async_op=True).wait()
        doubled = square * 2
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    reached = float(square[0, 0]), float(doubled[0, 0])
    return wrong == 0 and reached == (2.0, 4.0), f"wrong: {wrong} of {count} rounds; in a graph {reached}"


def costs_of_a_call(context: RankContext) -> Checked:
    """How long a call blocks its caller, compared with torch's own call in the same run."""
    dist = context.start("nccl")
    torch.cuda.set_device(0)
    tensor = torch.zeros(1 << 10, device="cuda")
    calls = {
        "all_reduce": lambda of: of.all_reduce(tensor),
        "asynchronous all_reduce and wait": lambda of: of.all_reduce(tensor, async_op=True).wait(),
    }
    times: dict[tuple[str, Any], list[float]] = {(name, of): [] for name in calls for of in (torch.distributed, dist)}
    for _ in range(100):  # in alternation, and few enough that the device's queue never blocks the caller
        for (name, of), measured in times.items():
            for _ in range(20):
                began = time.perf_counter()
                calls[name](of)
                measured.append(time.perf_counter() - began)
            torch.cuda.synchronize()
    said = []
    for name in calls:
        torchs, ours = (1e6 * statistics.median(times[name, of]) for of in (torch.distributed, dist))
        said.append(f"{name}: torch {torchs:.0f} µs, ringway {ours:.0f} µs")
    run, whole = dist.communicator().calls.run_fast, tensor.clone()
    fast = {
        "all_reduce": run(ALL_REDUCE.code, tensor, tensor),
        "broadcast": run(BROADCAST.code, tensor, tensor, 0),
        "all_gather_into_tensor": run(ALL_GATHER_SINGLE.code, whole, tensor),
        "reduce_scatter_tensor": run(REDUCE_SCATTER_SINGLE.code, tensor, whole),
        "all_to_all_single": run(ALL_TO_ALL_SINGLE.code, whole, tensor),
    }
    said.append(f"on the fast path: {', '.join(name for name, done in fast.items() if done)}")
    return all(fast.values()), "; ".join(said)


def shared_gpu(context: RankContext) -> Checked:
    context.start("gloo")
    checks, wrong = check_all(context.rank, context.world_size)
    return not wrong, f"{checks} checks, wrong: {wrong[:5]}"


def shared_gpu_training(context: RankContext) -> Checked:
    context.start("gloo")
    torch.cuda.set_device(0)
    single, parallel = train(context.rank, context.world_size)
    close = all(abs(a - b) < 1e-4 for a, b in zip(single, parallel, strict=True))
    return close, f"one process {single[-1]:.6f}, DDP {parallel[-1]:.6f} after 5 steps"


def mpi_on_cuda(wheels: Path) -> list[tuple[str, Checked]]:
    """mpi with CUDA tensors through pinned memory, under the mpiexec of the wheel."""
    home = proofs.ROOT / ".cache" / "mpi-unpacked"
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(home)
    (data,) = home.glob("mpich-*.data/data")
    for program in (data / "bin").iterdir():
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")]),
        "LD_LIBRARY_PATH": os.pathsep.join([str(data / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]),
    }
    results = []
    for ranks in (2, 4):
        program = proofs.ROOT / "scripts" / "cuda_ranks.py"
        command = [str(data / "bin" / "mpiexec"), "-n", str(ranks), sys.executable, "-W", "ignore", str(program), "mpi"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        said = run.stdout.strip() or run.stderr.strip()[-600:]
        results.append((f"mpi (MPICH), CUDA tensors through pinned memory, {ranks} ranks", (run.returncode == 0, said)))
    return results


ENDS = {
    "destroyed by ringway": "dist.destroy_process_group()",
    "destroyed by torch": "torch.distributed.destroy_process_group()",
    "destroyed by torch, the group still held": "held = torch.distributed.group.WORLD; "
    "torch.distributed.destroy_process_group()",
    "never destroyed": "",
}
ENDING = """
import torch, ringway as dist
dist.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.cuda.set_device(0)
part = dist.new_group([0])
for _ in range(3):
    dist.all_reduce(torch.ones(1 << 20, device="cuda"))
    dist.all_reduce(torch.ones(4, device="cuda"), group=part)
dist.all_reduce(torch.ones(4))
"""


def ends_of_processes() -> list[tuple[str, Checked]]:
    """A process exits with status 0 and an intact heap, however its groups ended."""
    results = []
    for how, last in ENDS.items():
        program = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", ENDING + last]
        runs = [subprocess.run(program, capture_output=True, text=True, timeout=100, check=False) for _ in range(3)]
        codes = [run.returncode for run in runs]
        said = f"exit codes of three processes: {codes}" + "".join(run.stderr[-300:] for run in runs if run.returncode)
        results.append((f"nccl: the process ends, its groups {how}", (not any(codes), said)))
    return results


Section = tuple[str, Callable[[RankContext], Checked]]

SECTIONS: tuple[tuple[int, tuple[Section, ...]], ...] = (
    (1, (("nccl: objects, CPU tensors and monitored_barrier without a CUDA context", objects_open_no_context),)),
    (
        1,
        (
            ("nccl: every op, every reduction, world size 1", every_op),
            ("nccl: a call ends when the device has finished it", completion_from_the_device),
            ("nccl: CUDA graphs", graphs_can_be_captured),
            ("nccl: last steps, and the streams that wait for them", streams_are_ordered),
            ("nccl: the fast path, and the cost of a call for its caller, 4 KiB (no limit)", costs_of_a_call),
            ("cpu:shm,cuda:nccl: every op on CUDA tensors, a CPU tensor, DDP", both_devices),
            ("nccl: bounded teardown", teardown_is_bounded),
        ),
    ),
    (
        2,
        (
            ("gloo, CUDA tensors, one GPU shared: every op, 2 ranks", shared_gpu),
            ("gloo, CUDA tensors, one GPU shared: DDP, 2 ranks", shared_gpu_training),
        ),
    ),
    (4, (("gloo, CUDA tensors, one GPU shared: every op, 4 ranks", shared_gpu),)),
)
"""By number of ranks. Each entry starts new ranks, because the first one needs processes that have not used the GPU."""


def run_sections() -> list[tuple[str, Checked]]:
    results: list[tuple[str, Checked]] = []
    for size, sections in SECTIONS:
        with RankPool(size) as pool:
            for title, function in sections:
                outcomes = pool.try_run(function, world_size=size, timeout=60, grace=10)
                values = [outcome.value if outcome.ok else (False, str(outcome)[-1200:]) for outcome in outcomes]
                said = "; ".join(dict.fromkeys(text for _, text in values))
                results.append((title, (all(fine for fine, _ in values), said)))
                print(title, results[-1][1], flush=True)
                if not results[-1][1][0]:
                    print(*(outcome.output for outcome in outcomes), sep="\n", flush=True)
    report = Report()
    with RankPool(1) as pool:
        run_setting(pool, Setting("nccl", 1), ("*",), report)
    broken = {finding.case for _, finding in report.findings}
    said = f"{len(report.seconds) - len(broken)} of {len(report.seconds)} conformance cases passed"
    results.append(("nccl: conformance with CPU tensors, routed to gloo", (not broken, said)))
    for setting, finding in report.findings[:10]:
        print(setting, finding, flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=proofs.FOLDER / "nccl.md")
    parser.add_argument("--commit")
    parser.add_argument("--mpi", type=Path)
    arguments = parser.parse_args()
    results = run_sections() + ends_of_processes()
    if arguments.mpi is not None:
        results += mpi_on_cuda(arguments.mpi)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    lines = [
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {version}.",
        "",
        "| what | holds | seen |",
        "|---|---|---|",
    ]
    lines += [
        f"| {title} | {'yes' if fine else 'NO'} | {said.replace(chr(10), ' ').replace('|', '/')} |"
        for title, (fine, said) in results
    ]
    lines += ["", WAITS]
    proofs.write(arguments.output, "nccl and CUDA tensors on one GPU", PROVES, "\n".join(lines), arguments.commit)
    return 0 if all(fine for _, (fine, _) in results) else 1


if __name__ == "__main__":
    sys.exit(main())
