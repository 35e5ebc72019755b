"""How a model is cut into fragments."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import torch

from ringway.lowcomm.fragment import split_evenly


def _largest(sizes: list[int], cuts: tuple[int, ...]) -> int:
    return max(sum(sizes[begin:end]) for begin, end in pairwise((0, *cuts, len(sizes))))


def test_the_largest_fragment_is_as_small_as_whole_parameters_allow() -> None:
    """Against all splits there are."""
    chosen = random.Random(0)
    for _ in range(300):
        sizes = [chosen.choice([0, 1, 2, 3, 5, 8, 40]) for _ in range(chosen.randint(1, 8))]
        parameters = [torch.empty(size) for size in sizes]
        count = chosen.randint(1, 9)
        runs = split_evenly(parameters, count)
        assert [id(one) for run in runs for one in run] == [id(one) for one in parameters]
        assert len(runs) == min(count, len(sizes))
        best = min(_largest(sizes, cuts) for cuts in combinations(range(1, len(sizes)), len(runs) - 1))
        assert max(sum(one.numel() for one in run) for run in runs) == best, (sizes, count)


def test_a_fragment_is_on_one_device() -> None:
    devices = ["cpu", "meta", "meta", "meta", "cpu"]
    parameters = [torch.empty(10, device=device) for device in devices]
    for count, lengths in ((1, [1, 3, 1]), (3, [1, 3, 1]), (4, [1, 2, 1, 1]), (9, [1] * 5)):
        assert [len(run) for run in split_evenly(parameters, count)] == lengths
