"""The conformance suite: what every backend must do, as cases that can run on any backend.

    ringway.testing.check_backend("name", world_sizes=(1, 2, 4))

runs each case on real ranks and raises `ConformanceFailed` with the case, the rank, the parameters and the error. The
ranks must know a third-party backend: through an entry point, or with `preload=["its_module"]`, a module that registers
it when imported.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, TypeVar

import torch
import torch.distributed as c10d

from ringway.testing.pool import Outcome, RankContext, RankPool
from ringway.testing.probe import Finding, Probe
from ringway.testing.rank import FunctionRef

F = TypeVar("F", bound=Callable[..., None])

_CASE_MODULES = (
    "cases_movement",
    "cases_reduction",
    "cases_layout",
    "cases_async",
    "cases_p2p",
    "cases_objects",
    "cases_groups",
    "cases_errors",
)
_CASE_SECONDS = 240.0


@dataclass(frozen=True)
class Case:
    """One thing that a backend must do.

    `own_names`: it uses functions that ringway has and torch.distributed does not. `whole_world`: it creates groups, so
    every rank of the world must take part.
    """

    name: str
    run: Callable[[Probe], None]
    min_size: int = 1
    own_names: bool = False
    whole_world: bool = False


CASES: dict[str, Case] = {}


def case(*, min_size: int = 1, own_names: bool = False, whole_world: bool = False) -> Callable[[F], F]:
    """Add a function to the table of cases, under its name."""

    def register(function: F) -> F:
        name = function.__name__
        if name in CASES and CASES[name].run.__module__ != function.__module__:
            raise ValueError(f"two conformance cases are called {name!r}")
        CASES[name] = Case(name, function, min_size, own_names, whole_world)
        return function

    return register


def large_case(function: Callable[..., None], kinds: Sequence[Any], parts: bool = False) -> Callable[[Probe], None]:
    """Add NAME_large: the case `function` with these large kinds. Its module must hold it under that name.

    A kind is a tuple that ends with an element count. `parts`: the counts are of the whole, which the ranks share.
    """

    def run(probe: Probe) -> None:
        divisor = probe.size if parts else 1
        function(probe, [(*kind, count // divisor) for *kind, count in kinds])

    run.__name__ = run.__qualname__ = f"{function.__name__}_large"
    run.__module__ = function.__module__
    return case()(run)


def all_cases() -> dict[str, Case]:
    """Every case, by name."""
    for module in _CASE_MODULES:
        importlib.import_module(f"ringway.testing.{module}")
    return CASES


@dataclass(frozen=True)
class Setting:
    """Where cases run: the module that starts the world, the module whose functions are called, and the group.

    `started_by` and `called_through` are modules: `ringway` for both, or `torch.distributed` to call a group that
    ringway made through torch. `members` are the ranks of a sub-group, or None for the world.

    `device`: where the tensors of the cases are.

    `every`: cases that go through all kinds (dtype, reduction, element count) run every Nth of them only. A kind's
    element counts are adjacent and there are four: 3 leaves out no reduction of any dtype, and a larger odd number
    still runs every count.
    """

    backend: str
    world_size: int
    started_by: str = "ringway"
    called_through: str = "ringway"
    members: tuple[int, ...] | None = None
    every: int = 1
    device: str = "cpu"

    @property
    def size(self) -> int:
        return self.world_size if self.members is None else len(self.members)

    def admits(self, candidate: Case) -> bool:
        return (
            candidate.min_size <= self.size
            and not (candidate.own_names and self.called_through != "ringway")
            and not (candidate.whole_world and self.members is not None)
        )

    def run(self, function: Callable[..., None], probe: Probe) -> None:
        """Run a case's function here."""
        kinds = inspect.signature(function).parameters.get("kinds")
        with torch.device(self.device):
            if kinds is None:
                function(probe)
            else:
                function(probe, kinds.default[:: self.every])

    def __str__(self) -> str:
        where = f"{self.backend}, {self.world_size} ranks"
        if self.device != "cpu":
            where += f", on {self.device}"
        if self.members is not None:
            where += f", sub-group {list(self.members)}"
        if self.called_through != "ringway":
            where += f", called through {self.called_through}"
        return where


@dataclass
class Report:
    """The findings of a run of the suite, and how long each case took in seconds."""

    findings: list[tuple[Setting, Finding]] = field(default_factory=list)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def __str__(self) -> str:
        broken = len({(str(setting), finding.case) for setting, finding in self.findings})
        lines = [f"{len(self.seconds) - broken} of {len(self.seconds)} conformance cases passed"]
        lines += [f"  [{setting}] {finding}" for setting, finding in self.findings]
        return "\n".join(lines)


class ConformanceFailed(AssertionError):
    """A backend does not do what every backend must. `report` has the findings."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def check_backend(
    backend: str,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    *,
    cases: Sequence[str] = ("*",),
    preload: Sequence[str] = (),
    pool: RankPool | None = None,
    started_by: str = "ringway",
    called_through: str = "ringway",
) -> Report:
    """Run the suite on a backend at each world size, and on a sub-group without rank 0 at the largest.

    `cases` are patterns of case names. Raises `ConformanceFailed` if there are findings.
    """
    report = Report()
    with _borrowed(pool, max(world_sizes), preload) as ranks:
        for setting in settings(backend, world_sizes, started_by, called_through):
            run_setting(ranks, setting, cases, report)
    if report.findings:
        raise ConformanceFailed(report)
    return report


def settings(
    backend: str, world_sizes: Sequence[int], started_by: str = "ringway", called_through: str = "ringway"
) -> list[Setting]:
    """The world at each size and, with three or more ranks, a sub-group whose ranks are numbered differently."""
    worlds = [Setting(backend, size, started_by, called_through) for size in world_sizes]
    largest = max(world_sizes)
    if largest >= 3:
        members = tuple(range(1, largest))
        worlds.append(Setting(backend, largest, started_by, called_through, members))
    return worlds


def run_setting(pool: RankPool, setting: Setting, patterns: Sequence[str], report: Report) -> None:
    """Run the cases in one setting, each by itself. If one breaks its ranks, the next gets new ones."""
    for candidate in all_cases().values():
        if not setting.admits(candidate) or not any(fnmatch(candidate.name, p) for p in patterns):
            continue
        started = time.perf_counter()
        outcomes = pool.try_run(
            run_case,
            setting,
            candidate.name,
            FunctionRef.of(candidate.run),
            world_size=setting.world_size,
            timeout=_CASE_SECONDS,
            grace=_CASE_SECONDS / 4,
        )
        report.seconds[str(setting), candidate.name] = time.perf_counter() - started
        for outcome in outcomes:
            report.findings += [(setting, finding) for finding in _findings(candidate.name, outcome)]


def _findings(name: str, outcome: Outcome) -> list[Finding]:
    if outcome.ok:
        found: list[Finding] = outcome.value
        return found
    return [Finding(name, outcome.rank, "", str(outcome))]


def run_case(context: RankContext, setting: Setting, name: str, function: FunctionRef) -> list[Finding]:
    """Run one case on one rank."""
    context.start(setting.backend, module=setting.started_by)
    dist = importlib.import_module(setting.called_through)
    members = range(setting.world_size) if setting.members is None else setting.members
    group = None if setting.members is None else _subgroup(dist, setting.members)
    if context.rank not in members:
        return []
    probe = Probe(dist, group, members.index(context.rank), list(members), context.store, name)
    try:
        setting.run(function.load(), probe)
    except Exception:
        print(f"{name} was at: {probe.parameters or 'no parameters'}", *probe.findings, sep="\n")
        raise
    return probe.findings


_last_subgroup: tuple[Any, tuple[int, ...], Any] = (None, (), None)


def _subgroup(dist: Any, members: tuple[int, ...]) -> Any:
    """The sub-group of the current world, created once for all cases."""
    global _last_subgroup
    world, known_members, group = _last_subgroup
    if world is not c10d.group.WORLD or known_members != members:
        group = dist.new_group(list(members))
        _last_subgroup = (c10d.group.WORLD, members, group)
    return group


@contextmanager
def _borrowed(pool: RankPool | None, size: int, preload: Sequence[str]) -> Iterator[RankPool]:
    if pool is not None:
        yield pool
    else:
        with RankPool(size, preload=preload) as own:
            yield own
