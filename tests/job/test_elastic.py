"""Elastic jobs: ranks are killed, leave and join at random moments, and the others go on as if nothing had happened."""

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as c10d
from torch import Tensor, nn

import ringway
import ringway.backends.ccl.backend  # here once, rather than in every process that is forked
import ringway.backends.shm.backend
from ringway.errors import RendezvousError, UsageError
from ringway.job.elastic import state as elastic_state
from ringway.job.elastic.job import Attempt, Change, ElasticJob
from ringway.job.elastic.roster import Arrival, Generation, Member, Roster
from ringway.launch.processes import ProcessName
from ringway.launch.run import store_of_a_run
from ringway.testing import RankContext, RankPool
from ringway.testing.forkserver import die_with_parent
from ringway.testing.rank import leave

T = TypeVar("T")
PROGRAMS = 10_000 if os.environ.get("RINGWAY_SOAK") else 200
SECONDS = 60.0
"""Until a program counts as hung: much longer than it takes."""

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


class Sum(nn.Module):
    """Its gradients are the inputs. It counts its forward passes, which a repeated step must not count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.two = nn.Parameter(torch.ones(40_000, dtype=torch.float64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        self.passes += 1
        return (self.one * values).sum() + (self.two * values[0]).sum()


def _values(step: int, rank: int) -> Tensor:
    return torch.randint(-8, 9, (3,), generator=torch.Generator().manual_seed(1000 * step + rank)).double()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def _contents(model: Sum, optimizer: torch.optim.Optimizer) -> list[float]:
    momentum = [optimizer.state[p]["momentum_buffer"] for p in (model.one, model.two) if p in optimizer.state]
    return [float(value) for tensor in (model.one, model.two, *momentum) for value in tensor.detach()[:3]] + [
        float(model.passes)
    ]


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
        optimizer = _optimizer(model)
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
            self._say("end", _contents(model, optimizer))

    def _changed(self, change: Change) -> None:
        self._end("change")

    def _attempt(self, job: ElasticJob, attempt: Attempt, model: Sum, optimizer: torch.optim.Optimizer) -> None:
        self._step = attempt.step
        done = False
        with attempt:
            self._end("start")
            model(_values(attempt.step, job.rank)).backward()
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
    expected = _simulated([committed[step][1] for step in range(program.steps)])
    torch.testing.assert_close(torch.tensor(ends[0]), torch.tensor(expected), rtol=1e-12, atol=1e-12)


def _read_all(fd: int) -> bytes:
    said, deadline = b"", time.monotonic() + SECONDS
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(fd, 1 << 16)
        if not part:
            return said
        said += part
    raise TimeoutError("a process still runs")


def _simulated(sizes: list[int]) -> list[float]:
    """The end of a world that had `sizes[step]` ranks in each step."""
    model = Sum()
    optimizer = _optimizer(model)
    for step, size in enumerate(sizes):
        model.passes += 1
        optimizer.zero_grad()
        mean = sum(_values(step, rank) / size for rank in range(size))
        assert isinstance(mean, Tensor)
        model.one.grad, model.two.grad = mean, mean[0].expand(40_000).contiguous()
        optimizer.step()
    return _contents(model, optimizer)


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


# One thing at a time


def _enter(context: RankContext) -> None:
    """Makes a rank of the pool look like one that `ringway run` started. The variables of the store are set already."""
    leave(ringway)
    torch.set_num_threads(1)
    size = str(context.world_size)
    os.environ.update(RANK=str(context.rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1")


def _in_a_run(pool: RankPool, function: Callable[..., T], world_size: int, *arguments: Any) -> list[T]:
    with store_of_a_run() as variables:
        try:
            return pool.run(function, *arguments, world_size=world_size, timeout=SECONDS, environment={**variables})
        finally:
            pool.replace()


def _votes(context: RankContext) -> tuple[list[int], float, float]:
    """Rank 1 votes once against step 1."""
    _enter(context)
    model, attempts = Sum(), []
    optimizer = _optimizer(model)
    with ElasticJob() as job:
        job.data_parallel(model)
        for attempt in job.steps({"model": model, "optimizer": optimizer}, until=3):
            with attempt:
                attempts.append(attempt.step)
                model(_values(attempt.step, 0)).backward()
                attempt.commit(ok=attempts.count(1) != 1 or job.rank != 1)
                optimizer.step()
        assert job.generation == 1
    return attempts, float(model.passes), float(model.one[0])


def test_a_step_that_a_rank_votes_against_is_repeated(pool: RankPool) -> None:
    wanted = sum(_simulated([1, 1, 1])[:1])
    for attempts, passes, value in _in_a_run(pool, _votes, 2):
        assert attempts == [0, 1, 1, 2]
        assert passes == 3
        assert value == pytest.approx(wanted)


def _error_of_the_program(context: RankContext) -> list[Any]:
    """Rank 1 makes a mistake in step 1. The other goes on alone, and knows whom it lost."""
    _enter(context)
    model, changes = Sum(), []
    with ElasticJob() as job:
        job.on_change(changes.append)
        job.data_parallel(model)
        for attempt in job.steps({"model": model}, until=3):
            with attempt:
                if attempt.step == 1 and context.rank == 1:
                    raise KeyError("a mistake of the program")
                model(_values(attempt.step, 0)).backward()
                attempt.commit()
    return [[change.size, change.step, len(change.joined), len(change.left)] for change in changes]


def test_an_error_of_the_program_ends_its_rank_only(pool: RankPool) -> None:
    with store_of_a_run() as variables:
        first, second = pool.try_run(_error_of_the_program, world_size=2, timeout=SECONDS, environment={**variables})
    assert first.value == [[2, 0, 2, 0], [1, 1, 0, 1]]
    assert "a mistake of the program" in str(second)
    pool.replace()


def _too_few(context: RankContext) -> str:
    _enter(context)
    model = Sum()
    try:
        with ElasticJob(min_ranks=2, patience=1.0) as job:
            for attempt in job.steps({"model": model}, until=3):
                if context.rank == 1:
                    break
                with attempt:
                    attempt.commit()
    except RendezvousError as error:
        return str(error)
    return "left"


def test_too_few_ranks_wait_and_then_say_so(pool: RankPool) -> None:
    waited, left = _in_a_run(pool, _too_few, 2)
    assert left == "left"
    assert "1 ranks are here, and at least 2 are needed" in waited


def _store_gone(context: RankContext) -> str:
    leave(ringway)
    with ExitStack() as open_:
        variables = open_.enter_context(store_of_a_run())
        os.environ.update(variables, RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        try:
            with ElasticJob() as job:
                for attempt in job.steps({}):
                    with attempt:
                        attempt.commit()
                        open_.close()
                        job._someone_waits = True
        except RendezvousError as error:
            return str(error)
    return "went on"


def test_a_rank_that_cannot_reach_the_store_stops(pool: RankPool) -> None:
    (said,) = pool.run(_store_gone, world_size=1, timeout=SECONDS)
    assert "the job's store is out of reach" in said
    pool.replace()


def _misuse(context: RankContext) -> list[str]:
    leave(ringway)
    said = []

    def refused(mistake: Callable[[], object], kind: type[Exception] = UsageError) -> None:
        try:
            mistake()
        except kind as error:
            said.append(str(error))
            return
        raise AssertionError("accepted")

    refused(lambda: ElasticJob(min_ranks=0))
    refused(lambda: next(ElasticJob().steps({})))
    with store_of_a_run() as variables:
        os.environ.update(variables, RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        with ElasticJob() as job:
            refused(lambda: job.rank)
            refused(lambda: next(job.steps({"step": "one"})))
            loop = job.steps({})
            attempt = next(loop)
            refused(lambda: next(loop))
            refused(lambda: next(job.steps({})))
            refused(ElasticJob().__enter__)
            with attempt:
                attempt.commit()
                refused(attempt.commit)
            refused(lambda: Attempt(job, attempt._state).__exit__(None, None, None))
    return said


def test_misuse_is_refused(pool: RankPool) -> None:
    (said,) = pool.run(_misuse, world_size=1, timeout=SECONDS)
    expected = (
        "min_ranks=0",
        "in a with statement",
        "in no generation",
        "state['step'] is 'one'",
        "'with attempt:'",
        "a job has one loop",
        "initialized already",
        "called twice",
        "without commit()",
    )
    for text, part in zip(said, expected, strict=True):
        assert part in text
    pool.replace()


def _mismatch(context: RankContext) -> str:
    _enter(context)
    try:
        with ElasticJob() as job:
            for attempt in job.steps({}, until=3):
                with attempt:
                    if context.rank == 0:
                        ringway.all_reduce(torch.ones(3))
                    else:
                        ringway.broadcast(torch.ones(3), 0)
                    attempt.commit()
    except ringway.errors.CollectiveMismatch:
        return "named"
    return "repeated"


def test_different_calls_are_no_reason_to_repeat_a_step(pool: RankPool) -> None:
    assert _in_a_run(pool, _mismatch, 2) == ["named", "named"]


def _wrapped(context: RankContext) -> list[float]:
    """DDP, made anew for each generation. Rank 2 dies in backward."""
    _enter(context)
    model = Sum()
    optimizer = _optimizer(model)
    wrapped: list[nn.parallel.DistributedDataParallel] = []
    with ElasticJob() as job:

        @job.on_change
        def wrap(change: Change) -> None:
            wrapped[:] = [nn.parallel.DistributedDataParallel(model)]

        for attempt in job.steps({"model": model, "optimizer": optimizer}, until=4):
            with attempt:
                loss = wrapped[0](_values(attempt.step, job.rank))
                if attempt.step == 2 and context.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                attempt.commit()
                optimizer.step()
    return _contents(model, optimizer)


def test_ddp_is_wrapped_again_in_on_change(pool: RankPool) -> None:
    with store_of_a_run() as variables:
        first, second, third = pool.try_run(_wrapped, world_size=3, timeout=SECONDS, environment={**variables})
    pool.replace()
    assert not third.ok
    assert first.value == second.value
    torch.testing.assert_close(
        torch.tensor(first.value), torch.tensor(_simulated([3, 3, 2, 2])), rtol=1e-12, atol=1e-12
    )


def _copied(context: RankContext) -> dict[str, Any]:
    """Rank 0's state becomes that of all ranks: nested, empty and large parts, other dtypes, plain values."""
    _enter(context)
    seed = torch.Generator().manual_seed(context.rank)
    state = {
        "table": {"rows": [torch.rand(5, generator=seed), (torch.rand(2, 3, generator=seed).t(), context.rank)]},
        "half": torch.rand(7, generator=seed).bfloat16(),
        "large": torch.rand(5 << 20, generator=seed),
        "nothing": torch.empty(0),
        "seen": {"words": f"of rank {context.rank}"},
    }
    with ElasticJob() as job:
        for attempt in job.steps(state, until=1):
            with attempt:
                attempt.commit()
        words = state.pop("seen")
        return {"rank": job.rank, "words": words, "tensors": state}


def test_every_kind_of_state_is_copied(pool: RankPool) -> None:
    ended = _in_a_run(pool, _copied, 3)
    assert [each["rank"] for each in ended] == [0, 1, 2]
    for other in ended[1:]:
        assert other["words"] == {"words": "of rank 0"}
        torch.testing.assert_close(other["tensors"], ended[0]["tensors"], rtol=0, atol=0)


def test_a_process_with_another_version_is_refused() -> None:
    """It refuses itself, before the others wait for it."""
    store = c10d.HashStore()
    first, second = (Roster(store, 1, 1, 30.0, 30.0) for _ in range(2))
    member = first.enroll(0)
    formed = first.next(Arrival(member, 0, whole=True, veteran=False), ())
    assert formed is not None
    other = replace(second.enroll(0), version="0.0.1")
    with pytest.raises(RendezvousError, match=r"has ringway 0\.0\.1, and rank 0 .* has "):
        second.next(Arrival(other, 0, whole=True, veteran=False), ())
    assert not first.someone_waits_after(formed)


@pytest.mark.parametrize("text", ["", "[]", '{"number": 1}', "[" * 5000, '{"number": 1, "arrivals": [{"member": 3}]}'])
def test_a_list_of_ranks_that_a_stranger_wrote_is_refused(text: str) -> None:
    store = c10d.HashStore()
    roster = Roster(store, 1, 1, 30.0, 30.0)
    member = roster.enroll(0)
    store.set("ringway/elastic/generation", text)
    with pytest.raises(RendezvousError, match="unknown format"):
        roster.next(Arrival(member, 0, whole=True, veteran=False), ())


def test_sources_have_the_newest_whole_state() -> None:
    def arrival(number: int, step: int, whole: bool = True, veteran: bool = True) -> Arrival:
        return Arrival(Member(number, 0, ProcessName("host", 1, "")), step, whole, veteran)

    assert Generation(2, (arrival(1, 4), arrival(2, 5), arrival(3, 5))).sources() == [1, 2]
    assert Generation(2, (arrival(1, 4), arrival(2, 5, whole=False))).sources() == [0]
    assert Generation(2, (arrival(1, 4), arrival(2, 9, veteran=False))).sources() == [0]
    assert Generation(2, (arrival(1, 4, whole=False), arrival(2, 0, veteran=False))).sources() == [1]
    assert Generation(1, (arrival(1, 0, veteran=False), arrival(2, 0, veteran=False))).sources() == [0]
    assert Generation(2, (arrival(1, 4, whole=False),)).sources() == []
