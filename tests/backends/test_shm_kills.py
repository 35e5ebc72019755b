"""Ranks killed at random moments: the others are told who died, soon, and nothing is left of the groups."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.backends.process import Process
from ringway.backends.shm.backend import ShmBackend
from ringway.backends.shm.peers import own_pidfd
from ringway.call import ALL_REDUCE, BARRIER, RECV, SEND, Call
from ringway.errors import PeerLost, RendezvousError
from ringway.testing import RankContext, RankPool
from ringway.testing.forkserver import die_with_parent

KILLS = 10_000 if os.environ.get("RINGWAY_SOAK") else 200
SIZE = 3
SECONDS = 60.0
"""Until a rank gives up: much longer than it may take to notice a death."""


class Rank:
    """One rank of a job whose processes are forked from a test's rank."""

    def __init__(self, rank: int, store: c10d.Store, seed: int) -> None:
        self.rank = rank
        self.random = random.Random(seed)  # the same on every rank
        self._store = store
        self._process = Process()
        self._made = 0

    def group(self) -> ShmBackend:
        self._made += 1
        name = f"group {self._made}"
        store = c10d.PrefixStore(name, self._store)
        return ShmBackend(
            GroupInfo(
                rank=self.rank,
                size=SIZE,
                ranks=range(SIZE),
                store=store,
                name=name,
                timeout=SECONDS,
                process=self._process,
            )
        )

    def call(self, *, wait: bool = True) -> Call:
        tensor = torch.ones(self.random.choice([1, 300, 20_000, 400_000]))
        return Call(ALL_REDUCE, (tensor,), (tensor,), size=SIZE, async_op=not wait)

    def exchange(self, group: ShmBackend) -> list[Any]:
        """Messages in a ring of ranks."""
        count, tag = self.random.choice([1, 20_000, 400_000]), 0
        sent, got = torch.ones(count), torch.ones(count)
        after, before = (self.rank + 1) % SIZE, (self.rank - 1) % SIZE
        return [
            group.send(Call(SEND, (sent,), (), peer=after, tag=tag, size=SIZE, async_op=True)),
            group.recv(Call(RECV, (), (got,), peer=before, tag=tag, size=SIZE, async_op=True)),
        ]


def _in_group_creation(self: Rank, world: ShmBackend) -> None:
    self.group().close()


def _in_a_collective(self: Rank, world: ShmBackend) -> None:
    world.all_reduce(self.call())


def _in_a_message(self: Rank, world: ShmBackend) -> None:
    for work in self.exchange(world):
        work.wait()


def _in_teardown(self: Rank, world: ShmBackend) -> None:
    group = self.group()
    group.barrier(Call(BARRIER, size=SIZE))
    self.exchange(group)
    group.all_reduce(self.call(wait=False))
    group.close()
    world.barrier(Call(BARRIER, size=SIZE))


def _in_a_callback(self: Rank, world: ShmBackend) -> None:
    work = world.all_reduce(self.call(wait=False))
    work.when_done(lambda _: time.sleep(0.002))
    work.wait()


MOMENTS = [_in_group_creation, _in_a_collective, _in_a_message, _in_teardown, _in_a_callback]
MEETS = {_in_group_creation.__name__, _in_teardown.__name__}
"""Moments at which ranks meet in a TCP store. torch's server looks up the name of each process that connects, and a
lost answer of the name server stops it for 5 s."""
STORE_STALLS = 6.0


def _held() -> list[int]:
    """The shared segments that this process maps, its descriptors, and its threads."""
    segments = Path("/proc/self/maps").read_text().count("/memfd:ringway (deleted)")
    return [segments, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]


def _survive(self: Rank, moment: Callable[[Rank, ShmBackend], None], report: Callable[[Any], None]) -> None:
    """Does the same thing until another rank is dead."""
    before = _held()
    world = self.group()
    report("begun")
    try:
        while True:
            moment(self, world)
    except (PeerLost, RendezvousError) as error:
        report([time.monotonic(), str(error)])
    world.close()
    del world
    self._process = Process()
    deadline = time.monotonic() + SECONDS
    while (left := _left(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.005)
    report(left)


def _left(before: list[int]) -> list[int]:
    """What is held more than before."""
    now = _held()
    return now if any(a > b for a, b in zip(now, before, strict=True)) else []


class Child:
    """A rank, as its parent sees it."""

    def __init__(self, rank: int, address: tuple[str, int], job: str, seed: int) -> None:
        self._reports, theirs = os.pipe()
        self._go, ours = os.pipe()
        self._release = ours
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(parent)
                os.close(self._reports)
                os.close(ours)
                self._live(rank, address, job, seed, theirs)
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(0)
        os.close(theirs)
        os.close(self._go)
        self.pidfd = os.pidfd_open(self.pid)
        self._lines = self._read()

    def _live(self, rank: int, address: tuple[str, int], job: str, seed: int, reports: int) -> None:
        store = c10d.PrefixStore(job, c10d.TCPStore(*address, is_master=False))
        random_moment = MOMENTS[random.Random(seed).randrange(len(MOMENTS))]

        def report(what: Any) -> None:
            os.write(reports, (json.dumps(what) + "\n").encode())
            if what != "begun":
                os.read(self._go, 1)  # the others must not take this rank's end for the cause

        _survive(Rank(rank, store, seed), random_moment, report)

    def _read(self) -> Iterator[Any]:
        with open(self._reports) as lines:
            for line in lines:
                yield json.loads(line)

    def next(self) -> Any:
        """The next report; None if the process has ended."""
        ready = select.select([self._reports, self.pidfd], [], [], SECONDS)[0]
        if not ready:
            raise TimeoutError("a rank says nothing")
        return next(self._lines, None)

    def go_on(self) -> None:
        os.write(self._release, b".")

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._lines.close()
        for fd in (self.pidfd, self._release):
            os.close(fd)


def _kill_one(address: tuple[str, int], job: str, seed: int) -> dict[str, Any]:
    """One job of three ranks, of which one is killed. Says what the others reported and how long it took them, and how
    long this process, which does nothing else, took to see the death."""
    generator = random.Random(seed)
    children = [Child(rank, address, job, seed) for rank in range(SIZE)]
    victim = generator.randrange(SIZE)
    try:
        for child in children:
            assert child.next() == "begun"
        time.sleep(generator.uniform(0.0, 0.03))
        killed = time.monotonic()
        os.kill(children[victim].pid, signal.SIGKILL)
        assert select.select([children[victim].pidfd], [], [], SECONDS)[0]
        seen = time.monotonic() - killed
        survivors = [child for rank, child in enumerate(children) if rank != victim]
        told = [child.next() for child in survivors]
        for child in survivors:
            child.go_on()
        left = [child.next() for child in survivors]
    finally:
        for child in children:
            child.end()
    names = re.compile(rf"rank {victim} \(pid {children[victim].pid}\)|rank {victim} ended")
    wrong = [report for report in told if report is None or not names.search(report[1])]
    moment = MOMENTS[random.Random(seed).randrange(len(MOMENTS))].__name__
    return {
        "wrong": [f"{moment}, seed {seed}, rank {victim} was killed: {report}" for report in wrong],
        "left": [f"{moment}, seed {seed}: {more}" for more in left if more != []],
        "seconds": [report[0] - killed for report in told if report is not None],
        "stores": moment in MEETS,
        "seen": seen,
    }


def _kill_many(context: RankContext, seed: int, kills: int) -> list[dict[str, Any]]:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: processes that ranks leave would come here
    before = _held()
    found = [
        _kill_one(context._job.store, f"kills {context.rank} {number}", seed + 1000003 * context.rank + number)
        for number in range(kills)
    ]
    with pytest.raises(ChildProcessError):  # no process is left
        os.waitpid(-1, os.WNOHANG)
    assert _held()[:2] == before[:2]
    return found


@pytest.mark.timeout(60 + 3 * KILLS)
def test_survivors_are_told_who_died_and_nothing_is_left(pool: RankPool) -> None:
    pool.replace()  # ranks are forked from these, which must have no threads
    seed = random.randrange(1 << 30)
    print("seed", seed)
    at_once = max(2, (os.cpu_count() or 2) // 2)
    reported = pool.run(_kill_many, seed, KILLS // at_once, world_size=at_once, timeout=50 + 3 * KILLS)
    pool.replace()
    found = list(itertools.chain(*reported))
    wrong, left = (list(itertools.chain(*(kill[what] for kill in found))) for what in ("wrong", "left"))
    seconds = sorted(itertools.chain(*(kill["seconds"] for kill in found)))
    # What the machine does to a process that only waits for the death, it does to the survivors too.
    slowest_look = max(kill["seen"] for kill in found)
    print(f"told after {seconds[len(seconds) // 2]:.3f} s (median), {seconds[-1]:.3f} s (last);"
          f" an observer saw the deaths within {slowest_look:.3f} s")  # fmt: skip
    assert not wrong
    assert not left
    for kill in found:
        limit = 1.0 + 10 * slowest_look + (STORE_STALLS if kill["stores"] else 0.0)
        assert max(kill["seconds"]) < min(limit, SECONDS / 2), kill


def test_a_dead_peer_with_the_same_pid_is_noticed() -> None:
    """In two PID namespaces, such as two containers, both ranks may have the same pid."""
    peer = subprocess.Popen(["sleep", "600"])
    peers = [_core.ShmPeer(os.getpid(), own_pidfd()), _core.ShmPeer(os.getpid(), os.pidfd_open(peer.pid))]
    faults: list[Any] = []

    def fail(outcome: int, fault: Any) -> None:
        faults.append(fault)
        raise InterruptedError

    group = _core.ShmGroup(_core.shm_create_segment(2), 0, peers, 1, SECONDS, fail)
    peer.kill()
    peer.wait()
    with pytest.raises(InterruptedError):
        group.collective(Call(BARRIER, size=2), SECONDS)
    group.close()
    assert (faults[0]["kind"], faults[0]["rank"]) == (2, 1)  # lost, not late
