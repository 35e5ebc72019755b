"""What the ranks of the error feedback tests run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringway.compress import ErrorFeedback, compressed_all_reduce
from ringway.errors import UsageError
from ringway.testing import RankContext

NUMEL = 2003


def values_of(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def mean_of_many_steps(context: RankContext, spec: str, steps: int, feedback: bool) -> tuple[float, float]:
    """How far the mean over many compressed steps is from the true mean, after half of them and after all."""
    context.start("gloo")
    true = torch.stack([values_of(rank) for rank in range(context.world_size)]).mean(dim=0)
    residuals = ErrorFeedback() if feedback else None
    total, distances = torch.zeros(NUMEL), []
    for step in range(1, steps + 1):
        tensor = values_of(context.rank)
        compressed_all_reduce(tensor, residuals, spec)
        total += tensor
        if step in (steps // 2, steps):
            distances.append(float((total / step - true).norm() / true.norm()))
    return distances[0], distances[1]


def save(context: RankContext, steps: int) -> dict[str, Any]:
    context.start("gloo")
    feedback = ErrorFeedback()
    for step in range(steps):
        for key in ("a", 7):
            compressed_all_reduce(values_of(10 * step + context.rank), feedback[key], "onebit:64")
    return feedback.state_dict()


def resume(context: RankContext, states: list[dict[str, Any]]) -> torch.Tensor:
    """A step that continues from the saved states."""
    context.start("gloo")
    feedback = ErrorFeedback()
    feedback.load_state_dict(states[context.rank])
    compressed_all_reduce(tensor := values_of(context.rank), feedback["a"], "onebit:64")
    return tensor


def without_a_stop(context: RankContext, steps: int) -> torch.Tensor:
    context.start("gloo")
    feedback = ErrorFeedback()
    for step in range(steps):
        compressed_all_reduce(values_of(10 * step + context.rank), feedback["a"], "onebit:64")
    compressed_all_reduce(tensor := values_of(context.rank), feedback["a"], "onebit:64")
    return tensor


def reshard(context: RankContext, states: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    context.start("gloo")
    feedback = ErrorFeedback()
    with pytest.raises(UsageError, match="states of all 2 ranks"):
        feedback.load_state_dict(states[0])
    feedback.load_state_dict(states)
    slot = feedback["a"]
    assert slot.worker is not None
    assert slot.server is not None
    residuals = slot.worker.clone(), slot.server.clone()
    compressed_all_reduce(values_of(context.rank), slot, "onebit:64")
    return residuals


def misuse(context: RankContext) -> None:
    context.start("gloo")
    feedback = ErrorFeedback()
    compressed_all_reduce(torch.ones(100), feedback, "int8")
    with pytest.raises(UsageError, match=r"feedback\['name'\]"):
        compressed_all_reduce(torch.ones(50), feedback, "int8")
    feedback.reset()
    compressed_all_reduce(torch.ones(50), feedback, "int8")
    with pytest.raises(UsageError, match="ErrorFeedback"):
        compressed_all_reduce(torch.ones(50), {}, "int8")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="float32 or bfloat16"):
        ErrorFeedback(residual_dtype=torch.float64)
    with pytest.raises(UsageError, match="needs an ErrorFeedback"):
        compressed_all_reduce(torch.ones(50), None, "int8", async_op=True)
    with pytest.raises(UsageError, match="not_finite="):
        compressed_all_reduce(torch.ones(50), feedback, "int8", not_finite="ignore")


def report(context: RankContext) -> dict[str, Any]:
    context.start("gloo")
    feedback = ErrorFeedback()
    for _ in range(3):
        compressed_all_reduce(values_of(context.rank).repeat(50), feedback["a"], "int8")
    assert "3 compressed calls" in str(feedback.report)
    return feedback.report.as_dict()
