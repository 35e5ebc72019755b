"""The rank pool: what ranks return, and what happens to ranks that raise, die or hang."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

from ringway.testing import RankContext, RankPool, RanksFailed


def place(context: RankContext, offset: int) -> tuple[int, int]:
    return context.rank + offset, context.world_size


def process_id(context: RankContext) -> int:
    return os.getpid()


def threads(context: RankContext) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def sum_of_ranks(context: RankContext) -> float:
    dist = context.start("gloo", module="torch.distributed")
    tensor = torch.tensor(float(context.rank))
    dist.all_reduce(tensor)
    return tensor.item()


def name_of_world(context: RankContext) -> int:
    context.start("gloo", module="torch.distributed")
    return id(c10d.group.WORLD)


def through_store(context: RankContext) -> str:
    if context.rank == 0:
        context.store.set("key", "from rank 0")
    return context.store.get("key").decode()


def key_is_there(context: RankContext) -> bool:
    return context.store.check(["key"])


def variable(context: RankContext, name: str) -> str | None:
    return os.environ.get(name)


def raise_on(context: RankContext, rank: int) -> None:
    print(f"rank {context.rank} was here")
    if context.rank == rank:
        raise LookupError("what went wrong")


def die_on(context: RankContext, rank: int, number: int) -> None:
    if context.rank == rank:
        os.kill(os.getpid(), number)


def leave_on(context: RankContext, rank: int) -> None:
    if context.rank == rank:
        os._exit(3)


def spin_on(context: RankContext, rank: int) -> None:
    while context.rank == rank:
        pass


def stop_on(context: RankContext, rank: int) -> None:
    if context.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_missing_rank(context: RankContext) -> None:
    if context.rank == 0:
        raise ConnectionError("rank 0 gave up")
    time.sleep(600)


def die_with_child_holding_everything(context: RankContext) -> None:
    if os.fork() == 0:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


def unpicklable(context: RankContext) -> object:
    return lambda: None


def big(context: RankContext, count: int) -> bytes:
    return bytes([context.rank]) * count


class Holder:
    @staticmethod
    def method(context: RankContext) -> str:
        return "found"


def test_results_come_in_rank_order(pool: RankPool) -> None:
    assert pool.run(place, 10, world_size=3) == [(10, 3), (11, 3), (12, 3)]


def test_ranks_are_reused(pool: RankPool) -> None:
    first = pool.run(process_id, world_size=2)
    assert pool.run(process_id, world_size=2) == first
    assert pool.run(process_id, world_size=1) == first[:1]


def test_ranks_have_one_thread(pool: RankPool) -> None:
    assert pool.run(threads, world_size=1) == [(1, "1")]


def test_function_by_name_and_static_method(pool: RankPool) -> None:
    assert pool.run("ringway.testing.rank:RankContext.__repr__", world_size=1)[0].startswith("RankContext(")
    assert pool.run(Holder.method, world_size=1) == ["found"]


def test_a_lambda_is_refused_by_name(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="found by name"):
        pool.run(lambda context: None, world_size=1)


def test_large_results(pool: RankPool) -> None:
    assert [len(set(part)) for part in pool.run(big, 5_000_000, world_size=2)] == [1, 1]


def test_worlds_of_changing_size(pool: RankPool) -> None:
    for size in (3, 2, 3, 1, 3):
        assert pool.run(sum_of_ranks, world_size=size) == [sum(range(size))] * size


def test_world_is_kept_between_runs(pool: RankPool) -> None:
    assert pool.run(name_of_world, world_size=2) == pool.run(name_of_world, world_size=2)


def test_store_is_shared_in_a_run_and_fresh_in_the_next(pool: RankPool) -> None:
    assert pool.run(through_store, world_size=2) == ["from rank 0"] * 2
    assert pool.run(key_is_there, world_size=2) == [False] * 2


def test_environment_lasts_one_run(pool: RankPool) -> None:
    name = "RINGWAY_TEST_VARIABLE"
    assert pool.run(variable, name, world_size=1, environment={name: "here"}) == ["here"]
    assert pool.run(variable, name, world_size=1) == [None]


def test_an_error_names_its_rank_and_shows_what_was_printed(pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(raise_on, 1, world_size=2)
    (failed,) = caught.value.failed
    assert (failed.rank, failed.kind, failed.output) == (1, "raised", "rank 1 was here")
    assert isinstance(failed.error, LookupError)
    assert "failed on rank 1 of 2" in str(caught.value)
    assert "what went wrong" in str(caught.value)
    assert "in raise_on" in str(caught.value)


def test_a_result_that_cannot_be_sent_is_an_error(pool: RankPool) -> None:
    (outcome,) = pool.try_run(unpicklable, world_size=1)
    assert outcome.kind == "raised"
    assert "pickle" in outcome.detail


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGRTMIN + 7])
def test_a_death_is_named_and_does_not_spoil_the_next_run(pool: RankPool, number: int) -> None:
    before = pool.run(process_id, world_size=3)
    outcomes = pool.try_run(die_on, 2, int(number), world_size=3)
    assert [outcome.kind for outcome in outcomes] == ["returned", "returned", "died"]
    assert outcomes[2].detail == f"killed by {getattr(number, 'name', f'signal {int(number)}')}"
    assert pool.run(sum_of_ranks, world_size=3) == [3.0] * 3
    assert not set(before) & set(pool.run(process_id, world_size=3))


def test_a_rank_that_exits_is_reported(pool: RankPool) -> None:
    outcomes = pool.try_run(leave_on, 0, world_size=2)
    assert outcomes[0].detail == "it left the process with status 3"


def test_a_rank_killed_between_runs_is_replaced(pool: RankPool) -> None:
    pool.run(sum_of_ranks, world_size=2)
    gone = os.pidfd_open(pool.pids()[1])
    os.kill(pool.pids()[1], signal.SIGKILL)
    assert select.select([gone], [], [], 30)[0]
    os.close(gone)
    assert pool.run(sum_of_ranks, world_size=2) == [1.0, 1.0]


def test_a_dead_ranks_children_do_not_outlive_it(pool: RankPool) -> None:
    started = time.monotonic()
    (outcome,) = pool.try_run(die_with_child_holding_everything, world_size=1, timeout=60)
    assert outcome.kind == "died"
    assert time.monotonic() - started < 30


def test_a_hang_is_named_with_its_stack(pool: RankPool) -> None:
    pool.run(place, 0, world_size=2)
    with pytest.raises(RanksFailed) as caught:
        pool.run(spin_on, 1, world_size=2, timeout=8)
    (failed,) = caught.value.failed
    assert (failed.rank, failed.kind) == (1, "hung")
    assert "in spin_on" in failed.detail
    assert pool.run(sum_of_ranks, world_size=2) == [1.0, 1.0]


def test_a_stopped_rank_is_a_hang(pool: RankPool) -> None:
    pool.run(place, 0, world_size=1)
    outcomes = pool.try_run(stop_on, 0, world_size=1, timeout=3)
    assert outcomes[0].kind == "hung"
    assert "did not react" in outcomes[0].detail


def test_ranks_that_wait_for_a_failed_one_are_not_waited_for(pool: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 gave up") as caught:
        pool.run(wait_for_missing_rank, world_size=2, timeout=600, grace=0.5)
    assert [outcome.kind for outcome in caught.value.outcomes] == ["raised", "hung"]
    assert time.monotonic() - started < 60


def test_world_size_beyond_the_pool_is_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="not between 1 and"):
        pool.run(process_id, world_size=pool.size + 1)


@pytest.mark.processes
def test_close_is_idempotent_and_leaves_no_process() -> None:
    pool = RankPool(1)
    (pid,) = pool.run(process_id)
    pool.close()
    pool.close()
    assert not os.path.exists(f"/proc/{pid}")


SCRIPT = """
    import os, signal
    from dataclasses import dataclass
    from ringway.testing import RankPool

    @dataclass
    class Point:
        x: int

    def shift(context, point):
        return Point(point.x + context.rank)

    def pid(context):
        return os.getpid()

    if __name__ == "__main__":
        pool = RankPool(2)
        assert pool.run(shift, Point(3)) == [Point(3), Point(4)]
        print(*pool.run(pid), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_a_script_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = done.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, f"ranks {pids} outlived their parent"
        time.sleep(0.05)
