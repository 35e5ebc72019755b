"""A call that hangs reports why: real ranks that sleep, make other calls, die and get stuck, on gloo and on shm."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ringway
from ringway.errors import RingwayError
from ringway.groups.world import world
from ringway.observe.stall.watch import StallWatch, stall_after
from ringway.testing import Outcome, RankContext, RankPool
from ringway.testing.rank import leave

watch = world.listener(StallWatch)
BACKENDS = ("gloo", "shm")
WORLD = 3
NEVER = 1000.0
"""Seconds, for a watch that must not report."""


def begin(context: RankContext, backend: str, timeout: float = 60.0) -> Any:
    """A new group. After a first barrier, its calls have a timeout of `seconds`."""
    leave()
    watch.seconds = NEVER
    dist = context.start(backend, group_name="stall", timeout=timedelta(seconds=60))
    dist.barrier()
    watch.verdicts.clear()
    dist.communicator().set_timeout(timeout)
    return dist


def meet(context: RankContext, where: str) -> None:
    """A barrier through the store, which works even if a group has failed."""
    context.store.set(f"{where} {context.rank}", "")
    context.store.wait(keys(where, range(context.world_size)))


def keys(what: str, ranks: Sequence[int]) -> list[str]:
    return [f"{what} {rank}" for rank in ranks]


def all_but(victim: int) -> list[int]:
    return [rank for rank in range(WORLD) if rank != victim]


def tell_when_explained(context: RankContext, after: float = 1.0, pipe: str | None = None) -> None:
    """Starts a thread for this rank's next all_reduce. The watch reports only once, so it may report only after every
    rank has reached its place. Then the thread sets "reported RANK" in the store and writes a byte to the pipe."""

    def run() -> None:
        while not any(call.op == "all_reduce" and call.state == "issued" for call in ringway.recent_calls()):
            time.sleep(0.01)
        meet(context, "in")
        watch.seconds = after
        while not explained():
            time.sleep(0.05)
        context.store.set(f"reported {context.rank}", "")
        if pipe is not None:
            Path(pipe).write_bytes(b".")

    threading.Thread(target=run, daemon=True).start()


def explained() -> bool:
    """Whether the watch has reported which ranks an all_reduce waits for. Asks again if a rank was slow to answer."""
    said = [text for text in list(watch.verdicts) if "all_reduce #" in text and "for this rank" not in text]
    if any("does not answer" in text or "is unavailable" in text for text in said):
        watch.verdicts.clear()
        watch._reported.clear()
        return False
    return bool(said)


def caught(dist: Any) -> tuple[str, str, dict[str, Any]]:
    """What a small all_reduce raises: its class, its text, its attributes."""
    try:
        dist.all_reduce(torch.ones(4))
    except RingwayError as error:
        return type(error).__name__, str(error), dict(vars(error))
    return "", "", {}


def sleeper(context: RankContext, backend: str, victim: int) -> Any:
    dist = begin(context, backend)
    if context.rank == victim:
        context.store.set(f"in {victim}", "")
        reported = keys("reported", all_but(victim))
        while not (context.store.check(reported) and any("for this rank" in text for text in list(watch.verdicts))):
            time.sleep(0.05)
    else:
        tell_when_explained(context)
    dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sleeping_rank_is_named_with_its_stack(pool: RankPool, backend: str) -> None:
    victim = 1
    pool.replace()  # a rank reports cached stacks for two seconds, which may be those of another test
    outcomes = pool.try_run(sleeper, backend, victim, world_size=WORLD)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    for outcome in outcomes:
        if outcome.rank != victim:
            assert f"for rank {victim}; rank {victim} (host " in outcome.output
            assert "all_reduce #1 (float32, 16 bytes, SUM, group " in outcome.output
            assert "test_stall.py:" in outcome.output
            assert "has issued nothing for" in outcome.output
            assert "in sleeper" in outcome.output
        else:
            assert "for this rank" in outcome.output
            assert "in sleeper" in outcome.output


def never_comes(context: RankContext, backend: str, victim: int) -> Any:
    dist = begin(context, backend, timeout=6.0)
    if context.rank == victim:
        context.store.wait(keys("gave up", all_but(victim)))
    result = caught(dist)
    context.store.set(f"gave up {context.rank}", "")
    again = caught(dist)
    meet(context, "done")
    dist.destroy_process_group()
    return result, again


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_timeout_is_raised_on_every_rank_and_names_the_missing_rank(pool: RankPool, backend: str) -> None:
    victim = 0
    for (kind, text, facts), again in pool.run(never_comes, backend, victim, world_size=WORLD):
        assert kind == "CommTimeout", text
        assert facts["missing"] == [victim]
        assert facts["op"] == "all_reduce"
        assert 0 < facts["waited"] < 60
        assert again[0] == "CommTimeout"


def strays(context: RankContext, backend: str, victim: int, how: str) -> Any:
    dist = begin(context, backend)
    try:
        if context.rank != victim:
            dist.all_reduce(torch.ones(4))
        elif how == "op":
            dist.broadcast(torch.ones(4), 0)
        elif how == "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.int32))
        else:
            dist.all_reduce(torch.ones(8))
    except RingwayError as error:
        result = type(error).__name__, str(error), dict(vars(error))
    else:
        result = "", "", {}
    meet(context, "done")
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["op", "dtype", "size"])
def test_a_rank_in_another_collective_is_named_with_both_sides(pool: RankPool, backend: str, how: str) -> None:
    victim = 2
    for kind, text, facts in pool.run(strays, backend, victim, how, world_size=WORLD):
        assert kind == "CollectiveMismatch", text
        assert f"rank {victim}: " in text
        assert "rank 0: " in text or "rank 1: " in text
        assert text.count("test_stall.py:") >= 2
        assert facts["sequence"] == 1


def dies(context: RankContext, backend: str, victim: int, how: str) -> Any:
    dist = begin(context, backend, timeout=120.0)
    watch.seconds = 1.0
    meet(context, "ready")
    if context.rank == victim:
        time.sleep(0.3)
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)
    began = time.monotonic()
    return *caught(dist), time.monotonic() - began


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("how", "victim"), [("SIGKILL", 0), ("SIGSEGV", 2), ("exit", 1)])
def test_a_dead_rank_is_named_at_once(pool: RankPool, backend: str, how: str, victim: int) -> None:
    outcomes = pool.try_run(dies, backend, victim, how, world_size=WORLD, timeout=200)
    assert outcomes[victim].kind == "died"
    for outcome in living(outcomes, victim):
        kind, text, facts, took = outcome.value
        assert kind == "PeerLost", text
        assert facts["rank"] == victim
        assert facts["pid"]
        assert took < 60  # and not the group's 120 s, which a rank with no connection to the dead one would wait
        # The kernel reports the signal only until the process is reaped.
        assert facts["signal"] in (None, getattr(signal, how, None))


def living(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(outcome.ok for outcome in survivors), "\n".join(map(str, outcomes))
    return survivors


def stuck(context: RankContext, backend: str, victim: int, pipe: str | None) -> Any:
    dist = begin(context, backend)
    if context.rank != victim:
        tell_when_explained(context, pipe=pipe)
    elif pipe is None:
        stuck_in_a_loop(context)
    else:
        stuck_in_c(context, pipe)
    dist.all_reduce(torch.ones(4))


def stuck_in_a_loop(context: RankContext) -> None:
    context.store.set(f"in {context.rank}", "")
    while not context.store.check(keys("reported", all_but(context.rank))):
        for _ in range(1_000_000):
            pass


def stuck_in_c(context: RankContext, pipe: str) -> None:
    # PyDLL keeps the GIL: nothing of Python runs in this process while it reads.
    read, byte = ctypes.PyDLL(None).read, ctypes.create_string_buffer(1)
    fd = os.open(pipe, os.O_RDWR)  # never at end of file, even if writers come and go
    context.store.set(f"in {context.rank}", "")
    awaited = context.world_size - 1
    while awaited:
        awaited -= read(fd, byte, 1) == 1
    os.close(fd)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["python", "C with the GIL"])
def test_a_stuck_rank_is_named_with_the_line_it_is_stuck_at(
    pool: RankPool, tmp_path: Path, backend: str, where: str
) -> None:
    victim, function, pipe = 0, "stuck_in_a_loop", None
    if where != "python":
        function, pipe = "stuck_in_c", str(tmp_path / "pipe")
        os.mkfifo(pipe)
    pool.replace()  # as above
    outcomes = pool.try_run(stuck, backend, victim, pipe, world_size=WORLD)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    for outcome in outcomes:
        if outcome.rank != victim:
            assert f"for rank {victim}; rank {victim} (host " in outcome.output
            assert f"in {function}" in outcome.output


def in_another_group(context: RankContext) -> Any:
    dist = begin(context, "gloo")
    pair = dist.new_group([1, 2])
    if context.rank == 2:
        context.store.set("in 2", "")
        context.store.wait(keys("reported", [0, 1]))
    else:
        tell_when_explained(context)
    if context.rank in (1, 2):
        dist.all_reduce(torch.ones(2), group=pair)
    dist.all_reduce(torch.ones(4))


def test_a_rank_that_waits_in_another_group_is_described_by_that_call(pool: RankPool) -> None:
    outcomes = pool.try_run(in_another_group, world_size=WORLD)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    assert "has been in all_reduce #0 (float32, 8 bytes, SUM, group " in outcomes[0].output
    assert "rank 2 (host" in outcomes[1].output


def one_call_sooner(context: RankContext) -> Any:
    dist = begin(context, "gloo")
    if context.rank == 1:
        context.store.set("in 1", "")
        context.store.wait(["reported 0"])
    else:
        tell_when_explained(context, after=NEVER)
    with stall_after(0.5):
        dist.all_reduce(torch.ones(4))


def test_a_single_call_may_have_a_shorter_stall_limit(pool: RankPool) -> None:
    outcomes = pool.try_run(one_call_sooner, world_size=2)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    assert "for rank 1" in outcomes[0].output


def watched_badly(context: RankContext) -> Any:
    """The watch fails at every check, and so does the explanation: neither may disturb the job or stay hidden."""
    dist = begin(context, "gloo", timeout=3.0)
    watch.seconds = 1.0
    if context.rank == 1:
        context.store.wait(["gave up 0"])
        return caught(dist)

    def fail(*_: Any) -> Any:
        raise LookupError("of the test's own")

    watch._look = watch.investigate = fail  # type: ignore[method-assign]
    try:
        while "waiting calls could not be looked at" not in watch._troubles:
            time.sleep(0.01)
        result = caught(dist)
        context.store.set("gave up 0", "")
        assert all(thread.is_alive() for thread in watch._threads)
    finally:
        del watch._look, watch.investigate
    return result


def test_a_failure_of_the_watch_is_reported_once_and_disturbs_nothing(pool: RankPool) -> None:
    outcomes = pool.try_run(watched_badly, world_size=2, timeout=100)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    kind, _, facts = outcomes[0].value
    assert kind == "CommTimeout"
    assert facts["op"] == "all_reduce"
    said = outcomes[0].output
    assert said.count("waiting calls could not be looked at (reported once): LookupError: of the test's own") == 1
    assert said.count("a failed call could not be explained (reported once): LookupError: of the test's own") == 1
    pool.replace()
