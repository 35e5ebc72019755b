"""Random elastic jobs: ranks are killed, leave, are cut off and join at any moment, and the others go on as if nothing
happened."""

from __future__ import annotations

import gc
import os
import random
import time
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ringway
from elastic_model import SECONDS, simulated
from elastic_processes import MOMENTS, SPLIT, Fate, Process, run_job
from ringway.job.elastic.job import ElasticJob
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

PROGRAMS = 10_000 if os.environ.get("RINGWAY_SOAK") else 200
ROUND = 200
FAULTS = 20


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
        if draw.random() < 0.1:
            self._split(draw)

    def _split(self, draw: random.Random) -> None:
        """One process is cut off, and comes back."""
        others = [number for number, fate in enumerate(self.fates) if fate.moment]
        if others:
            number = draw.choice(others)
            self.fates[number] = Fate(self.fates[number].joins, draw.randrange(self.steps), SPLIT)

    def _end(self, draw: random.Random) -> tuple[int | None, str]:
        return (draw.randrange(self.steps), draw.choice(MOMENTS)) if draw.random() < 0.5 else (None, "")


def _run(program: Program) -> None:
    """Runs a program, and compares what is left with a world that had those ranks from the start."""
    outcome = run_job(program.fates, program.steps)
    expected = simulated(outcome.sizes)
    torch.testing.assert_close(torch.tensor(outcome.ends[0]), torch.tensor(expected), rtol=1e-12, atol=1e-12)


def _run_programs(seeds: range) -> None:
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
    assert failed == []  # here, so that what the processes printed is shown


@pytest.mark.timeout(60 + 8 * PROGRAMS)
def test_random_programs(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    """On half of the cores, in rounds. With RINGWAY_SOAK=1, each round is reported."""
    workers = max(2, min(pool.size, len(os.sched_getaffinity(0)) // 2))
    first, began = random.SystemRandom().randrange(1 << 30), time.monotonic()
    for done in range(0, PROGRAMS, ROUND):
        each = ROUND // workers
        begins = [first + done + rank * each for rank in range(workers)]
        ends = [*begins[1:], first + done + ROUND]
        shares = [range(begin, end) for begin, end in zip(begins, ends, strict=True)]
        pool.run(_programs_of_rank, shares, world_size=workers, timeout=50 + 8 * ROUND, grace=50 + 8 * ROUND)
        if PROGRAMS > ROUND:
            with capsys.disabled():
                print(f"{done + ROUND} of {PROGRAMS} programs, {time.monotonic() - began:.0f} s", flush=True)
    pool.replace()
    print(f"{PROGRAMS} programs from seed {first}: 0 hangs, 0 differences")


def _programs_of_rank(context: RankContext, shares: list[range]) -> None:
    _run_programs(shares[context.rank])


# 20 faults, and the loss


RANKS, BATCH, STEPS = 3, 12, 3 * FAULTS


def _samples(step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    return inputs, (inputs.sum(1) > 0).long()


class Training(Process):
    """Trains a classifier on the same samples in every step, divided among the ranks that are there."""

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 2))

    def loss(self, model: nn.Module, step: int, job: ElasticJob) -> Tensor:
        # A process takes longer to start than a step. The last two that are killed are not replaced.
        while job.rank == 0 and 1 < job.size < RANKS and step < STEPS - 4 and not job._saw_newcomers:
            time.sleep(0.005)
        inputs, labels = (each[job.rank :: job.size] for each in _samples(step))
        # The hooks take the mean over the ranks.
        return functional.cross_entropy(model(inputs), labels, reduction="sum") * job.size / BATCH

    def contents(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        with torch.no_grad():
            held_out = [_samples(step) for step in range(10_000, 10_020)]
            losses = [functional.cross_entropy(model(inputs), labels) for inputs, labels in held_out]
        return [float(torch.stack(losses).mean()), *(float(value) for p in model.parameters() for value in p.flatten())]


def _with_faults(context: RankContext, seed: int) -> tuple[int, list[float], list[float]]:
    leave(ringway)
    torch.set_num_threads(1)
    gc.collect()
    draw = random.Random(seed)
    kills = ("start", "backward", "before commit", "after commit", "after step")
    # One process stays. Of the others, one is killed every third step, and another takes its place.
    fates = [Fate(), Fate(0, 2, draw.choice(kills)), Fate(0, 5, draw.choice(kills))]
    for fault in range(2, FAULTS):
        fates.append(Fate(3 * fault - 4, 3 * fault + 2, draw.choice(kills)))
    faulty, calm = run_job(fates, STEPS, Training), run_job([Fate()], STEPS, Training)
    return faulty.killed, faulty.ends[0], calm.ends[0]


def test_the_loss_after_20_faults_is_that_of_a_run_without_faults(pool: RankPool) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    ((killed, faulty, calm),) = pool.run(_with_faults, seed, world_size=1, timeout=2 * SECONDS + 20)
    pool.replace()
    assert killed == FAULTS
    torch.testing.assert_close(torch.tensor(faulty), torch.tensor(calm), rtol=2e-4, atol=2e-5)
    assert abs(faulty[0] - calm[0]) < 1e-5 * calm[0]
