"""The state of an elastic job: what a rank that lacks it gets, and in which objects."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from ringway.job.elastic.state import State


class Cached(nn.Module):
    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.inner.register_buffer("cache", torch.tensor(values), persistent=False)


def _load(parts: dict[str, Any], source: dict[str, Any]) -> State:
    state = State(parts)
    state._load(State(source)._dicts())
    return state


@pytest.mark.parametrize(
    ("mine", "given"),
    [
        ([1], [1, 2, 3]),
        ({"a": 1}, {"b": [2]}),
        ({1}, {2, 3}),
        (Counter("ab"), Counter("bbb")),
        (torch.zeros(3), torch.arange(3.0)),
    ],
)
def test_objects_that_can_change_are_changed_in_place(mine: Any, given: Any) -> None:
    """The program may hold them under another name."""
    parts = {"it": mine}
    _load(parts, {"it": given})
    assert parts["it"] is mine
    assert list(mine) == list(given)


@pytest.mark.parametrize("mine", [torch.zeros(0), torch.zeros(1), torch.zeros(4, dtype=torch.float64)])
def test_a_tensor_of_another_shape_or_dtype_is_replaced(mine: torch.Tensor) -> None:
    parts: dict[str, Any] = {"it": mine}
    _load(parts, {"it": torch.arange(4.0)})
    assert torch.equal(parts["it"], torch.arange(4.0))


@pytest.mark.parametrize("values", [[0.0, 0.0], []])
def test_buffers_that_are_not_saved_are_copied(values: list[float]) -> None:
    model = Cached(values)
    before = model.inner.cache
    _load({"model": model}, {"model": Cached([1.0, 2.0])})
    assert model.inner.cache.tolist() == [1.0, 2.0]
    assert (model.inner.cache is before) == bool(values)


def test_a_step_that_is_repeated_can_unscale_again() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    state = State({"optimizer": optimizer, "scaler": scaler})
    for _ in range(2):
        state.prepare()
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        state.undo()
