"""Calls before there is a group are refused at once, with a message that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import ringway
from ringway.call import BROADCAST, Call
from ringway.errors import UsageError
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave


def calls() -> dict[str, Callable[[], object]]:
    one, parts = torch.ones(2), [torch.ones(2)]
    return {
        "all_reduce": partial(ringway.all_reduce, one),
        "broadcast": partial(ringway.broadcast, one, 0),
        "all_gather": partial(ringway.all_gather, parts, one),
        "barrier": ringway.barrier,
        "isend": partial(ringway.isend, one, 0),
        "monitored_barrier": ringway.monitored_barrier,
        "all_gather_object": partial(ringway.all_gather_object, [None], 1),
        "reduce_object": partial(ringway.reduce_object, 1),
        "communicator": ringway.communicator,
        "new_group": partial(ringway.new_group, [0]),
        "get_rank": ringway.get_rank,
        "get_world_size": ringway.get_world_size,
        "get_backend": ringway.get_backend,
    }


def call_uninitialized(context: RankContext) -> dict[str, str]:
    leave()
    found = {}
    for name, call in calls().items():
        try:
            call()
        except UsageError as error:
            found[name] = str(error)
    return found


def test_calls_without_a_group_are_refused(pool: RankPool) -> None:
    (found,) = pool.run(call_uninitialized, world_size=1)
    assert set(found) == set(calls())
    for name, text in found.items():
        assert "init_process_group" in text, f"{name}: {text}"


def start_unknown(context: RankContext, name: str) -> str:
    leave()
    with pytest.raises(UsageError) as caught:
        context.start(name)
    assert not ringway.is_initialized()
    return str(caught.value)


@pytest.mark.parametrize(("name", "nearest"), [("glooo", "gloo"), ("ncll", "nccl"), ("cpu:glo", "gloo")])
def test_an_unknown_backend_is_refused_with_the_nearest_name(pool: RankPool, name: str, nearest: str) -> None:
    (text,) = pool.run(start_unknown, name, world_size=1)
    assert f"did you mean '{nearest}'" in text


def start_with_a_typo(context: RankContext) -> None:
    leave()
    ringway.set_backend("gloo")
    for wrong in ("nonsense", 3):
        with pytest.raises(UsageError):
            ringway.set_backend(wrong)  # type: ignore[arg-type]
    ringway.set_backend(None)  # the next test of this rank chooses for itself


def test_set_backend_refuses_unknown_names(pool: RankPool) -> None:
    pool.run(start_with_a_typo, world_size=1)


def call_with_wrong_labels(context: RankContext, backend: str) -> None:
    context.start(backend)
    one, parts = torch.ones(2), [torch.ones(2)]
    for wrong in (0, False, []):
        for call in (
            partial(ringway.all_reduce, one),
            partial(ringway.broadcast, one, 0),
            partial(ringway.all_gather, parts, one),
            ringway.barrier,
        ):
            with pytest.raises(UsageError, match="log_name"):
                call(log_name=wrong)
    ringway.all_reduce(one, log_name="")


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_label_must_be_a_string_even_where_it_is_false(pool: RankPool, backend: str) -> None:
    pool.run(call_with_wrong_labels, backend, world_size=1)


def test_a_root_outside_the_group_can_be_described() -> None:
    """torch passes such roots on unchecked; the backend's error describes the call."""
    assert "root 7" in Call(BROADCAST, peer=7, ranks=[4, 5]).describe()
    assert "root 5" in Call(BROADCAST, peer=1, ranks=[4, 5]).describe()
