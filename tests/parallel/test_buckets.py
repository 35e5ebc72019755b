"""Which parameters travel together: the rule is torch's, and gradients are stored where they should be."""

from __future__ import annotations

import random

import torch
import torch.distributed as c10d
from torch import nn

from ringway.parallel.buckets import FIRST_BUCKET_BYTES, Bucket, Transport, assign, first_assignment


def test_buckets_are_those_of_torch() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        dtypes = chance.sample([torch.float32, torch.float64, torch.bfloat16], chance.randint(1, 3))
        tensors = [
            torch.empty(chance.choice([1, 100, 5000, 300_000]), dtype=chance.choice(dtypes))
            for _ in range(chance.randint(1, 30))
        ]
        limit = chance.choice([1000, 50_000, 1 << 20, 3 << 20])
        limits = [min(limit, FIRST_BUCKET_BYTES), limit]
        keys = [(t.dtype, t.device) for t in tensors]
        sizes = [t.nbytes for t in tensors]
        expected, _ = c10d._compute_bucket_assignment_by_size(tensors, limits)
        assert first_assignment(keys, sizes, limit) == expected[::-1], seed
        order = chance.sample(range(len(tensors)), len(tensors))
        expected, _ = c10d._compute_bucket_assignment_by_size([tensors[i] for i in order], limits, [], order)
        buckets = assign(order, keys, sizes, limit)
        full = len(expected) - len({keys[i] for i in order})
        assert buckets[: max(full, 0)] == expected[: max(full, 0)], seed
        assert sorted(map(tuple, buckets)) == sorted(map(tuple, expected)), (
            seed
        )  # torch hashes buckets that are not full


def test_views_have_the_parameters_shapes_and_strides() -> None:
    parameters = [
        nn.Parameter(torch.randn(3, 4)),
        nn.Parameter(torch.randn(4, 3).t()),
        nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(4, 1).expand(4, 4)),
        nn.Parameter(torch.tensor(1.0)),
        nn.Parameter(torch.empty(0, 3)),
    ]
    bucket = Bucket(0, [(i, str(i), p) for i, p in enumerate(parameters)])
    assert bucket.flat.numel() == sum(p.numel() for p in parameters)
    bucket.begin(Transport(0.5), compressed=False)
    for slot, parameter in zip(bucket.slots, parameters, strict=True):
        assert slot.view.shape == parameter.shape
        if slot.index != 3:  # one that overlaps itself cannot have the same strides
            assert slot.view.stride() == parameter.stride()
        bucket.fill(slot, torch.full_like(parameter, slot.index + 1.0))
    expected = [value / 2 for i, p in enumerate(parameters) for value in [i + 1.0] * p.numel()]
    assert bucket.flat.tolist() == expected


def test_a_gradient_accumulated_in_place_is_scaled_once() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    bucket = Bucket(0, [(i, str(i), p) for i, p in enumerate(parameters)])
    bucket.begin(Transport(0.25), compressed=False)
    first, second, third = bucket.slots
    first.view.fill_(4)
    bucket.fill(first, first.view)
    bucket.fill(second, torch.full((2,), 8.0))
    bucket.fill(third, None)
    bucket.scale_in_place()
    assert bucket.flat.tolist() == [1, 1, 2, 2, 0, 0]
    bucket.begin(Transport(0.25), compressed=True)
    for slot in bucket.slots:
        bucket.fill(slot, slot.view)
    bucket.scale_in_place()
    assert bucket.flat.tolist() == [1, 1, 2, 2, 0, 0]
