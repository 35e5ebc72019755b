"""Random elastic jobs: ranks are killed, leave and join at any moment, and the others go on as if nothing happened."""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import random
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

import ringway
import ringway.backends.ccl.backend  # here once, rather than in every process that is forked
import ringway.backends.shm.backend
from elastic_model import SECONDS, Sum, contents_of, optimizer_of, simulated, values_of
from ringway.job.elastic import state as elastic_state
from ringway.job.elastic.job import Attempt, Change, ElasticJob
from ringway.launch.run import store_of_a_run
from ringway.testing import RankContext, RankPool
from ringway.testing.forkserver import die_with_parent
from ringway.testing.rank import leave

PROGRAMS = 10_000 if os.environ.get("RINGWAY_SOAK") else 200
MOMENTS = ("start", "backward", "before commit", "commit", "after commit", "after step", "change", "copy", "leave")


@dataclass(frozen=True)
class Fate:
    """What one process does: it joins at a step, and ends at a moment of a later step, or never."""

    joins: int = 0
    ends: int | None = None
    moment: str = ""


@dataclass
class Program:
    seed: int
    steps: int = 0
    fates: list[Fate] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.steps = draw.randint(2, 8)
        initial, joining = draw.choice([1, 2, 2, 2, 3, 4]), draw.choice([0, 0, 1, 1, 2])
        self.fates = [Fate(0, *self._end(draw)) for _ in range(initial)]
        self.fates[draw.randrange(initial)] = Fate()  # someone keeps the state
        self.fates += [Fate(draw.randrange(self.steps), *self._end(draw)) for _ in range(joining)]

    def _end(self, draw: random.Random) -> tuple[int | None, str]:
        return (draw.randrange(self.steps), draw.choice(MOMENTS)) if draw.random() < 0.5 else (None, "")

    @property
    def initial(self) -> int:
        return sum(fate.joins == 0 for fate in self.fates)


class Process:
    """One process of a program."""

    def __init__(self, fate: Fate, steps: int, progress: mmap.mmap, output: int) -> None:
        self._fate = fate
        self._steps = steps
        self._progress = progress
        self._output = output
        self._step = -1
        self._left = False

    def _end(self, moment: str) -> None:
        fate = self._fate
        if fate.moment == moment and fate.ends is not None and self._step >= fate.ends:
            os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, kind: str, content: object) -> None:
        os.write(self._output, (json.dumps([kind, content]) + "\n").encode())

    def run(self) -> None:
        while struct.unpack_from("q", self._progress)[0] < self._fate.joins:
            time.sleep(0.001)
        model = Sum()
        model.one.register_hook(lambda _: self._end("backward"))
        optimizer = optimizer_of(model)
        copied = elastic_state._send_piece
        elastic_state._send_piece = lambda *arguments: (copied(*arguments), self._end("copy"))[0]  # type: ignore[assignment]
        with ElasticJob() as job:
            job.data_parallel(model)
            job.on_change(self._changed)
            state = {"model": model, "optimizer": optimizer}
            for attempt in job.steps(state, until=self._steps):
                if self._fate.moment == "leave" and attempt.step == self._fate.ends:
                    self._left = True
                    break
                self._attempt(job, attempt, model, optimizer)
        if state["step"] == self._steps and not self._left:  # else it came too late
            self._say("end", contents_of(model, optimizer))

    def _changed(self, change: Change) -> None:
        self._end("change")

    def _attempt(self, job: ElasticJob, attempt: Attempt, model: Sum, optimizer: torch.optim.Optimizer) -> None:
        self._step = attempt.step
        done = False
        with attempt:
            self._end("start")
            model(values_of(attempt.step, job.rank)).backward()
            self._end("before commit")
            if self._fate.moment == "commit" and self._fate.ends == attempt.step:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-3))  # ends the process
            attempt.commit()
            self._end("after commit")
            optimizer.step()
            self._end("after step")
            done = True
        if done:
            self._say("step", [attempt.step, job.generation, job.size])
            if attempt.step + 1 > struct.unpack_from("q", self._progress)[0]:
                struct.pack_into("q", self._progress, 0, attempt.step + 1)


def _fork(fate: Fate, program: Program, rank: int, variables: dict[str, str], progress: mmap.mmap, output: int) -> int:
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        faulthandler.dump_traceback_later(SECONDS - 10, exit=True)
        size = program.initial
        os.environ.update(variables, RANK=str(min(rank, size - 1)), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        Process(fate, program.steps, progress, output).run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


@contextmanager
def _private_store() -> Iterator[dict[str, str]]:
    with store_of_a_run() as variables:
        yield variables | {"MASTER_ADDR": "127.0.0.1"}


def _run(program: Program) -> None:
    """Runs a program, and compares what is left with a world that had those ranks from the start."""
    progress = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    with _private_store() as variables, open(reader, "rb", buffering=0) as lines:
        children = [_fork(fate, program, rank, variables, progress, writer) for rank, fate in enumerate(program.fates)]
        os.close(writer)
        said = _read_all(lines.fileno())
        statuses = [os.waitpid(child, 0)[1] for child in children]
    told = [json.loads(line) for line in said.decode().splitlines()]
    codes = [os.waitstatus_to_exitcode(status) for status in statuses]
    assert all(code in (0, -signal.SIGKILL, -signal.SIGALRM) for code in codes), codes
    assert all(fate.moment or code == 0 for fate, code in zip(program.fates, codes, strict=True)), codes
    committed: dict[int, tuple[int, int]] = {}
    for step, generation, size in (content for kind, content in told if kind == "step"):
        committed[step] = max(committed.get(step, (0, 0)), (generation, size))
    assert sorted(committed) == list(range(program.steps))
    ends = [content for kind, content in told if kind == "end"]
    assert ends
    assert all(end == ends[0] for end in ends), "the survivors differ"
    expected = simulated([committed[step][1] for step in range(program.steps)])
    torch.testing.assert_close(torch.tensor(ends[0]), torch.tensor(expected), rtol=1e-12, atol=1e-12)


def _read_all(fd: int) -> bytes:
    said, deadline = b"", time.monotonic() + SECONDS
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(fd, 1 << 16)
        if not part:
            return said
        said += part
    raise TimeoutError("a process still runs")


def _run_programs(context: RankContext, seeds: range) -> list[str]:
    leave(ringway)
    torch.set_num_threads(1)
    gc.collect()
    failed = []
    for seed in seeds:
        program = Program(seed)
        try:
            _run(program)
        except (AssertionError, TimeoutError) as error:
            failed.append(f"{program}: {error}")
    return failed


def test_random_programs(pool: RankPool) -> None:
    first = random.SystemRandom().randrange(1 << 30)
    shares = [range(first + rank * PROGRAMS // 2, first + (rank + 1) * PROGRAMS // 2) for rank in range(2)]
    limit = 60 + PROGRAMS * 2.0
    for failed in pool.run(_programs_of_rank, shares, world_size=2, timeout=limit):
        assert failed == []
    pool.replace()


def _programs_of_rank(context: RankContext, shares: list[range]) -> list[str]:
    return _run_programs(context, shares[context.rank])
