"""A DeepSpeed configuration given to `ringway.initialize` acts, or it is said what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ringway
import ringway._core as _core
from ringway.compress import OneBitAdam
from ringway.errors import ConfigError
from ringway.job.deepspeed_config import read_gradient_settings
from ringway.testing import RankContext, RankPool

SIZE = 2


def _read(**blocks: Any) -> Any:
    return read_gradient_settings(blocks, with_model=True)


def test_what_travels() -> None:
    assert _read().hook_arguments() == {
        "communication_dtype": None,
        "predivide_factor": None,
        "sparse_embeddings": False,
    }
    assert _read(communication_data_type="BF16").communication_dtype is torch.bfloat16
    assert _read(fp16={"enabled": "true", "loss_scale": 0}).communication_dtype is torch.float16
    assert _read(fp16={"enabled": True}, communication_data_type="fp32").communication_dtype is torch.float32
    assert _read(bf16={"enabled": False}).communication_dtype is None
    assert _read(bf16={"enabled": "auto"}, communication_data_type="auto").communication_dtype is None
    assert _read(gradient_predivide_factor=4).predivide_factor == 4.0
    assert _read(prescale_gradients=0).predivide_factor == 1.0
    assert _read(prescale_gradients=True, gradient_predivide_factor=4).predivide_factor is None
    assert _read(sparse_gradients=1).sparse_embeddings is True


def test_what_is_not_acted_on_is_named() -> None:
    found = _read(
        zero_optimization={"stage": 2},
        optimizer={"type": "AdamW", "params": {}},
        bf16={"enabled": True},
        communication_data_type="fp32",
        train_batch_size=8,
    )
    assert found.unused == [
        "bf16 (except for what travels)",
        "optimizer (AdamW)",
        "train_batch_size",
        "zero_optimization",
    ]
    without = read_gradient_settings({"communication_data_type": "fp32"}, with_model=False)
    assert without.unused == ["communication_data_type"]


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"communication_data_type": "fp8"}, "fp32, fp16, bf16"),
        ({"gradient_predivide_factor": 0}, "above 0"),
        ({"prescale_gradients": "perhaps"}, "true or false"),
        ({"fp16": True}, "a table"),
        ({"optimizer": "OneBitAdam"}, "type"),
        ({"optimizer": {"type": "OneBitAdam", "legacy_fusion": True}}, "legacy_fusion"),
    ],
)
def test_wrong_values_are_named(blocks: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _read(**blocks)


def _gradients(context: RankContext, config: dict[str, Any]) -> list[torch.Tensor]:
    """The averaged gradients of an embedding and a linear layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    with ringway.initialize(config, model, verbose=False):
        model(torch.tensor([context.rank, 5])).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]


def _travelling(context: RankContext) -> None:
    context.start("shm")
    plain = _gradients(context, {})
    assert _dtypes_sent(context, {}) == {torch.float32}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        rounded = _gradients(context, {"communication_data_type": name})
        assert not all(map(torch.equal, rounded, plain))
        assert all(torch.equal(gradient, gradient.to(dtype).float()) for gradient in rounded), "what arrives was sent"
        torch.testing.assert_close(rounded, plain, rtol=0.02, atol=0.02)
        assert _dtypes_sent(context, {name: {"enabled": True}}) == {dtype}
    for config in ({"gradient_predivide_factor": 8.0}, {"prescale_gradients": False}):
        assert all(map(torch.equal, _gradients(context, config), plain)), "powers of two change no bit"
    large = {"prescale_gradients": False, "communication_data_type": "fp16"}
    assert _scaled(context, large, 60000.0).isinf().all(), "the sum does not fit in fp16"
    assert _scaled(context, large | {"prescale_gradients": True}, 60000.0).isfinite().all()
    sparse = _gradients(context, {"sparse_gradients": True})
    assert all(map(torch.equal, sparse, plain))
    assert sparse[0].layout is torch.strided
    sent = _sent(context, {"sparse_gradients": True})
    assert ("sparse entries", torch.float32, SIZE * 2 * 4 * 4) in sent, "two rows of each rank"


def _sent(context: RankContext, config: dict[str, Any]) -> list[tuple[str, torch.dtype | None, int]]:
    """Label, dtype and bytes of each collective of one backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    with ringway.initialize(config, model, verbose=False):
        before = _core.monotonic_ns()
        model(torch.tensor([context.rank, 5])).square().sum().backward()
        calls = ringway.recent_calls(100)
    return [(call.label, call.dtype, call.nbytes) for call in calls if call.issued_ns > before]


def _dtypes_sent(context: RankContext, config: dict[str, Any]) -> set[torch.dtype | None]:
    return {dtype for label, dtype, _ in _sent(context, config) if label.startswith("gradients")}


def _scaled(context: RankContext, config: dict[str, Any], value: float) -> torch.Tensor:
    model = nn.Linear(1, 1, bias=False)
    with ringway.initialize(config, model, verbose=False):
        model(torch.full((1, 1), value)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()


def test_gradients_travel_as_the_configuration_says(pool: RankPool) -> None:
    pool.run(_travelling, world_size=SIZE)


def _optimizers(context: RankContext) -> None:
    context.start("shm")
    common = {"lr": 1e-2, "cuda_aware": False, "comm_backend_name": "nccl"}
    for name, own in (
        ("OneBitAdam", {"freeze_step": 2, "betas": [0.8, 0.9]}),
        ("ZeroOneAdam", {"var_freeze_step": 2}),
        ("onebitlamb", {"freeze_step": 2}),
    ):
        torch.manual_seed(context.rank)  # initialize() makes the ranks equal
        model = nn.Linear(8, 4)
        config = {"optimizer": {"type": name, "params": {**common, **own}}}
        with ringway.initialize(config, model, verbose=False) as runtime:
            optimizer = runtime.optimizer
            assert type(optimizer).__name__.lower() == name.lower()
            assert optimizer.param_groups[0]["lr"] == 1e-2
            assert runtime.data_parallel is None, "the optimizer averages"
            for _ in range(4):
                optimizer.zero_grad()
                with runtime.no_sync():
                    model(torch.randn(2, 8)).square().sum().backward()
                optimizer.step()
            everybody = ringway.allgather_object(model.weight.detach())
            assert torch.equal(*everybody)
    with ringway.initialize({"optimizer": {"type": "OneBitAdam"}}, nn.Linear(2, 2), verbose=False) as runtime:
        assert isinstance(runtime.optimizer, OneBitAdam)
        assert runtime.optimizer.freeze_step == 100_000
    with pytest.raises(ConfigError, match=r"'freeze_stepp'.*freeze_step"):
        ringway.initialize(
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_stepp": 3}}}, nn.Linear(2, 2), verbose=False
        )


def test_optimizers_of_the_1_bit_family(pool: RankPool) -> None:
    pool.run(_optimizers, world_size=SIZE)


def _parallel_block(context: RankContext) -> None:
    context.start("shm")
    block = {"plan": {"0": "column", "1": "row"}, "model_parallel_size": 2, "bucket_mb": 1, "codec": "int8"}
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with ringway.initialize({"ringway": {"parallel": block}}, model, verbose=False) as runtime:
        assert runtime.mesh.shape == (1, 2)
        assert model[0].weight.shape == (4, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    settings = {"ringway": {"parallel": {"bucket_mb": 1, "codec": "int8"}}}
    with ringway.initialize(settings, model, verbose=False) as runtime:
        assert runtime.data_parallel.state_dict()["feedback"] is not None
    with pytest.raises(ConfigError, match=r"'bucket'.*bucket_mb"):
        ringway.initialize({"ringway": {"parallel": {"bucket": 1}}}, model, verbose=False)


def test_the_block_ringway_parallel(pool: RankPool) -> None:
    pool.run(_parallel_block, world_size=SIZE)


def _says(context: RankContext) -> None:
    config = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}, "steps_per_print": 5}
    ringway.initialize(config, nn.Linear(2, 2)).close()


def test_one_line_names_the_rest(pool: RankPool) -> None:
    first, second = pool.try_run(_says, world_size=SIZE)
    assert first.ok, first
    line = (
        "ringway: found in the configuration and not acted on: fp16 (except for what travels), steps_per_print, zero_"
    )
    assert line in first.output
    assert "not acted on" not in second.output
