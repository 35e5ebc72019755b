"""Runs a schedule on the ranks of a job. Every rank calls `run_schedule`; rank 0 hands out the results as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import ringway
from ringway.bench import tune
from ringway.bench.cases import CASES, Buffers, Place
from ringway.bench.runner import Candidate, Ranks, measure
from ringway.bench.schedule import PAIR_SIZES, PAIRS, Item, Schedule
from ringway.bench.table import Row, pair_row, rows
from ringway.compress import ErrorFeedback, compressed_all_reduce
from ringway.errors import UsageError

_ONE_FORM = ("send", "all_gather_coalesced", "reduce_scatter_coalesced")
"""Ops without a synchronous and an asynchronous form."""
_LEAST_COMPRESSED = 1024
"""Bytes: nobody compresses less."""
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


def run_schedule(schedule: Schedule, tell: Tell, began: float | None = None) -> None:
    """`tell` is called on rank 0 with what happens: an item begun, a row, a backend skipped, a refused call,
    that no backend works, or that time is up. The time counts from `began`, of `time.monotonic`; default: now."""
    rank = ringway.get_rank()
    say = tell if rank == 0 else lambda event: None
    began = time.monotonic() if began is None else began
    names = schedule.backends or tune.CANDIDATES[schedule.device]
    if schedule.device != "cpu":
        tune.use_gpu()
    groups, left_out = tune.groups_of(names, schedule.device)
    for name, reason in left_out.items():
        say({"skipped": name, "reason": reason})
    if not groups:
        say({"nothing": list(names)})
        return
    control = Ranks(ringway.get_world_group())
    for number, item in enumerate(schedule.items):
        late = schedule.seconds is not None and time.monotonic() - began > schedule.seconds
        if control.slowest([float(late)])[0]:
            say({"late": len(schedule.items) - number})
            return
        if not _applies(item):
            continue
        say({"begun": str(item), "number": number})
        table, refused = _measure(item, schedule, groups, control)
        for name, reason in refused.items():
            say({"refused": f"{item} on {name}", "reason": reason})
        for row in table:
            say({"row": row.to_dict()})


def _applies(item: Item) -> bool:
    if item.mode == "overlap":
        return item.op == "all_reduce"
    if item.mode == "async" and item.op in _ONE_FORM:
        return False
    return item.op == PAIRS or ringway.get_world_size() >= CASES[item.op].min_size


def _measure(
    item: Item, schedule: Schedule, groups: Mapping[str, Any], control: Ranks
) -> tuple[list[Row], dict[str, str]]:
    """The rows, and why each of the other candidates refuses this call."""
    if item.op == PAIRS:
        return _pairs(groups, control, schedule.rounds), {}
    rank, size = ringway.get_rank(), ringway.get_world_size()
    dtype = getattr(torch, item.dtype)
    place = Place(rank, size, item.nbytes, None, dtype, schedule.device)
    case = CASES[item.op]
    buffers = case.buffers(place)
    finish = torch.cuda.synchronize if schedule.device != "cpu" else None
    dist = ringway if item.mode == "sync" else Asynchronous(ringway)
    candidates: list[Candidate] = []
    refused: dict[str, str] = {}
    for name, group in groups.items():
        there = Place(rank, size, item.nbytes, group, dtype, schedule.device)
        if item.mode == "overlap":
            try:
                candidates += _overlapped(name, there, buffers, control, finish)
            except UsageError as error:
                refused[name] = str(error)
        else:
            label = name if item.mode == "sync" else f"{name} async"
            candidates.append(case.candidate(label, dist, there, finish, buffers))
    exact = {candidate.name for candidate in candidates}
    if item.op == "all_reduce" and item.mode == "sync" and dtype.is_floating_point and item.nbytes >= _LEAST_COMPRESSED:
        candidates += [
            _compressed(name, codec, Place(rank, size, item.nbytes, group, dtype, schedule.device), finish)
            for codec in schedule.codecs
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
    name: str, place: Place, buffers: Buffers, control: Ranks, finish: Callable[[], object] | None
) -> list[Candidate]:
    """An all_reduce and a computation that takes about as long: one after the other, and at the same time."""
    tensor = buffers.taken[0]
    matrix = torch.ones(64, 64, device=place.device)

    def issue() -> Any:
        return ringway.all_reduce(tensor, group=place.group, async_op=True)

    def seconds_of(action: Callable[[], object]) -> float:
        control.align()
        began = time.perf_counter()
        for _ in range(5):
            action()
        if finish is not None:
            finish()
        return control.slowest([(time.perf_counter() - began) / 5])[0]

    repeats = max(1, round(seconds_of(lambda: issue().wait()) / seconds_of(lambda: matrix @ matrix)))

    def compute() -> None:
        for _ in range(repeats):
            matrix @ matrix

    def one_after_the_other() -> None:
        issue().wait()
        compute()

    def at_once() -> None:
        work = issue()
        compute()
        work.wait()

    clear = tensor.zero_
    return [
        Candidate(f"{name} then compute", one_after_the_other, clear, finish),
        Candidate(f"{name} under compute", at_once, clear, finish),
    ]


def _compressed(name: str, codec: str, place: Place, finish: Callable[[], object] | None) -> Candidate:
    tensor = place.values(place.rank, 0, place.whole)
    feedback = ErrorFeedback(place.group)

    def run() -> None:
        compressed_all_reduce(tensor, feedback, codec, group=place.group)

    def prepare() -> None:
        tensor.copy_(place.values(place.rank, 0, place.whole))

    def verify() -> None:
        """Compressed results are inexact, and the same on every rank."""
        prepare()
        run()
        seen = ringway.allgather_object((bool(tensor.isfinite().all()), float(tensor.double().sum())))
        if len(set(seen)) != 1 or not seen[0][0]:
            raise AssertionError(f"{name} {codec}: the ranks have different results, or one is not finite: {seen}")

    return Candidate(f"{name} {codec}", run, prepare, finish, verify)


def _pairs(groups: Mapping[str, Any], control: Ranks, rounds: int) -> list[Row]:
    """Messages between every pair of ranks, one pair at a time, on the first backend that has any."""
    name, group = next(iter(groups.items()))
    rank, size = ringway.get_rank(), ringway.get_world_size()
    result = []
    for first in range(size):
        for second in range(first + 1, size):
            for nbytes in PAIR_SIZES:
                tensor = torch.zeros(nbytes, dtype=torch.uint8)
                samples, trips = [], 20 if nbytes < 1 << 16 else 2
                for _ in range(max(_FEWEST_ROUNDS, rounds // 2)):
                    control.align()
                    began = time.perf_counter()
                    for _ in range(trips if rank in (first, second) else 0):
                        _there_and_back(tensor, rank == first, second if rank == first else first, group)
                    samples.append((time.perf_counter() - began) / 2 / trips if rank == first else 0.0)
                result.append(pair_row(name, first, second, nbytes, size, control.slowest(samples)))
    return result


def _there_and_back(tensor: torch.Tensor, begins: bool, peer: int, group: Any) -> None:
    if begins:
        ringway.send(tensor, group=group, group_dst=peer)
        ringway.recv(tensor, group=group, group_src=peer)
    else:
        ringway.recv(tensor, group=group, group_src=peer)
        ringway.send(tensor, group=group, group_dst=peer)
