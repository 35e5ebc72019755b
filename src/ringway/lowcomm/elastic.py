"""DiLoCo in a job whose ranks come and go: they do so at outer steps.

The sites communicate only at the end of a round, which is one step of the job. If a site is lost, the others repeat the
exchange without it. They keep what they learned in the round. A site that joins starts at the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from ringway.errors import UsageError
from ringway.lowcomm.diloco import DiLoCo

_REFUSED = {
    "group": "the sites are the ranks of the job",
    "site": "a site has one rank",
    "fragments": "all of the model is exchanged at the end of a round",
    "delay": "a round ends with its exchange",
    "mix": "a round ends with its exchange",
    "broadcast": "sites that join get the anchor from the others",
}


class Change(Protocol):
    """What is used of `ElasticJob`'s changes."""

    @property
    def step(self) -> int: ...


class Job(Protocol):
    """What is used of `ElasticJob`."""

    def on_change(self, callback: Callable[[Any], None], /) -> Any: ...


class Attempt(Protocol):
    """What is used of its attempts."""

    def commit(self) -> None: ...


class ElasticRounds:
    """`DiLoCo` or `SparseLoCo` in an `ElasticJob`. A step of the job is a round: `every` inner steps and an outer one.

        rounds = ElasticRounds(job, DiLoCo, model, inner_optimizer, every=50)
        for attempt in job.steps({"rounds": rounds}, until=200):
            with attempt:
                while rounds.steps_left:
                    rounds.zero_grad()
                    loss(model, next_batch()).backward()
                    rounds.step()
                rounds.exchange(attempt)

    The arguments after the job are the optimizer's class and its arguments. The anchors and the outer optimizer are the
    state that the ranks have in common. Parameters, residuals and the inner optimizer's state belong to one rank; those
    of a rank that joins start at the anchor, and empty.
    """

    def __init__(self, job: Job, kind: type[DiLoCo], *arguments: Any, **options: Any) -> None:
        for name in _REFUSED.keys() & options.keys():
            raise UsageError(f"ElasticRounds cannot take {name}=: {_REFUSED[name]}")
        self._make = lambda: kind(*arguments, broadcast=False, **options)
        self._optimizer: DiLoCo | None = None
        self._copied: Mapping[str, Any] | None = None
        self._steps = 0
        job.on_change(self._changed)

    @property
    def optimizer(self) -> DiLoCo:
        """The optimizer of the current generation of ranks."""
        if self._optimizer is None:
            raise UsageError("the ranks have not met: they meet when job.steps() begins")
        return self._optimizer

    @property
    def steps_left(self) -> int:
        """Inner steps until the end of the round: none if the exchange is repeated."""
        return self.optimizer.every - self._steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """One inner step."""
        if not self.steps_left:
            raise UsageError(f"the round has had its {self._steps} inner steps: call exchange(attempt)")
        self.optimizer.inner_step()
        self._steps += 1

    def exchange(self, attempt: Attempt) -> None:
        """Average over the sites, commit the attempt, and take the outer step."""
        if self.steps_left:
            raise UsageError(f"exchange: {self.steps_left} inner steps of this round are left")
        optimizer = self.optimizer
        averages = optimizer.averages()
        try:
            attempt.commit()
        except BaseException:  # the exchange is repeated
            for average in averages:
                average.undo()
            raise
        optimizer.outer_step(averages)
        self._steps = 0

    # The state that the ranks have in common

    def state_dict(self) -> dict[str, Any]:
        return {} if self._optimizer is None else self._optimizer.common_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """This rank joins, or missed an outer step: it goes on from the others' anchor."""
        self._copied = state or None

    def _changed(self, change: Change) -> None:
        """The ranks have changed: an optimizer for the new group takes over what the last one had."""
        last, copied = self._optimizer, self._copied
        residuals: list[Tensor | None] = []
        if last is not None and copied is None:
            copied = last.common_state()
            residuals = [last.feedback[number].worker for number in range(last.fragments)]
        if last is not None:
            last.close()
        self._optimizer = optimizer = self._make()
        if copied is not None:
            optimizer.take_common_state(copied)
        if change.step == 0:
            optimizer.share_anchors()
        if last is None or self._copied is not None:
            optimizer.return_to_anchors()
            self._copied, self._steps = None, 0
        for number, residual in enumerate(residuals):
            optimizer.feedback[number].restore(residual, None)  # this rank serves another part now
        if last is not None:
            optimizer.report = last.report
