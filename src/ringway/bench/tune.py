"""Measures the backends of the running job against each other and turns the winners into a policy."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import torch

import ringway
from ringway.backends import registry
from ringway.backends.select import obstacle
from ringway.backends.several.policy import Policy, Rule
from ringway.bench.cases import CASES, Place
from ringway.bench.runner import Candidate, Ranks, measure
from ringway.call import OP_BY_NAME
from ringway.errors import BackendUnavailable, RingwayError, UsageError

CANDIDATES = {
    "cpu": ("shm", "mpi", "ccl", "gloo", "hierarchical", "hierarchical_mpi"),
    "cuda": ("nccl", "shm", "gloo"),
}
"""By device."""
OPS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "all_gather",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all_single",
    "barrier",
)
SIZES = (8, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 32 << 20)
_CLEARLY = 0.97
"""A backend replaces the winner of the next smaller size only if it takes less than this share of its time."""

Medians = dict[str, dict[int, dict[str, float]]]
"""Seconds by op, by bytes, by backend."""
Progress = Callable[[str, int], None]


def groups_of(
    names: Sequence[str], device: str = "cpu", timeout: timedelta | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """A group of all ranks on each backend that every rank can use for tensors on the device, and why the others are
    left out."""
    made: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in names:
        reasons = ringway.allgather_object(_lacking(name, device))
        if not any(reasons):
            reasons = ringway.allgather_object(_made(name, device, made, timeout))
        if any(reasons):
            if name in made:
                ringway.destroy_process_group(made.pop(name))
            left_out[name] = next(reason for reason in reasons if reason)
    return made, left_out


def _lacking(name: str, device: str) -> str | None:
    if registry.own(name) is not None and registry.on_device(name, device) is None:
        return f"it takes no tensors on {device}"
    lacking = obstacle(name)
    return None if lacking is None else lacking.reason


def _made(name: str, device: str, into: dict[str, Any], timeout: timedelta | None) -> str | None:
    """Create a group on the backend. Returns the reason if it is not a candidate, otherwise None."""
    try:
        served = registry.on_device(name, device) is registry.own(name)
        group = into[name] = ringway.new_group(None, timeout, name if served else f"{device}:{name}")
        actual = ringway.communicator(group).devices.of(device).name
        if device != "cpu":  # NCCL connects at the first call, and may refuse ranks that share a GPU
            ringway.all_reduce(torch.ones(1, device=device), group=group)
            ringway.settled(group)
    except BackendUnavailable as error:
        return error.reason
    except RingwayError as error:
        return str(error).partition("\n")[0]
    return None if actual == name else f"on these hosts it resolves to {actual}"


def medians(
    groups: Mapping[str, Any],
    ops: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    progress: Progress,
    device: str = "cpu",
) -> Medians:
    """Time every op at every size on every group. All ranks get the same numbers."""
    control = Ranks(ringway.get_world_group())
    found: Medians = {}
    for op in ops:
        for nbytes in sizes if op != "barrier" else (0,):
            progress(op, nbytes)
            times = measure(in_one_place(op, nbytes, groups, device), control, rounds=rounds, warmup_rounds=2)
            found.setdefault(op, {})[nbytes] = {result.name: result.seconds.median for result in times}
    return found


def in_one_place(op: str, nbytes: int, groups: Mapping[str, Any], device: str = "cpu") -> list[Candidate]:
    """An op on each of the groups, all with the same memory."""
    case, rank, size = CASES[op], ringway.get_rank(), ringway.get_world_size()
    buffers = case.buffers(Place(rank, size, nbytes, device=device))
    finish = torch.cuda.synchronize if device == "cuda" else None
    return [
        case.candidate(name, ringway, Place(rank, size, nbytes, group, device=device), finish, buffers)
        for name, group in groups.items()
    ]


def winners(found: Medians, device: str | None = None) -> tuple[Rule, ...]:
    """Rules that send every call to the fastest backend for its size, with bounds between the measured sizes. They are
    for tensors on `device`, if it is given."""
    rules: list[Rule] = []
    for op, by_size in found.items():
        if "bytes" not in OP_BY_NAME[op].agree:
            rules.append(Rule(_best_overall(by_size), op, device=device))
            continue
        sizes = sorted(by_size)
        best = _best_by_size(by_size, sizes)
        for place, size in enumerate(sizes):
            last = place == len(sizes) - 1
            if last:
                rules.append(Rule(best[place], op, device=device))
            elif best[place] != best[place + 1]:
                rules.append(Rule(best[place], op, up_to=math.isqrt(size * sizes[place + 1]), device=device))
    return tuple(rules)


def _best_by_size(by_size: Mapping[int, Mapping[str, float]], sizes: Sequence[int]) -> list[str]:
    best: list[str] = []
    for size in sizes:
        times = by_size[size]
        fastest = min(times, key=lambda name: times[name])
        if best and times[fastest] > _CLEARLY * times[best[-1]]:
            fastest = best[-1]
        best.append(fastest)
    return best


def _best_overall(by_size: Mapping[int, Mapping[str, float]]) -> str:
    """The backend with the smallest product of times, which gives small and large calls equal weight."""
    names = next(iter(by_size.values()))
    return min(names, key=lambda name: sum(math.log(times[name]) for times in by_size.values()))


def tuned(found: Mapping[str, Medians], source: str) -> Policy:
    """The policy of this job, from what was measured on each device, with the measurements it is based on."""
    facts: dict[str, Any] = {
        "at": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "host": f"{platform.machine()}, torch {torch.__version__}",
    }
    rules: tuple[Rule, ...] = ()
    for device, by_op in found.items():
        facts["microseconds" if device == "cpu" else f"microseconds on {device}"] = {
            op: {str(size): {name: round(1e6 * t, 2) for name, t in times.items()} for size, times in by_size.items()}
            for op, by_size in by_op.items()
        }
        rules += winners(by_op, None if list(found) == ["cpu"] else device)
    return Policy(ringway.get_world_size(), rules, facts, source)


def has_gpu() -> bool:
    """Whether every rank has a GPU. Makes it the rank's current device."""
    here = torch.cuda.is_available()
    if here:
        use_gpu()
    return all(ringway.allgather_object(here))


def use_gpu() -> None:
    """Sets the rank's current device: GPUs are dealt out in turn among the ranks of a host."""
    try:
        number = ringway.get_local_rank()
    except UsageError:  # the launcher gives none
        number = ringway.get_rank()
    torch.cuda.set_device(number % torch.cuda.device_count())


def check_ops(ops: Sequence[str]) -> None:
    for op in ops:
        if op not in CASES or op not in OP_BY_NAME or not OP_BY_NAME[op].collective:
            raise UsageError(f"'{op}' cannot be tuned; choose from {', '.join(OPS)}")
