"""Every result is checked: what computes or sends something wrong is not timed, in whatever mode. And a rank that
hangs does not hold up the others for long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

import ringway
from ringway.bench import compressed, session
from ringway.bench.cases import CASES, Place, WrongResult
from ringway.bench.runner import Ranks
from ringway.bench.schedule import PAIRS, Schedule, make_items
from ringway.compress import codec_names, get_codec
from ringway.errors import CommTimeout
from ringway.testing import RankContext, RankPool
from ringway.work import Work


def _nothing(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> mock.Mock:
    return mock.Mock(spec=Work)


def _zero(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
    tensor.zero_()


def _empty_message(send: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, **keywords: send(torch.zeros_like(tensor), **keywords)


def _caught(context: RankContext) -> list[str]:
    """What each planted fault is called."""
    context.start("gloo")
    compressed_items = make_items(["all_reduce"], [4096], codecs=["onebit"])
    plants = (
        (mock.patch.object(compressed, "compressed_all_reduce", _zero), compressed_items),
        (mock.patch.object(ringway, "all_reduce", _nothing), make_items(["all_reduce"], [4096], modes=["overlap"])),
        (mock.patch.multiple(ringway, send=_nothing, recv=_nothing), make_items([PAIRS], [8])),
        (mock.patch.object(ringway, "send", _empty_message(ringway.send)), make_items([PAIRS], [8])),
    )
    told = []
    for plant, items in plants:
        with plant, pytest.raises(WrongResult) as raised:
            session.run_schedule(Schedule(items, ("shm",), rounds=3), lambda event: None)
        told.append(str(raised.value))
    return told


def test_results_that_are_wrong_in_other_ways_than_a_collective_are_caught(pool: RankPool) -> None:
    zero, overlap, *messages = pool.run(_caught, world_size=2)[0]
    assert zero == "shm onebit: all_reduce of 4096 bytes: 1024 of 1024 signs are wrong"
    assert overlap.startswith("shm then compute: all_reduce of 4096 bytes on rank 0 of 2: 1024 of 1024 elements")
    assert messages == ["shm: 8 of 8 bytes of a message from rank 1 to rank 0 are wrong"] * 2


def _compressed(context: RankContext) -> None:
    context.start("gloo")
    specs = [*codec_names(), "onebit:tensor", "int8:64", "topk:0.5:2", "topk:0.02:8"]
    for dtype in (torch.float32, torch.bfloat16):
        for nbytes in (1024, 100_000):
            place = Place(context.rank, context.world_size, nbytes, ringway.get_world_group(), dtype)
            for spec in specs:
                candidate = compressed.compressed("gloo", spec, place, None)
                for action in (candidate.run, candidate.verify):  # what a call leaves behind does not count
                    assert action is not None
                    action()


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_codec_is_accused_wrongly(pool: RankPool, ranks: int) -> None:
    pool.run(_compressed, world_size=ranks)


def test_results_of_codecs_have_bounds() -> None:
    mean = torch.arange(1.0, 5.0).repeat(256) * torch.tensor([1.0, -1.0]).repeat(512)
    for spec in codec_names():
        codec = get_codec(spec)
        message, result = torch.zeros(codec.nbytes(1024), dtype=torch.uint8), torch.zeros(1024)
        codec.encode(mean, message)
        codec.decode(message, result)
        assert compressed.fault(codec, result, mean) is None
        for wrong in (torch.zeros(1024), -result, 2 * result, 0.7 * result, result / 0, result.roll(1)):
            assert compressed.fault(codec, wrong, mean) is not None, (spec, wrong)
    assert compressed.fault(get_codec("int8"), 1.03 * mean, mean) == (
        "the relative error is 0.03, and at most 0.02 is right"
    )


def _with_a_rank_that_hangs(context: RankContext) -> tuple[str, list[float]]:
    context.start("gloo")
    limits: list[float] = []
    right = CASES["broadcast"]

    def late(place: Place) -> Any:
        if context.rank == 1:
            time.sleep(2.5)
        return right.buffers(place)

    def measure(item: Any, schedule: Any, groups: dict[str, Any], control: Ranks) -> Any:
        limits.extend(ringway.communicator(group).info.timeout for group in groups.values())
        return measure_really(item, schedule, groups, control)

    measure_really = session._measure
    CASES["broadcast"] = replace(right, buffers=late)
    with mock.patch.multiple(session, TIMEOUT=timedelta(seconds=1), _measure=measure):
        try:
            session.run_schedule(Schedule(make_items(["broadcast"], [8]), ("shm",), rounds=3), lambda event: None)
        except ringway.errors.RingwayError as error:
            return type(error).__name__, limits
    return "", limits


def test_a_rank_that_hangs_ends_the_run(pool: RankPool) -> None:
    assert session.TIMEOUT.total_seconds() == 120
    (error, limits), _ = pool.run(_with_a_rank_that_hangs, world_size=2)
    pool.replace()
    assert error == CommTimeout.__name__
    assert limits == [1.0]
