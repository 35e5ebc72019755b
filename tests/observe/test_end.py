"""A rank whose program ends with an exception, and the death of the rank that hosts the store: whole programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from programs import ringway_run_variables, run_program, torchrun_variables
from ringway.testing import RankPool

KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
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


def run(
    pool: RankPool, folder: Path, environments: Sequence[Mapping[str, str]], backend: str, victim: int, end: str
) -> list[str]:
    """What the two remaining ranks raised. Both must have dumped the recorder."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(PROGRAM.format(backend=backend, victim=victim, end=end)))
    dumps = {"RINGWAY_DUMP_FILE": str(folder / "calls-{rank}-{host}.json")}
    ranks = run_program(pool, script, environments=[variables | dumps for variables in environments])
    raised = [line for rank in ranks for line in rank.output.splitlines() if line.startswith("RAISED")]
    assert len(raised) == 2, "\n".join(map(str, ranks))
    for rank in {0, 1, 2} - {victim}:
        assert_dumped(folder, rank)
    return raised


def assert_dumped(folder: Path, rank: int) -> None:
    """The recorder was dumped when the call failed. Braces that are not placeholders stay unchanged."""
    story = json.loads((folder / f"calls-{rank}-{{host}}.json").read_text())
    assert story["rank"] == rank
    last = story["calls"][-1]
    assert (last["op"], last["nbytes"], last["state"]) == ("all_reduce", 32, "failed")
    assert last["site"][0].endswith("program.py")


def test_the_report_says_that_the_store_died_with_rank_0(pool: RankPool, tmp_path: Path) -> None:
    """With torchrun's environment variables, rank 0 hosts the store itself."""
    for line in run(pool, tmp_path, torchrun_variables(3), "gloo", 0, KILLED):
        assert line.startswith("RAISED PeerLost 0 ")
        assert "the job's store is gone with its host" in line


def test_a_rank_that_ended_with_an_exception_is_named_with_the_exception(pool: RankPool, tmp_path: Path) -> None:
    with ringway_run_variables(3) as environments:
        for line in run(pool, tmp_path, environments, "gloo", 1, "raise ValueError('the batch is empty')"):
            assert line.startswith("RAISED PeerLost 1 ")
            assert "ValueError: the batch is empty" in line


def test_rank_0_that_dies_is_named_by_the_others(pool: RankPool, tmp_path: Path) -> None:
    with ringway_run_variables(3) as environments:
        for line in run(pool, tmp_path, environments, "shm", 0, KILLED):
            assert line.startswith("RAISED PeerLost 0 ")


def test_a_mismatch_writes_the_recorder_too(pool: RankPool, tmp_path: Path) -> None:
    with ringway_run_variables(3) as environments:
        for line in run(pool, tmp_path, environments, "gloo", 1, "dist.broadcast(torch.ones(8), 0)"):
            assert "CollectiveMismatch" in line
