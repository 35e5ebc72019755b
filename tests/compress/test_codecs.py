"""Codecs: their guarantees about the error and the bytes, and that they agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringway.compress import Codec, Fp8, Int4, Int8, OneBit, TopK, codec_names, get_codec, register_codec
from ringway.errors import UsageError

CODECS = [codec(block) for codec in (OneBit, Int8, Int4, Fp8) for block in (None, 8, 64, 1024)]
ROUNDING_OF_FP32 = 1e-5

numbers = st.lists(
    st.floats(min_value=-(2.0**80), max_value=2.0**80, width=32, allow_subnormal=False), min_size=0, max_size=300
)


def there_and_back(codec: Codec, values: Tensor) -> Tensor:
    message = torch.full((codec.nbytes(values.numel()),), 0xAA, dtype=torch.uint8)
    codec.encode(values, message)
    decoded = torch.full_like(values, float("nan"))
    codec.decode(message, decoded)
    return decoded


def blocks_of(codec: Codec, values: Tensor) -> list[Tensor]:
    width = getattr(codec, "block", None) or max(values.numel(), 1)
    return list(values.split(width))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
@settings(max_examples=60)
@given(values=numbers)
def test_the_error_stays_within_the_codecs_bound(codec: Codec, values: list[float]) -> None:
    given_values = torch.tensor(values, dtype=torch.float32)
    decoded = there_and_back(codec, given_values)
    for value, kept in zip(blocks_of(codec, given_values), blocks_of(codec, decoded), strict=True):
        value, kept = value.double(), kept.double()
        error = (value - kept).abs()
        peak = value.abs().max().item() if value.numel() else 0.0
        slack = ROUNDING_OF_FP32 * peak + 1e-35
        if isinstance(codec, OneBit):
            if codec.block is not None:
                assert error.norm() <= value.norm() * (1 + ROUNDING_OF_FP32) + 1e-35
            else:
                assert error.norm() <= 2 * value.norm() * (1 + ROUNDING_OF_FP32) + 1e-35
        elif isinstance(codec, Int8):
            assert bool((error <= peak / 254 + slack).all())
        elif isinstance(codec, Int4):
            assert bool((error <= peak / 14 + slack).all())
        else:
            step = peak / 448
            assert bool((error <= torch.maximum(value.abs() / 16, torch.tensor(step * 2.0**-10)) + slack).all())


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
def test_zeros_and_nothing_come_back_exactly(codec: Codec) -> None:
    assert torch.equal(there_and_back(codec, torch.zeros(77)), torch.zeros(77))
    assert codec.nbytes(0) == 0
    assert there_and_back(codec, torch.zeros(0)).numel() == 0


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
def test_accumulating_is_decoding_and_adding(codec: Codec) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    message = torch.zeros(codec.nbytes(1000), dtype=torch.uint8)
    codec.encode(values, message)
    decoded, start = torch.empty(1000), torch.linspace(-1, 1, 1000)
    codec.decode(message, decoded)
    total = start.clone()
    codec.decode_accumulate(message, total, 0.25)
    torch.testing.assert_close(total, start + 0.25 * decoded)


def test_onebit_has_the_bit_order_of_packbits() -> None:
    values = torch.randn(1003, generator=torch.Generator().manual_seed(2))
    values[5] = 0.0
    values[6] = -0.0
    codec = OneBit(None)
    message = torch.zeros(codec.nbytes(1003), dtype=torch.uint8)
    codec.encode(values, message)
    assert np.array_equal(message[4:].numpy(), np.packbits(values.numpy() >= 0))
    scale = message[:4].view(torch.float32).item()
    assert scale == pytest.approx(math.sqrt(float((values.double() ** 2).mean())), rel=1e-6)


def test_onebits_block_scale_is_the_mean_magnitude_and_beats_the_root_mean_square() -> None:
    values = torch.zeros(64)
    values[3] = 1.0
    per_block = there_and_back(OneBit(64), values)
    per_tensor = there_and_back(OneBit(None), values)
    assert per_block.abs().unique().item() == pytest.approx(1 / 64)
    assert (values - per_block).norm() < values.norm() < (values - per_tensor).norm()


@pytest.mark.parametrize(
    ("codec", "ratio"), [(OneBit(), 31.0), (OneBit(None), 31.9), (Int8(), 3.9), (Int4(), 7.5), (Fp8(), 3.9)]
)
def test_how_much_smaller_a_message_is(codec: Codec, ratio: float) -> None:
    assert 4 * 2**20 / codec.nbytes(2**20) >= ratio


def test_scales_too_small_to_invert_are_zero_not_nan() -> None:
    for codec in CODECS:
        decoded = there_and_back(codec, torch.full((64,), 1e-42))
        assert bool(torch.isfinite(decoded).all())


def test_names_and_blocks() -> None:
    assert {"onebit", "int8", "int4", "fp8"} <= set(codec_names())
    assert get_codec("int8:64") == Int8(64)
    assert get_codec("onebit:tensor") == OneBit(None)
    assert get_codec("onebit").spec == "onebit:1024"
    codec = Int4()
    assert get_codec(codec) is codec
    with pytest.raises(UsageError, match="did you mean 'onebit'"):
        get_codec("onebyte")
    with pytest.raises(UsageError, match="multiple of 8"):
        get_codec("int8:12")
    with pytest.raises(UsageError, match="block length"):
        get_codec("int8:large")
    with pytest.raises(UsageError, match="auto"):
        register_codec("auto", OneBit)


def test_topk_keeps_the_largest_at_about_their_entropy() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(4))
    for rate, bits in ((0.01, 2), (0.03, 4), (0.25, 8)):
        codec = TopK(rate, bits)
        decoded = there_and_back(codec, values)
        for chunk, kept in zip(values.split(4096), decoded.split(4096), strict=True):
            count = math.ceil(codec.kept * chunk.numel() / 4096)
            expected = chunk.abs().argsort(descending=True)[:count].sort().values
            assert torch.equal(kept.nonzero().flatten(), expected)
            low, high = chunk[expected].abs().aminmax()
            step = float(high - low) / 2 ** (bits - 1)
            assert float((chunk - kept)[expected].abs().max()) <= 0.5 * step + 1e-6
            assert torch.equal(torch.sign(chunk[expected]), torch.sign(kept[expected]))
        choices = math.log2(math.comb(4096, codec.kept)) / codec.kept
        used = (8 * (codec.nbytes(4096) - 8) - 8) / codec.kept - bits
        assert used <= choices + 0.8, f"{used} bits for each place, and their entropy is {choices}"
    assert 4 * 2**20 / TopK().nbytes(2**20) > 260


def test_names_of_topk() -> None:
    assert get_codec("topk") == get_codec("topk:0.01") == get_codec("topk:0.01:2") == TopK()
    assert get_codec("topk:0.03:4").spec == "topk:0.03:4"
    for kept in (1, 41, 77, 2047):
        assert get_codec(TopK(kept / 4096).spec) == TopK(kept / 4096), "a spec reads back as the same codec"
    for wrong in ("topk:0", "topk:0.6", "topk:0.01:1", "topk:0.01:9", "topk:much", "topk:0.1:2:3", "topk:tensor"):
        with pytest.raises(UsageError, match="topk"):
            get_codec(wrong)


class Halves(Codec):
    """A third-party codec: bfloat16."""

    name = "halves"

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, message: Tensor, scale: Tensor | None = None) -> None:
        message[: 2 * values.numel()].copy_(values.bfloat16().view(torch.uint8))

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message[: 2 * values.numel()].clone().view(torch.bfloat16))


def test_a_third_party_registers_its_codec() -> None:
    register_codec("halves", Halves)
    values = torch.randn(9)
    assert torch.equal(there_and_back(get_codec("halves"), values), values.bfloat16().float())
