"""nccl on one GPU, with a report for docs/proofs/nccl.md.

NCCL refuses several ranks on one GPU before 2.30. From then on NCCL_MULTI_RANK_GPU_ENABLE=1 allows them; LD_PRELOAD
puts a newer NCCL under an older torch:

    LD_PRELOAD=libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 PYTHONPATH=src python scripts/nccl_proof.py

Without MPS the kernels of two processes take turns on the GPU, in slices of milliseconds. So times, and what makes many
calls, are taken under MPS (nvidia-cuda-mps-control), and faults without it: a client that is killed may take others
along. The times come first, by themselves; the rest runs at the same time, each part in a process of its own.
With --mpi WHEELS, a folder with the wheels of mpich and mpi4py, the mpi backend is tested on CUDA tensors too.
scripts/nccl_faults.py has the table of faults.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import nccl_ranks
import proofs
import torch
from cuda_ranks import SYMMETRIC, check_all, train

from ringway.testing import RankContext, RankPool
from ringway.testing.conformance import Report, Setting, all_cases, run_setting

PROVES = (
    "src/ringway/backends/nccl",
    "src/ringway/backends/device_watch.py",
    "src/ringway/groups/bridge.py",
    "csrc/device",
    "csrc/python/stream_fast_path.cpp",
    "csrc/python/bridge_method.cpp",
    "src/ringway/backends/torch",
    "src/ringway/backends/mpi/backend.py",
)
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
    for who, lateness in (("recorder", 0.02), ("logger", 0.005), ("listener", 0.025)):
        if who == "logger":
            dist.configure(enabled=True)
        elif who == "listener":
            dist.configure(enabled=False)
            world.listen(watcher)
        torch.cuda._sleep(600_000_000)
        began, began_ns = time.perf_counter(), time.monotonic_ns()
        dist.all_reduce(tensor)
        issued_in = time.perf_counter() - began
        torch.cuda.synchronize()
        busy = time.perf_counter() - began
        deadline = time.monotonic() + 5
        while dist.recent_calls(1)[0].duration is None and time.monotonic() < deadline:
            time.sleep(0.001)
        call = dist.recent_calls(1)[0]
        recorded = (call.completed_ns - began_ns) / 1e9
        fine &= issued_in < busy / 2 and abs(recorded - busy) < lateness
        if who == "logger":  # the device's own: it started when the work before it had ended
            fine &= 0 < (call.duration or 0.0) < 0.005
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


def both_devices(context: RankContext, backends: str = "cpu:shm,cuda:nccl") -> Checked:
    """One group with shm for CPU tensors and nccl for CUDA tensors, named by the user."""
    dist = context.start(backends)
    torch.cuda.set_device(0)
    checks, wrong = check_all(context.rank, context.world_size)
    total = torch.ones(5)
    dist.all_reduce(total)
    single, parallel = train(context.rank, context.world_size)
    close = all(abs(a - b) < 1e-4 for a, b in zip(single, parallel, strict=True))
    devices = sorted(dist.communicator().origins())
    fine = not wrong and close and total.tolist() == [1.0] * 5 and devices == ["cpu", "cuda"]
    return (
        fine,
        f"{checks} checks, wrong: {wrong[:5]}; tensors on {devices}; DDP {parallel[-1]:.6f}, alone {single[-1]:.6f}",
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


def mpi_on_cuda(wheels: Path) -> list[Row]:
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
        results.append(
            Row(f"mpi (MPICH), CUDA tensors through pinned memory, {ranks} ranks", run.returncode == 0, said)
        )
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


def ends_of_processes() -> list[Row]:
    """A process exits with status 0 and an intact heap, however its groups ended."""
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c"]
    started = [
        (how, [subprocess.Popen([*command, ENDING + last], stderr=subprocess.PIPE, text=True) for _ in range(3)])
        for how, last in ENDS.items()
    ]
    results = []
    for how, processes in started:
        errors = [process.communicate(timeout=100)[1] for process in processes]
        codes = [process.returncode for process in processes]
        said = f"exit codes of three processes: {codes}" + "".join(text[-300:] for text in errors if any(codes))
        results.append(Row(f"nccl: the process ends, its groups {how}", not any(codes), said))
    return results


class Row(NamedTuple):
    """A line of the page."""

    title: str
    holds: bool
    said: str


class Found:
    """The rows of this process so far, and who is told of each new one."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.told: Callable[[list[Row]], Any] = lambda rows: None

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row, flush=True)
        self.told(self.rows)


FOUND = Found()


class Section(NamedTuple):
    """What ranks do together, and whether the answers are fine."""

    title: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    judge: Callable[[list[Any]], Checked] | None = None
    """None if each rank says itself whether it is."""
    seconds: float = 60.0


class Steps:
    """How long each comparison of steps takes."""

    seconds = 10.0


STEPS = Steps()


def _steps(most: float) -> Callable[[list[Any]], Checked]:
    """A step's time divided by torch's: the slower rank's."""

    def judge(values: list[Any]) -> Checked:
        ours, torchs, own, count = max(values)
        return ours.middle <= most, (
            "{:.3f} of torch's ({:.3f} to {:.3f}), ".format(*ours)
            + f"which takes {own:.2f} ms; wanted at most {most}; "
            "a second group of torch's takes {:.3f} ({:.3f} to {:.3f}); ".format(*torchs)
            + f"{count} steps of each"
        )

    return judge


def _costs(values: list[Any]) -> Checked:
    """The ratios of each op, of rank 0."""
    worst = max(row[side][0] for row in values[0].values() for side in ("ringway", "bridge"))
    lines = [
        f"{name}: torch {row['torch'][0]:.1f} µs, "
        + ", ".join("{} {:.2f} ({:.2f} to {:.2f})".format(side, *row[side]) for side in ("ringway", "bridge"))
        for name, row in values[0].items()
    ]
    return worst <= 1.15, "; ".join(lines)


def _settling(values: list[Any]) -> Checked:
    idle, settled, synchronized = values[0]
    return True, (
        f"nothing in flight {idle:.1f} µs; all_reduce and settled() {settled:.0f} µs, "
        f"all_reduce and torch.cuda.synchronize() {synchronized:.0f} µs"
    )


def _mesh(values: list[Any]) -> Checked:
    times = [value[1] for value in values]
    return all(value[0] for value in values), (
        f"told after {min(times):.2f} to {max(times):.2f} s; groups with a fault: {[value[2] for value in values]}; "
        "the survivors made a group of three and trained"
    )


def _alive(values: list[Any]) -> Checked:
    said, total = values[0]
    return said == "PeerLost" and total == 1.0, f"{said}; 60 s later the survivor made a new group and trained"


def _steps_of(where: str) -> list[Section]:
    return [
        Section(f"a step of {how}, {what}, {where}", nccl_ranks.step_times, (how, logged, STEPS.seconds), _steps(most))
        for how in ("DDP", "FSDP2")
        for what, logged, most in (
            ("recorder, comparison and watch on", False, 1.01),
            ("logger and trace too", True, 1.02),
        )
    ]


def _timed_on(where: str) -> list[Section]:
    return [
        Section(f"host time of a call of 4 KiB, at most 1.15 of torch's, {where}", nccl_ranks.costs, (), _costs),
        *_steps_of(where),
        Section(f"settled(), {where}", nccl_ranks.settling, (), _settling),
        Section(f"logger, recorder and trace have the device's times, {where}", nccl_ranks.device_times),
    ]


ALONE = (
    Section("nccl: objects, CPU tensors and monitored_barrier without a CUDA context", objects_open_no_context),
    Section("nccl: CUDA graphs", graphs_can_be_captured),
    Section("nccl: last steps, and the streams that wait for them", streams_are_ordered),
    Section("cpu:shm,cuda:nccl: every op on CUDA tensors, a CPU tensor, DDP", both_devices),
    Section("cuda:nccl,cpu:shm: the same, named in the other order", both_devices, ("cuda:nccl,cpu:shm",)),
    Section("nccl: bounded teardown", teardown_is_bounded),
)
"""One rank. The first needs a process that has not used the GPU."""
TOGETHER = (
    Section("nccl: every op, every reduction", nccl_ranks.every_op),
    Section("nccl: CUDA graphs, captured and replayed", nccl_ranks.graphs),
    Section("DDP: the same bits as on torch's group", nccl_ranks.same_bits, ("DDP",)),
    Section("FSDP2: the same bits as on torch's group", nccl_ranks.same_bits, ("FSDP2",)),
)
COMPILED = Section("nccl: torch.compile, 2 ranks", nccl_ranks.compiled, (), None, 90)
MESH = Section("a 2 x 2 mesh whose rank 3 is killed", nccl_ranks.mesh_with_a_death, (), _mesh, 60)
HEARTBEAT = Section(
    "alive 60 s after a fault, with TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=10",
    nccl_ranks.alive_after_a_fault,
    (),
    _alive,
    150,
)


def run_sections(sections: Sequence[Section], size: int, where: str = "", missing: int = 0) -> list[Row]:
    """`missing`: how many of the last ranks are expected to die."""
    rows = []
    with RankPool(size, preload=("torch.distributed.fsdp",)) as pool:
        for section in sections:
            outcomes = pool.try_run(
                section.function, *section.arguments, world_size=size, timeout=section.seconds, grace=section.seconds
            )
            expected = outcomes[: size - missing]
            if all(outcome.ok for outcome in expected):
                values = [outcome.value for outcome in expected]
                if section.judge is None:
                    holds, said = all(fine for fine, _ in values), "; ".join(dict.fromkeys(text for _, text in values))
                else:
                    holds, said = section.judge(values)
            else:
                holds, said = False, "; ".join(str(outcome)[-600:] for outcome in expected if not outcome.ok)
            rows.append(Row(section.title + where, holds, said))
            FOUND.add(rows[-1])
            if not holds:
                print(*(outcome.output[-4000:] for outcome in outcomes), sep="\n", flush=True)
    return rows


WHY_NOT = (
    "NCCL has no tags and no receive from any source, and it runs the messages of a pair of ranks one after the other, "
    "in the order of each rank, unless they are in one batch: two ranks that both send first wait for each other, on "
    "torch's own group too. With 2 ranks, the batch of conformance tells two messages to one rank apart by their tags. "
    "nccl_faults.md has messages in a batch, and the host times above have send and recv"
)


def conformance(setting: Setting, title: str, seconds: float = 200.0, without: Collection[str] = ()) -> Row:
    """The cases that fit into `seconds`."""
    report, began = Report(), time.monotonic()
    names = [name for name in all_cases() if name not in without]
    left = 0
    with RankPool(setting.world_size) as pool:
        for name in names:
            if time.monotonic() - began > seconds:
                left += 1
                continue
            seen = len(report.findings)
            run_setting(pool, setting, (name,), report)
            for _, finding in report.findings[seen : seen + 3]:
                print(setting, str(finding)[:1500], flush=True)
    broken = {finding.case for _, finding in report.findings}
    said = f"{len(report.seconds) - len(broken)} of {len(report.seconds)} conformance cases passed" + (
        f", {left} did not run" if left else ""
    )
    row = Row(title, not broken and not left, said)
    FOUND.add(row)
    print(sorted(broken), flush=True)
    return row


@contextmanager
def mps() -> Iterator[None]:
    """In the block, kernels of several processes run together."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=30)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 5\n", text=True, check=False, timeout=60)
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def timed_alone() -> list[Row]:
    completion = Section("nccl: a call ends when the device has finished it", completion_from_the_device)
    return run_sections([completion, *_timed_on("1 rank")], 1)


def timed_together() -> list[Row]:
    with mps():
        return run_sections(_timed_on("2 ranks"), 2)


def together(size: int, every: int) -> list[Row]:
    where = f", {size} ranks"
    setting = Setting("nccl", size, device="cuda", every=every)
    with mps():
        os.environ["NCCL_MAX_NCHANNELS"] = "8"  # the kernels of all ranks must fit on the one GPU, or they never meet
        rows = run_sections(TOGETHER, size, where)
        without = SYMMETRIC | ({"batch_of_sends_and_receives"} if size == 2 else set())
        rows.append(
            Row(f"nccl: conformance cases that were not run{where}", True, f"{', '.join(sorted(without))}: {WHY_NOT}")
        )
        FOUND.add(rows[-1])
        return [*rows, conformance(setting, f"nccl: conformance with CUDA tensors{where}", without=without)]


def alone() -> list[Row]:
    shared = [
        Section("gloo, CUDA tensors: every op", shared_gpu),
        Section("gloo, CUDA tensors: DDP", shared_gpu_training),
    ]
    return [
        *run_sections(ALONE, 1),
        *ends_of_processes(),
        *run_sections(shared, 2, ", one GPU shared, 2 ranks"),
        conformance(Setting("nccl", 1, every=7), "nccl: conformance with CPU tensors, routed to gloo"),
    ]


PARTS: dict[str, Callable[[], list[Row]]] = {
    "timed-1": timed_alone,
    "timed-2": timed_together,
    "mesh": lambda: run_sections([MESH], 4, missing=1),
    "alone": alone,
    "two": lambda: together(2, 3),
    "four": lambda: together(4, 7),
    "compiled": lambda: run_sections([COMPILED], 2),
    "heartbeat": lambda: run_sections([HEARTBEAT], 2, missing=1),
}
ALONE_PARTS = ("timed-1", "timed-2", "mesh")
"""These measure times: they run by themselves, one after the other."""


def run_parts(parts: Sequence[str], folder: Path, seconds: float) -> list[Row]:
    """Each in a process of its own. What takes longer than `seconds` in all is broken off."""
    program, until = [sys.executable, __file__, "--rows", str(folder)], time.monotonic() + seconds
    program += ["--step-seconds", str(STEPS.seconds)]
    todo = [part for part in parts if not _rows_of(part, folder)[1]]
    for group in [[part] for part in todo if part in ALONE_PARTS] + [
        [part for part in todo if part not in ALONE_PARTS]
    ]:
        for process in [subprocess.Popen([*program, "--parts", part]) for part in group]:
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.terminate()
    rows = []
    for part in parts:
        found, whole = _rows_of(part, folder)
        rows += found
        if not whole:
            rows.append(Row(f"the part '{part}'", False, "broke off after the rows above"))
    return rows


def _rows_of(part: str, folder: Path) -> tuple[list[Row], bool]:
    """What a part has written so far, and whether that is all of it."""
    written = folder / f"{part}.json"
    given = json.loads(written.read_text()) if written.exists() else {"rows": [], "whole": False}
    return [Row(*each) for each in given["rows"]], given["whole"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=proofs.FOLDER / "nccl.md")
    parser.add_argument("--commit")
    parser.add_argument("--mpi", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=1800.0, help="for all parts; the page says what broke off")
    parser.add_argument("--rows", type=Path, help="run one part, and write its rows into this folder")
    parser.add_argument("--folder", type=Path, help="keep the parts' rows here; parts whose rows are here are not run")
    parser.add_argument("--step-seconds", type=float, default=STEPS.seconds, help="for each comparison of steps")
    arguments = parser.parse_args()
    STEPS.seconds = arguments.step_seconds
    parts = arguments.parts.split(",")
    if arguments.rows is not None:
        written = arguments.rows / f"{parts[0]}.json"
        FOUND.told = lambda rows: written.write_text(json.dumps({"rows": rows, "whole": False}))
        rows = PARTS[parts[0]]()
        written.write_text(json.dumps({"rows": rows, "whole": True}))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = run_parts(parts, folder, arguments.seconds)
    if arguments.mpi is not None:
        rows += mpi_on_cuda(arguments.mpi)
    lines = [
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {proofs.loaded_nccl()}.",
        "",
        "Ranks share the one GPU. Rows with 2 and 4 ranks ran under MPS, except those with a killed rank. Intervals",
        "are of 95 %; the groups took turns, step by step or ten calls at a time.",
        "",
        "| what | holds | seen |",
        "|---|---|---|",
    ]
    lines += [
        f"| {row.title} | {'yes' if row.holds else 'NO'} | {row.said.replace(chr(10), ' ').replace('|', '/')} |"
        for row in rows
    ]
    proofs.write(arguments.output, "nccl and CUDA tensors on one GPU", PROVES, "\n".join(lines), arguments.commit)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
