"""Ranks in PID namespaces of their own, such as two containers that share memory: both are pid 1."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = """
import os, sys, time
import torch
import torch.distributed as c10d
from ringway.backends.base import GroupInfo
from ringway.backends.process import Process
from ringway.backends.shm.backend import ShmBackend
from ringway.call import ALL_REDUCE, BARRIER, Call
from ringway.errors import PeerLost

rank, path = int(sys.argv[1]), sys.argv[2]
store = c10d.FileStore(path, 2)
group = ShmBackend(GroupInfo(rank=rank, size=2, ranks=range(2), store=store, name="two", timeout=60, process=Process()))
group.barrier(Call(BARRIER, size=2))
large = torch.full((1 << 20,), float(1 + rank))
group.all_reduce(Call(ALL_REDUCE, (large,), (large,), size=2))
assert bool((large == 3).all()), large
print("pid", os.getpid(), flush=True)
if rank == 1:
    time.sleep(600)
try:
    group.barrier(Call(BARRIER, size=2))
except PeerLost as error:
    print("lost", error.rank, time.monotonic(), flush=True)
"""


def _obstacle() -> str | None:
    if os.geteuid() != 0:
        return "a PID namespace needs root"
    if shutil.which("unshare") is None:
        return "'unshare' is missing; install util-linux"
    tried = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, text=True, timeout=60)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


def _start(rank: int, path: Path) -> subprocess.Popen[str]:
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", RANK, str(rank), str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_dead_peer_in_another_pid_namespace_is_noticed_within_a_second(tmp_path: Path) -> None:
    obstacle = _obstacle()
    if obstacle is not None:
        if os.environ.get("CI"):
            pytest.fail(f"there can be no two PID namespaces: {obstacle}")
        pytest.skip(obstacle)
    tried = []
    for attempt in range(5):  # rank 0 may get no CPU for a second
        took, seen = _seconds_until_told(tmp_path / f"store {attempt}")
        # What the machine does to a process that only waits for the death, it does to rank 0 too.
        if took < 1.0 + 10 * seen:
            return
        tried.append(took)
    raise AssertionError(f"it took {tried} s")


def _seconds_until_told(path: Path) -> tuple[float, float]:
    """How long after rank 1 was killed rank 0 knows it, and this process, which does nothing else."""
    ranks = [_start(rank, path) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "pid 1\n"
        time.sleep(0.2)  # rank 0 waits in its second barrier by now; if it does not yet, it finds the rank dead
        killed = time.monotonic()
        os.kill(_only_child(ranks[1].pid), signal.SIGKILL)
        ranks[1].wait()
        seen = time.monotonic() - killed
        assert ranks[0].stdout is not None
        word, lost, told = ranks[0].stdout.readline().split()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert (word, lost) == ("lost", "1")
    return float(told) - killed, seen  # both read the host's clock
