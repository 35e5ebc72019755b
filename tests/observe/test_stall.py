"""A call that hangs says why: real ranks that sleep, stray, die and get stuck, on gloo and on shm."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import pytest
import torch

from ringway.errors import RingwayError
from ringway.testing import Outcome, RankContext, RankPool

BACKENDS = ("gloo", "shm")
WORLD = 3


def begin(context: RankContext, backend: str, timeout: float = 6.0) -> Any:
    from datetime import timedelta

    from ringway.observe.stall import watch

    dist = context.start(backend, timeout=timedelta(seconds=timeout))
    watch.seconds = 1.0
    dist.barrier()
    return dist


def caught(dist: Any) -> tuple[str, str, dict[str, Any]]:
    """What a small all_reduce raises: its class, its text, its facts."""
    try:
        dist.all_reduce(torch.ones(4))
    except RingwayError as error:
        return type(error).__name__, str(error), dict(vars(error))
    return "", "", {}


def sleeper(context: RankContext, backend: str, victim: int) -> Any:
    dist = begin(context, backend)
    if context.rank == victim:
        time.sleep(3.5)
    dist.all_reduce(torch.ones(4))
    return None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sleeping_rank_is_named_with_its_stack(pool: RankPool, backend: str) -> None:
    victim = 1
    outcomes = pool.try_run(sleeper, backend, victim, world_size=WORLD, timeout=60)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    for outcome in outcomes:
        if outcome.rank != victim:
            assert f"for rank {victim}; rank {victim} (host " in outcome.output
            assert "all_reduce #1 (float32, 16 B, SUM, group " in outcome.output
            assert "test_stall.py:" in outcome.output
            assert "has issued nothing for" in outcome.output
            assert "in sleeper" in outcome.output
        else:
            assert "for this rank" in outcome.output
            assert "in sleeper" in outcome.output


def never_comes(context: RankContext, backend: str, victim: int) -> Any:
    dist = begin(context, backend, timeout=3.0)
    if context.rank == victim:
        time.sleep(6)
    result = caught(dist)
    again = caught(dist)
    context.store.set(f"done{context.rank}", "1")
    context.store.wait([f"done{rank}" for rank in range(context.world_size)])
    dist.destroy_process_group()
    return result, again


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_timeout_is_a_timeout_on_every_rank_and_names_who_did_not_come(pool: RankPool, backend: str) -> None:
    victim = 0
    for (kind, text, facts), again in pool.run(never_comes, backend, victim, world_size=WORLD, timeout=60):
        assert kind == "CommTimeout", text
        assert facts["missing"] == [victim]
        assert facts["op"] == "all_reduce"
        assert facts["waited"] == pytest.approx(3.0, abs=2.5)
        assert again[0] == "CommTimeout"


def strays(context: RankContext, backend: str, victim: int, how: str) -> Any:
    dist = begin(context, backend, timeout=4.0)
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
    context.store.set(f"done{context.rank}", "1")
    context.store.wait([f"done{rank}" for rank in range(context.world_size)])
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["op", "dtype", "size"])
def test_a_rank_in_another_collective_is_named_with_both_sides(pool: RankPool, backend: str, how: str) -> None:
    victim = 2
    for kind, text, facts in pool.run(strays, backend, victim, how, world_size=WORLD, timeout=60):
        assert kind == "CollectiveMismatch", text
        assert f"rank {victim}: " in text
        assert "rank 0: " in text or "rank 1: " in text
        assert text.count("test_stall.py:") >= 2
        assert facts["sequence"] == 1


def dies(context: RankContext, backend: str, victim: int, how: str) -> Any:
    dist = begin(context, backend, timeout=120.0)
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
        # The kernel tells the signal only until somebody has reaped the process.
        assert facts["signal"] in (None, getattr(signal, how, None))


def living(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(outcome.ok for outcome in survivors), "\n".join(map(str, outcomes))
    return survivors


def stuck(context: RankContext, backend: str, victim: int, where: str) -> Any:
    dist = begin(context, backend)
    if context.rank == victim:
        if where == "python":
            stuck_in_a_loop(3.5)
        else:
            stuck_in_c(3500)
    dist.all_reduce(torch.ones(4))


def stuck_in_a_loop(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def stuck_in_c(milliseconds: int) -> None:
    # PyDLL keeps the GIL: nothing of Python runs in this process meanwhile.
    ctypes.PyDLL(None).poll(None, 0, milliseconds)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["python", "C with the GIL"])
def test_a_stuck_rank_is_named_with_the_line_it_is_stuck_at(pool: RankPool, backend: str, where: str) -> None:
    victim = 0
    outcomes = pool.try_run(stuck, backend, victim, where, world_size=WORLD, timeout=60)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    function = "stuck_in_a_loop" if where == "python" else "stuck_in_c"
    for outcome in outcomes:
        if outcome.rank != victim:
            assert f"for rank {victim}; rank {victim} (host " in outcome.output
            assert f"in {function}" in outcome.output


def in_another_group(context: RankContext) -> Any:
    dist = begin(context, "gloo")
    pair = dist.new_group([1, 2])
    if context.rank == 2:
        time.sleep(3)
    if context.rank in (1, 2):
        dist.all_reduce(torch.ones(2), group=pair)
    dist.all_reduce(torch.ones(4))


def test_a_rank_that_waits_in_another_group_is_described_by_that_call(pool: RankPool) -> None:
    outcomes = pool.try_run(in_another_group, world_size=WORLD, timeout=60)
    assert all(outcome.ok for outcome in outcomes)
    assert "is in all_reduce #0 (float32, 8 B, SUM, group " in outcomes[0].output
    assert "rank 2 (host" in outcomes[1].output


def one_call_sooner(context: RankContext) -> Any:
    from ringway.observe.stall import stall_after, watch

    dist = begin(context, "gloo")
    watch.seconds = 30.0
    if context.rank == 1:
        time.sleep(2.5)
    with stall_after(0.5):
        dist.all_reduce(torch.ones(4))


def test_one_call_may_stall_sooner_than_the_rest(pool: RankPool) -> None:
    outcomes = pool.try_run(one_call_sooner, world_size=2, timeout=60)
    assert all(outcome.ok for outcome in outcomes)
    assert "for rank 1" in outcomes[0].output


def watched_badly(context: RankContext) -> Any:
    """Its watch fails each time it looks, and its explanation fails too: neither may disturb, nor pass unseen."""
    from ringway.observe.stall import watch

    dist = begin(context, "gloo", timeout=3.0)
    if context.rank == 1:
        time.sleep(5)
        return caught(dist)

    def fail(*_: Any) -> Any:
        raise LookupError("of the test's own")

    watch._look = watch.investigate = fail  # type: ignore[method-assign]
    try:
        result = caught(dist)
        assert all(thread.is_alive() for thread in watch._threads)
    finally:
        del watch._look, watch.investigate
    return result


def test_what_fails_in_the_watch_is_said_once_and_disturbs_nothing(pool: RankPool) -> None:
    outcomes = pool.try_run(watched_badly, world_size=2, timeout=100)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    kind, _, facts = outcomes[0].value
    assert kind == "CommTimeout"
    assert facts["op"] == "all_reduce"
    said = outcomes[0].output
    assert said.count("waiting calls could not be looked at (told once): LookupError: of the test's own") == 1
    assert said.count("a failed call could not be explained (told once): LookupError: of the test's own") == 1
    pool.replace()
