"""A rank whose program ends with an exception, and the death of the rank that hosts the store: real programs, started
by `ringway run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from free_ports import free_port

pytestmark = pytest.mark.processes

PROGRAM = """
    import os, pathlib, signal, time
    import torch
    import ringway as dist
    from ringway.groups.world import world
    from ringway.observe.stall.watch import StallWatch

    dist.init_distributed({backend!r}, verbose=False)
    rank = dist.get_rank()
    store = torch.distributed.distributed_c10d._get_default_store()
    watch = world.listener(StallWatch)
    while len(watch.job.addresses) < 3:  # it learns them soon, but not at once
        time.sleep(0.01)
    store.set("knows all " + str(rank), "")
    if rank == {victim}:
        store.wait(["knows all 0", "knows all 1", "knows all 2"])
        time.sleep(0.3)
        {end}
    try:
        dist.all_reduce(torch.ones(8))
    except dist.errors.RingwayError as error:
        text = str(error).replace(chr(10), " ")
        print("RAISED", type(error).__name__, getattr(error, "rank", None), text, flush=True)
        # No rank may exit before the other has raised: it would be reported as missing too.
        said = pathlib.Path(__file__).with_name("raised " + str(rank))
        said.touch()
        until = time.monotonic() + 60
        while len(list(said.parent.glob("raised *"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        os._exit(0)
"""


def test_the_report_says_that_the_store_died_with_rank_0(tmp_path: Path) -> None:
    """With torchrun's environment variables, rank 0 hosts the store itself."""
    script = tmp_path / "program.py"
    end = "os.kill(os.getpid(), signal.SIGKILL)"
    script.write_text(textwrap.dedent(PROGRAM.format(backend="gloo", victim=0, end=end)))
    port = str(free_port())
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for text in said[1:]:
        assert "RAISED PeerLost 0 " in text
        assert "the job's store is gone with its host" in text


def run(tmp_path: Path, backend: str, victim: int, end: str, **variables: str) -> list[str]:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM.format(backend=backend, victim=victim, end=end)))
    finished = subprocess.run(
        [sys.executable, "-m", "ringway.cli", "run", "-n", "3", "--on-death", "keep", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables},
        check=False,
    )
    raised = [line for line in finished.stdout.splitlines() if "RAISED" in line]
    assert len(raised) == 2, finished.stdout + finished.stderr
    return raised


def assert_dumped(folder: Path, rank: int) -> None:
    """The recorder was dumped when the call failed. Braces that are not placeholders stay unchanged."""
    story = json.loads((folder / f"calls-{rank}-{{host}}.json").read_text())
    assert story["rank"] == rank
    last = story["calls"][-1]
    assert (last["op"], last["nbytes"], last["state"]) == ("all_reduce", 32, "failed")
    assert last["site"][0].endswith("program.py")


def test_a_rank_that_ended_with_an_exception_is_named_with_the_exception(tmp_path: Path) -> None:
    dumps = str(tmp_path / "calls-{rank}-{host}.json")
    for line in run(tmp_path, "gloo", 1, "raise ValueError('the batch is empty')", RINGWAY_DUMP_FILE=dumps):
        assert "RAISED PeerLost 1 " in line
        assert "ValueError: the batch is empty" in line
    for rank in (0, 2):
        assert_dumped(tmp_path, rank)


def test_rank_0_that_dies_is_named_by_the_others(tmp_path: Path) -> None:
    dumps = str(tmp_path / "calls-{rank}-{host}.json")
    for line in run(tmp_path, "shm", 0, "os.kill(os.getpid(), signal.SIGKILL)", RINGWAY_DUMP_FILE=dumps):
        assert "RAISED PeerLost 0 " in line
    for rank in (1, 2):
        assert_dumped(tmp_path, rank)


def test_a_mismatch_writes_the_recorder_too(tmp_path: Path) -> None:
    dumps = str(tmp_path / "calls-{rank}-{host}.json")
    for line in run(tmp_path, "gloo", 1, "dist.broadcast(torch.ones(8), 0)", RINGWAY_DUMP_FILE=dumps):
        assert "CollectiveMismatch" in line
    for rank in (0, 2):
        assert_dumped(tmp_path, rank)
