"""Runs a schedule on the ranks of a job. Every rank calls `run_schedule`; rank 0 hands out the results as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

import ringway
from ringway.bench import tune
from ringway.bench.cases import CASES, BenchCase, Buffers, Place, WrongResult
from ringway.bench.compressed import compressed
from ringway.bench.runner import Candidate, Ranks, measure
from ringway.bench.schedule import PAIR_SIZES, PAIRS, Item, Schedule
from ringway.bench.table import Row, pair_row, rows
from ringway.errors import UsageError

TIMEOUT = timedelta(seconds=120)
"""Of every call: a rank that hangs ends the run of an op after two minutes, and not after torch's half an hour."""
_ONE_FORM = ("inference_all_reduce", "send", "all_gather_coalesced", "reduce_scatter_coalesced")
"""Ops without a synchronous and an asynchronous form."""
_FEWEST_ROUNDS = 5
_SAMPLE_SECONDS, _MOST_CALLS = 0.005, 5000
"""After other candidates had their turn, the first calls of a sample take longer. The sample outweighs them."""
_ITEM_SECONDS = 2.0
"""Slow items get fewer rounds, so that they take about this long."""
Tell = Callable[[dict[str, Any]], None]


class Asynchronous:
    """A module like torch.distributed whose collectives are issued asynchronously and waited for at once."""

    def __init__(self, dist: Any) -> None:
        self._dist = dist

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._dist, name)

        def issue_and_wait(*arguments: Any, **keywords: Any) -> None:
            function(*arguments, **keywords, async_op=True).wait()

        return issue_and_wait


class Overlapped:
    """A module like torch.distributed with an all_reduce that is followed by a computation, or runs under it."""

    def __init__(self, dist: Any, compute: Callable[[], None], *, at_once: bool) -> None:
        self._dist, self._compute, self._at_once = dist, compute, at_once

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> None:
        work = self._dist.all_reduce(tensor, group=group, async_op=True)
        if self._at_once:
            self._compute()
        work.wait()
        if not self._at_once:
            self._compute()


def run_schedule(schedule: Schedule, tell: Tell, began: float | None = None) -> None:
    """`tell` is called on rank 0 with what happens: the backends, an item begun, a row, a backend skipped, an op or a
    call that is not measured, that no backend works, or that time is up. The time counts from `began`, of
    `time.monotonic`; default: now."""
    rank = ringway.get_rank()
    say = tell if rank == 0 else lambda event: None
    began = time.monotonic() if began is None else began
    ringway.communicator().set_timeout(TIMEOUT.total_seconds())
    names = schedule.backends or tune.CANDIDATES[schedule.device]
    if schedule.device != "cpu":
        tune.use_gpu()
    groups, left_out = tune.groups_of(names, schedule.device, TIMEOUT)
    for name, reason in left_out.items():
        say({"skipped": name, "reason": reason})
    if not groups:
        say({"nothing": list(names)})
        return
    say({"backends": list(groups)})
    for op, reason in _inapplicable(schedule).items():
        say({"refused": op, "reason": reason})
    control = Ranks(ringway.get_world_group())
    for number, item in enumerate(schedule.items):
        late = schedule.seconds is not None and time.monotonic() - began > schedule.seconds
        if control.slowest([float(late)])[0]:
            say({"late": len(schedule.items) - number})
            return
        if _obstacle(item) is not None:
            continue
        say({"begun": str(item), "number": number})
        table, refused = _measure(item, schedule, groups, control)
        for name, reason in refused.items():
            say({"refused": f"{item} on {name}", "reason": reason})
        for row in table:
            say({"row": row.to_dict()})


def _inapplicable(schedule: Schedule) -> dict[str, str]:
    """The ops that are not measured at all, and why."""
    reasons = [(item.op, _obstacle(item)) for item in schedule.items]
    measured = {op for op, reason in reasons if reason is None}
    return {op: reason for op, reason in reasons if reason is not None and op not in measured}


def _obstacle(item: Item) -> str | None:
    if item.mode == "overlap" and item.op != "all_reduce":
        return "only all_reduce is measured under a computation"
    if item.mode == "async" and item.op in _ONE_FORM:
        return "it has no asynchronous form"
    fewest = 2 if item.op == PAIRS else CASES[item.op].min_size
    return f"it needs {fewest} ranks" if ringway.get_world_size() < fewest else None


def _measure(
    item: Item, schedule: Schedule, groups: Mapping[str, Any], control: Ranks
) -> tuple[list[Row], dict[str, str]]:
    """The rows, and why each of the other candidates refuses this call."""
    if item.op == PAIRS:
        name, group = next(iter(groups.items()))
        return [_measured_pair(name, group, *pair, control, schedule.rounds) for pair in _pairs()], {}
    dtype = getattr(torch, item.dtype)
    place = Place(ringway.get_rank(), ringway.get_world_size(), item.nbytes, None, dtype, schedule.device)
    case = CASES[item.op]
    buffers = case.buffers(place)
    finish = torch.cuda.synchronize if schedule.device != "cpu" else None
    dist = ringway if item.mode == "sync" else Asynchronous(ringway)
    candidates: list[Candidate] = []
    refused: dict[str, str] = {}
    for name, group in groups.items():
        there = replace(place, group=group)
        if item.mode == "overlap":
            try:
                candidates += _overlapped(case, name, there, buffers, control, finish)
            except UsageError as error:
                refused[name] = str(error)
        else:
            label = name if item.mode == "sync" else f"{name} async"
            candidates.append(case.candidate(label, dist, there, finish, buffers))
    exact = {candidate.name for candidate in candidates}
    candidates += [
        compressed(name, codec, replace(place, group=group), finish)
        for codec in item.codecs
        for name, group in groups.items()
    ]
    able, rounds = _try(candidates, control, schedule.rounds, refused)
    if not able:
        return [], refused
    measured = measure(able, control, rounds=rounds, sample_seconds=_SAMPLE_SECONDS, most_calls=_MOST_CALLS)
    table = rows(case, place, measured, item.mode)
    return [row if row.candidate in exact else replace(row, mode="compressed") for row in table], refused


def _try(
    candidates: list[Candidate], control: Ranks, most: int, refused: dict[str, str]
) -> tuple[list[Candidate], int]:
    """Calls each candidate once. Returns those that accept the call, and how many rounds fit the time of one item.

    A dtype that an op cannot take raises UsageError on every rank before anything is sent, so the ranks agree."""
    able = []
    began = time.monotonic()
    for candidate in candidates:
        try:
            if candidate.prepare is not None:
                candidate.prepare()
            candidate.run()
            if candidate.finish is not None:
                candidate.finish()
            able.append(candidate)
        except UsageError as error:
            refused[candidate.name] = str(error)
    (seconds,) = control.slowest([time.monotonic() - began])
    return able, max(_FEWEST_ROUNDS, min(most, int(_ITEM_SECONDS / max(seconds, 0.002))))


def _overlapped(
    case: BenchCase, name: str, place: Place, buffers: Buffers, control: Ranks, finish: Callable[[], object] | None
) -> list[Candidate]:
    """An all_reduce and a computation that takes about as long: one after the other, and at the same time."""
    trial = torch.zeros_like(buffers.taken[0])
    matrix = torch.ones(64, 64, device=place.device)

    all_reduce = partial(Asynchronous(ringway).all_reduce, trial, group=place.group)

    def seconds_of(action: Callable[[], object]) -> float:
        control.align()
        began = time.perf_counter()
        for _ in range(5):
            action()
        if finish is not None:
            finish()
        return control.slowest([(time.perf_counter() - began) / 5])[0]

    repeats = max(1, round(seconds_of(all_reduce) / seconds_of(lambda: matrix @ matrix)))

    def compute() -> None:
        for _ in range(repeats):
            matrix @ matrix

    return [
        case.candidate(f"{name} {how} compute", Overlapped(ringway, compute, at_once=at_once), place, finish, buffers)
        for how, at_once in (("then", False), ("under", True))
    ]


def _pairs() -> Iterator[tuple[int, int, int]]:
    """Every pair of ranks and each size of their messages."""
    size = ringway.get_world_size()
    return ((a, b, nbytes) for a in range(size) for b in range(a + 1, size) for nbytes in PAIR_SIZES)


def _measured_pair(name: str, group: Any, first: int, second: int, nbytes: int, control: Ranks, rounds: int) -> Row:
    """Messages there and back, while the other ranks wait."""
    rank = ringway.get_rank()
    takes_part, peer = rank in (first, second), second if rank == first else first
    sent, received = _pattern(rank, nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    if takes_part:
        _there_and_back(sent, received, rank == first, peer, group)
        if wrong := int((received != _pattern(peer, nbytes)).sum()):
            raise WrongResult(
                f"{name}: {wrong} of {nbytes} bytes of a message from rank {peer} to rank {rank} are wrong"
            )
    samples, trips = [], 20 if nbytes < 1 << 16 else 2
    for _ in range(max(_FEWEST_ROUNDS, rounds // 2)):
        control.align()
        began = time.perf_counter()
        for _ in range(trips if takes_part else 0):
            _there_and_back(sent, received, rank == first, peer, group)
        samples.append((time.perf_counter() - began) / 2 / trips if rank == first else 0.0)
    return pair_row(name, first, second, nbytes, ringway.get_world_size(), control.slowest(samples))


def _pattern(rank: int, nbytes: int) -> torch.Tensor:
    """Bytes that differ by rank and position. None is zero, as in memory that nothing was written to."""
    return ((torch.arange(nbytes, dtype=torch.int32) + 17 * rank) % 251 + 1).to(torch.uint8)


def _there_and_back(sent: torch.Tensor, received: torch.Tensor, begins: bool, peer: int, group: Any) -> None:
    if begins:
        ringway.send(sent, group=group, group_dst=peer)
        ringway.recv(received, group=group, group_src=peer)
    else:
        ringway.recv(received, group=group, group_src=peer)
        ringway.send(sent, group=group, group_dst=peer)
