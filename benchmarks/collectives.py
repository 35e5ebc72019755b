"""shm beside its peers, from Python, in one run.

    python benchmarks/collectives.py [--ranks 2] [--ops all_reduce ...] [--sizes ...] [--rounds 15] [--json FILE]

Each peer has ranks of its own: ours, torch's gloo, MPICH and Open MPI through mpi4py (environments made of PyPI
wheels by scripts/mpi_env.py), and DeepSpeed's shared-memory op where a `deepspeed` can be imported (--deepspeed
FOLDER adds one to the path). They take turns, sample by sample, and those whose turn it is not sleep. fp32; the
recorder and the mismatch check are on, as always. A sample's time is that of its slowest rank; the table shows
medians. Beside all_reduce stands the rate of one core's `copy_`, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("ringway", "gloo", "mpich", "openmpi", "deepspeed")
OPS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier")
SIZES = (8, 64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
SAMPLE_SECONDS = 0.05
START_SECONDS = 900.0  # DeepSpeed builds its op when it is first used


# A rank of one peer


def serve(peer: str, address: str) -> None:
    """Connects to the run, and measures what it is told until it is told no more."""
    place = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))))
    size = int(os.environ["BENCH_RANKS"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link, ExitStack() as ends:
        link.connect(address)
        lines = link.makefile("rw")
        try:
            prepare, barrier = _MAKERS[peer](place, size, ends)
            hello: dict[str, Any] = {"peer": peer, "rank": place}
        except Exception as error:  # the run goes on without this peer, and says why
            hello = {"peer": peer, "rank": place, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(json.dumps(hello), file=lines, flush=True)
        cached: tuple[Any, Callable[[], object] | None] = (None, None)
        for line in lines:
            order = json.loads(line)
            what = (order["op"], order["bytes"])
            if cached[0] != what:
                cached = (None, None)  # frees the old buffers first
                cached = (what, prepare(*what))
            call = cached[1]
            assert call is not None
            barrier()
            started = time.perf_counter()
            for _ in range(order["calls"]):
                call()
            print(json.dumps((time.perf_counter() - started) / order["calls"]), file=lines, flush=True)


def _torch_calls(dist: Any, size: int) -> Callable[[str, int], Callable[[], object]]:
    import torch

    def prepare(op: str, nbytes: int) -> Callable[[], object]:
        whole, part = torch.zeros(nbytes // 4), torch.zeros(max(1, nbytes // 4 // size))
        fitting, other = torch.zeros(part.numel() * size), torch.zeros(part.numel() * size)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(fitting, part),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, fitting),
            "all_to_all_single": lambda: dist.all_to_all_single(fitting, other),
            "barrier": lambda: dist.barrier(),
        }
        return calls[op]

    return prepare


def _ringway(place: int, size: int, ends: ExitStack) -> tuple[Any, Callable[[], object]]:
    import torch.distributed as c10d

    import ringway

    store = c10d.FileStore(os.environ["BENCH_STORE"], size)
    ringway.init_process_group("shm", store=store, rank=place, world_size=size)
    ends.callback(ringway.destroy_process_group)
    return _torch_calls(ringway, size), ringway.barrier


def _gloo(place: int, size: int, ends: ExitStack) -> tuple[Any, Callable[[], object]]:
    import torch.distributed as dist

    store = dist.FileStore(os.environ["BENCH_STORE"], size)
    dist.init_process_group("gloo", store=store, rank=place, world_size=size)
    ends.callback(dist.destroy_process_group)
    return _torch_calls(dist, size), dist.barrier


def _mpi(place: int, size: int, ends: ExitStack) -> tuple[Any, Callable[[], object]]:
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.Get_size() == size

    def prepare(op: str, nbytes: int) -> Callable[[], object]:
        whole = numpy.zeros(nbytes // 4, numpy.float32)
        part = numpy.zeros(max(1, nbytes // 4 // size), numpy.float32)
        fitting, other = (numpy.zeros(part.size * size, numpy.float32) for _ in range(2))
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
            "broadcast": lambda: world.Bcast(whole, 0),
            "all_gather_into_tensor": lambda: world.Allgather(part, fitting),
            "reduce_scatter_tensor": lambda: world.Reduce_scatter_block(fitting, part),
            "all_to_all_single": lambda: world.Alltoall(other, fitting),
            "barrier": world.Barrier,
        }
        return calls[op]

    return prepare, world.Barrier


def _deepspeed(place: int, size: int, ends: ExitStack) -> tuple[Any, Callable[[], object]]:
    """Its op reduces the tensor in place; it finds its peers by LOCAL_SIZE and names of its own in /dev/shm."""
    import torch
    import torch.distributed as dist
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    dist.init_process_group("gloo", store=dist.FileStore(os.environ["BENCH_STORE"], size), rank=place, world_size=size)
    ends.callback(dist.destroy_process_group)
    if place == 0:
        ShareMemCommBuilder().load(verbose=False)  # builds it; the others then find it built
    dist.barrier()
    native = ShareMemCommBuilder().load(verbose=False)
    native.initialize(size, place)

    def prepare(op: str, nbytes: int) -> Callable[[], object]:
        if op != "all_reduce":
            raise ValueError("it has all_reduce only")
        tensor = torch.zeros(nbytes // 4)
        return lambda: torch.ops.deepspeed.inference_all_reduce_(tensor)

    return prepare, dist.barrier


def _copy(place: int, size: int, ends: ExitStack) -> tuple[Any, Callable[[], object]]:
    import torch

    torch.set_num_threads(1)

    def prepare(op: str, nbytes: int) -> Callable[[], object]:
        source, target = torch.zeros(nbytes // 4), torch.ones(nbytes // 4)
        return lambda: target.copy_(source)

    return prepare, lambda: None


_MAKERS: dict[str, Callable[[int, int, ExitStack], tuple[Any, Callable[[], object]]]] = {
    "ringway": _ringway,
    "gloo": _gloo,
    "mpich": _mpi,
    "openmpi": _mpi,
    "deepspeed": _deepspeed,
    "copy": _copy,
}


# The run


class Team:
    """The ranks of one peer, seen from the run."""

    def __init__(self, peer: str, links: list[Any]) -> None:
        self.peer = peer
        self._links = links
        self._last: dict[tuple[str, int], float] = {}

    def sample(self, op: str, nbytes: int) -> float:
        """Seconds for one call. The first sample of a size finds out how many calls make one, and warms up."""
        if (op, nbytes) not in self._last:
            self._last[op, nbytes] = self._ask(op, nbytes, 2)
        calls = max(1, min(5000, int(SAMPLE_SECONDS / max(self._last[op, nbytes], 1e-7))))
        self._last[op, nbytes] = found = self._ask(op, nbytes, calls)
        return found

    def _ask(self, op: str, nbytes: int, calls: int) -> float:
        for link in self._links:
            print(json.dumps({"op": op, "bytes": nbytes, "calls": calls}), file=link, flush=True)
        return max(json.loads(link.readline()) for link in self._links)


def _command(peer: str, ranks: int, address: str) -> list[list[str]]:
    """The commands that start the ranks of a peer."""
    own = [str(Path(__file__).resolve()), "--serve", peer, "--address", address]
    if peer not in ("mpich", "openmpi"):
        return [[sys.executable, *own]] * (1 if peer == "copy" else ranks)
    sys.path.insert(0, str(ROOT / "scripts"))
    from mpi_env import mpi_env

    home = mpi_env(peer) / "bin"
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if peer == "openmpi" else []
    return [[str(home / "mpiexec"), *flags, "-n", str(ranks), str(home / "python"), *own]]


@contextmanager
def team(peer: str, ranks: int, folder: Path, deepspeed: str | None) -> Iterator[Team | str]:
    """Starts a peer; yields it, or why it cannot take part."""
    address = str(folder / f"{peer}.socket")
    count = 1 if peer == "copy" else ranks
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "BENCH_RANKS": str(ranks),
        "BENCH_STORE": str(folder / f"{peer}.store"),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    if peer == "deepspeed" and deepspeed:
        environment["PYTHONPATH"] = deepspeed
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ExitStack() as ends:
        listener.bind(address)
        listener.listen(count)
        listener.settimeout(START_SECONDS)
        for number, command in enumerate(_command(peer, ranks, address)):
            variables = environment if peer in ("mpich", "openmpi") else {**environment, "RANK": str(number)}
            log = ends.enter_context(open(folder / f"{peer}.{number}.log", "w"))
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            ends.callback(_ended, process)
        links: dict[int, Any] = {}
        errors = []
        try:
            for _ in range(count):
                connection, _address = listener.accept()
                connection.settimeout(START_SECONDS)
                lines = ends.enter_context(connection.makefile("rw"))
                connection.close()
                hello = json.loads(lines.readline())
                links[hello["rank"]] = lines
                errors += [hello["error"]] if "error" in hello else []
        except TimeoutError:
            errors.append(f"its ranks were not ready within {START_SECONDS:g} s")
        yield errors[0] if errors else Team(peer, [links[rank] for rank in sorted(links)])


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        teams = []
        for peer in (*arguments.peers, "copy"):
            found = ends.enter_context(team(peer, arguments.ranks, Path(name), arguments.deepspeed))
            if isinstance(found, Team):
                teams.append(found)
            else:
                print(f"{peer} does not take part: {found}", flush=True)
        for op in arguments.ops:
            for nbytes in arguments.sizes if op != "barrier" else [0]:
                taking = [one for one in teams if _takes_part(one.peer, op)]
                samples: dict[str, list[float]] = {one.peer: [] for one in taking}
                for _ in range(arguments.rounds):
                    for one in taking:
                        samples[one.peer].append(one.sample(op, nbytes))
                row = {"op": op, "bytes": nbytes, "ranks": arguments.ranks}
                row["seconds"] = {peer: statistics.median(times) for peer, times in samples.items()}
                rows.append(row)
                print(_line(row), flush=True)
    return rows


def _takes_part(peer: str, op: str) -> bool:
    return op == "all_reduce" if peer in ("copy", "deepspeed") else True


def _line(row: dict[str, Any]) -> str:
    cells = [f"{row['op']:<23}{row['bytes']:>11} B"]
    for peer, seconds in row["seconds"].items():
        rate = f" {row['bytes'] / seconds / 1e9:5.2f} GB/s" if row["bytes"] >= 64 << 10 else ""
        cells.append(f"{peer} {seconds * 1e6:.2f} us{rate}")
    return "   ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--deepspeed", help="a folder with the deepspeed package in it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=tuple(_MAKERS), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.address)
        return 0
    rows = measured(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))
    behind = [
        f"{row['op']} at {row['bytes']} B: {peer}"
        for row in rows
        for peer, seconds in row["seconds"].items()
        if peer not in ("ringway", "copy") and seconds < row["seconds"].get("ringway", 0.0)
    ]
    print("shm is behind: " + "; ".join(behind) if behind else "shm is ahead of every peer at every size")
    return 0


if __name__ == "__main__":
    sys.exit(main())
