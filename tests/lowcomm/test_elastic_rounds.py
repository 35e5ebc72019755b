"""DiLoCo whose sites come and go."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import elastic_processes
from elastic_processes import Fate, run_job
from ringway.errors import UsageError
from ringway.job.elastic.job import ElasticJob
from ringway.lowcomm import DiLoCo, ElasticRounds, SparseLoCo
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

EVERY = 4
STEPS = 6
NUMEL = 5000


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(NUMEL, 1, bias=False)


def gradient_of(round_: int, step: int) -> torch.Tensor:
    """The same on every site, so the outcome does not depend on which sites there were."""
    return torch.randn(1, NUMEL, generator=torch.Generator().manual_seed(100 * round_ + step))


def train_round(model: nn.Module, rounds: ElasticRounds, round_: int) -> None:
    while rounds.steps_left:
        rounds.zero_grad()
        next(model.parameters()).grad = gradient_of(round_, EVERY - rounds.steps_left)
        rounds.step()


class Plain(elastic_processes.Process):
    """Trains in rounds until its fate."""

    kind: type[DiLoCo] = DiLoCo
    codec: str | None = None

    def _train(self) -> None:
        self._wait_for_its_step()
        model = model_of()
        inner = torch.optim.SGD(model.parameters(), lr=0.125)
        with ElasticJob(grace=self._grace) as job:
            rounds = ElasticRounds(job, self.kind, model, inner, every=EVERY, codec=self.codec)
            state = {"rounds": rounds}
            for attempt in job.steps(state, until=self._steps):
                self._step = attempt.step
                done = False
                with attempt:
                    self._end("start")
                    train_round(model, rounds, attempt.step)
                    self._end("before commit")
                    if attempt.step == STEPS - 1 and job.size < 3:  # the last one is on its way
                        time.sleep(0.02)
                        attempt.commit(ok=False)
                    rounds.exchange(attempt)
                    done = True
                if done:
                    self._made(attempt.step, job)
        if state["step"] == self._steps:
            self._say("end", next(model.parameters()).detach().flatten()[:50].tolist())


class Int8(Plain):
    codec = "int8"


class Sparse(Plain):
    kind, codec = SparseLoCo, "topk:0.1:4"


def expected() -> list[float]:
    """What one site alone arrives at: DiLoCo by its formulas."""
    parameter = next(model_of().parameters()).detach().flatten()
    anchor, momentum = parameter.clone(), torch.zeros(NUMEL)
    for round_ in range(STEPS):
        for step in range(EVERY):
            parameter = parameter - 0.125 * gradient_of(round_, step).flatten()
        delta = anchor - parameter
        momentum = 0.9 * momentum + delta if round_ else delta
        anchor = anchor - 0.7 * (delta + 0.9 * momentum)
        parameter = anchor.clone()
    return parameter[:50].tolist()


FATES = [Fate(), Fate(ends=2, moment="before commit"), Fate(), Fate(joins=4)]


def _run(context: RankContext, name: str) -> list[list[float]]:
    leave()  # the group of an earlier test
    outcome = run_job(FATES, STEPS, {"plain": Plain, "int8": Int8, "sparse": Sparse}[name])
    assert outcome.killed == 1
    assert outcome.sizes[:2] == [3, 3]
    assert outcome.sizes[2] == 2
    assert outcome.sizes[-1] == 3
    return outcome.ends


@pytest.mark.timeout(400)
def test_sites_that_die_and_join(pool: RankPool) -> None:
    for name in ("plain", "int8", "sparse"):
        (ends,) = pool.run(_run, name, world_size=1)
        assert len(ends) == 3
        if name == "plain":  # the average of equal numbers rounds, depending on how many there are
            torch.testing.assert_close(torch.tensor(ends[0]), torch.tensor(expected()), rtol=1e-5, atol=1e-5)


class _Job:
    def on_change(self, callback: object) -> None: ...


def test_misuse_is_refused() -> None:
    told = []
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in ({"delay": 1}, {"fragments": 2}, {"group": None}):
        try:
            ElasticRounds(_Job(), DiLoCo, model, inner, every=EVERY, **options)
        except UsageError as error:
            told.append(str(error))
    try:
        ElasticRounds(_Job(), DiLoCo, model, inner, every=EVERY).step()
    except UsageError as error:
        told.append(str(error))
    assert [text.partition(":")[0] for text in told] == [
        "ElasticRounds cannot take delay=",
        "ElasticRounds cannot take fragments=",
        "ElasticRounds cannot take group=",
        "the ranks have not met",
    ]
