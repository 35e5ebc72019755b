"""Conformance: barriers, and groups other than the world: members, non-members, and both ways of counting ranks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

from ringway.errors import CommTimeout
from ringway.testing.conformance import case
from ringway.testing.probe import Probe


@contextmanager
def _group(probe: Probe, ranks: Sequence[int] | None = None, **options: Any) -> Iterator[Any]:
    """A group for the duration of a block. Every rank of the world enters and leaves."""
    group = probe.dist.new_group(ranks, **options)
    yield group
    probe.dist.barrier()
    _destroy(probe, group)


def _destroy(probe: Probe, *groups: Any) -> None:
    for group in groups:
        if probe.dist.get_rank(group) >= 0:
            probe.dist.destroy_process_group(group)


def _sum_over(probe: Probe, group: Any) -> float:
    tensor = torch.tensor(float(probe.rank))
    probe.dist.all_reduce(tensor, group=group)
    return tensor.item()


@case()
def barrier_waits_for_the_last(probe: Probe) -> None:
    """No rank leaves before the last one has entered, by the clock that all ranks of a host share."""
    for late in range(probe.size):
        probe.at(late=late)
        if probe.rank == late:
            time.sleep(0.1)
        entered = time.clock_gettime(time.CLOCK_MONOTONIC)
        probe.dist.barrier(group=probe.group)
        left = time.clock_gettime(time.CLOCK_MONOTONIC)
        times = torch.zeros(probe.size, 2, dtype=torch.float64)
        mine = torch.tensor([entered, left], dtype=torch.float64)
        probe.dist.all_gather(list(times), mine, group=probe.group)
        first_left, last_entered = times[:, 1].min().item(), times[:, 0].max().item()
        probe.holds(
            first_left >= last_entered,
            f"rank {int(times[:, 1].argmin())} left {last_entered - first_left:.6f} s before the last arrived",
        )


@case(own_names=True)
def monitored_barrier_of_all(probe: Probe) -> None:
    for wait_all_ranks in (False, True):
        probe.at(wait_all_ranks=wait_all_ranks)
        probe.dist.monitored_barrier(probe.group, timeout=timedelta(seconds=60), wait_all_ranks=wait_all_ranks)
    probe.dist.monitored_barrier(probe.group)
    probe.still_works()


@case(min_size=2, whole_world=True, own_names=True)
def monitored_barrier_names_the_absent(probe: Probe) -> None:
    """Every rank that arrives learns which did not, and the world stays usable."""
    for wait_all_ranks in (False, True):
        probe.at(wait_all_ranks=wait_all_ranks)
        absent = list(range(1, probe.size)) if wait_all_ranks else [probe.size - 1]
        # If several ranks arrive they need time: a slow one must not count as absent.
        seconds = 0.5 if probe.size - len(absent) == 1 else 4.0
        with _group(probe) as group:
            if probe.rank not in absent:
                error = probe.raises(
                    CommTimeout,
                    probe.dist.monitored_barrier,
                    group,
                    timeout=timedelta(seconds=seconds),
                    wait_all_ranks=wait_all_ranks,
                )
                if isinstance(error, CommTimeout):
                    probe.equal(error.missing, absent, "missing")
                    for rank in absent:
                        probe.holds(str(rank) in str(error), f"rank {rank} is not named in: {error}")
            probe.still_works()
            if probe.rank in absent:  # the others have given up, so a rank that arrives now must not pass alone
                late = timedelta(seconds=60)
                probe.raises(CommTimeout, probe.dist.monitored_barrier, group, late, wait_all_ranks)


@case(whole_world=True)
def members_and_strangers(probe: Probe) -> None:
    dist, size = probe.dist, probe.size
    for ranks in ([0], list(range(0, size, 2)), list(range(size - 1, size))):
        probe.at(ranks=ranks)
        with _group(probe, ranks) as group:
            if probe.rank in ranks:
                probe.equal(dist.get_world_size(group), len(ranks), "size")
                probe.equal(dist.get_rank(group), ranks.index(probe.rank), "rank")
                probe.equal(dist.get_process_group_ranks(group), ranks, "ranks")
                probe.equal(_sum_over(probe, group), float(sum(ranks)), "sum over the group")
            else:
                probe.equal(dist.get_rank(group), -1, "a non-member's rank")
                probe.equal(dist.get_world_size(group), -1, "a non-member's size")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tensor = torch.tensor(float(probe.rank))
                    probe.equal(dist.all_reduce(tensor, group=group), None, "a non-member's all_reduce")
                probe.equal(tensor.item(), float(probe.rank), "a non-member's tensor")
    probe.still_works()


@case(whole_world=True)
def ranks_are_counted_two_ways(probe: Probe) -> None:
    """In a group without rank 0: `src` counts in the world, `group_src` in the group, and likewise for the others."""
    ranks = list(range(probe.size))[1:] or [0]
    with _group(probe, ranks) as group:
        if probe.rank in ranks:
            _count_both_ways(probe, group, ranks)


def _count_both_ways(probe: Probe, group: Any, ranks: list[int]) -> None:
    dist, own = probe.dist, ranks.index(probe.rank)
    for place, rank in enumerate(ranks):
        probe.equal(dist.get_global_rank(group, place), rank, "global rank")
        probe.equal(dist.get_group_rank(group, rank), place, "group rank")
        for root in ({"src": rank}, {"group_src": place}):
            probe.at(**root)
            tensor = torch.full((3,), float(probe.rank))
            dist.broadcast(tensor, group=group, **root)
            probe.same(tensor, torch.full((3,), float(rank)), "broadcast")
            parts = [torch.full((2,), float(10 * rank + to)) for to in range(len(ranks))]
            tensor = torch.zeros(2)
            dist.scatter(tensor, parts if own == place else None, group=group, **root)
            probe.same(tensor, torch.full((2,), float(10 * rank + own)), "scatter")
        for root in ({"dst": rank}, {"group_dst": place}):
            probe.at(**root)
            outputs = [torch.zeros(2) for _ in ranks] if own == place else None
            dist.gather(torch.full((2,), float(probe.rank)), outputs, group=group, **root)
            for source, output in enumerate(outputs or ()):
                probe.same(output, torch.full((2,), float(ranks[source])), f"gather's output {source}")
            tensor = torch.tensor(float(probe.rank))
            dist.reduce(tensor, group=group, **root)
            if own == place:
                probe.equal(tensor.item(), float(sum(ranks)), "reduce")


@case(min_size=2, whole_world=True)
def overlapping_groups_interleaved(probe: Probe) -> None:
    """Groups that share ranks run at the same time without interfering."""
    size = probe.size
    members = [sorted({rank, (rank + 1) % size}) for rank in range(size if size > 2 else 1)]
    groups = [probe.dist.new_group(ranks) for ranks in members]
    mine = [(ranks, group) for ranks, group in zip(members, groups, strict=True) if probe.rank in ranks]
    for _ in range(5):
        pending = []
        for ranks, group in mine:
            tensor = torch.tensor(float(probe.rank))
            pending.append((ranks, tensor, probe.dist.all_reduce(tensor, group=group, async_op=True)))
        count = torch.tensor(1.0)
        whole = probe.dist.all_reduce(count, async_op=True)
        for ranks, tensor, work in reversed(pending):
            work.wait()
            probe.equal(tensor.item(), float(sum(ranks)), f"sum over {ranks}")
        whole.wait()
        probe.equal(count.item(), float(size), "sum over the world")
    probe.dist.barrier()
    _destroy(probe, *groups)


@case(whole_world=True)
def a_group_can_be_destroyed(probe: Probe) -> None:
    for _ in range(3):
        with _group(probe) as group:
            probe.equal(_sum_over(probe, group), float(sum(range(probe.size))), "sum over the group")
    probe.still_works()


@case(min_size=2, whole_world=True)
def groups_made_by_their_members_alone(probe: Probe) -> None:
    """With `use_local_synchronization`, only the members call new_group."""
    ranks = list(range(1, probe.size))
    groups = []
    if probe.rank in ranks:
        for _ in range(2):
            groups.append(probe.dist.new_group(ranks, use_local_synchronization=True))
            probe.equal(_sum_over(probe, groups[-1]), float(sum(ranks)), "sum over the group")
    probe.still_works()
    for group in groups:
        _destroy(probe, group)
    _agree_about_the_count(probe)


def _agree_about_the_count(probe: Probe) -> None:
    """torch 2.15 counts a group that only its members create on those ranks alone, and names later groups by that
    count. Called through torch, the next case would hang on any backend."""
    torchs = c10d.distributed_c10d._world
    count = torch.tensor([torchs.group_count])
    probe.dist.all_reduce(count, c10d.ReduceOp.MAX)
    torchs.group_count = int(count)


@case(whole_world=True)
def subgroups_of_equal_size(probe: Probe) -> None:
    for count in sorted({1, probe.size}):
        probe.at(count=count)
        own, groups = probe.dist.new_subgroups(group_size=count)
        probe.equal(len(groups), probe.size // count, "number of groups")
        first = probe.rank // count * count
        probe.equal(_sum_over(probe, own), float(sum(range(first, first + count))), "sum over the own group")
        probe.dist.barrier()
        _destroy(probe, *groups)
