"""The codec interface, and the registry of codecs.

A codec turns a flat fp32 tensor into fewer bytes and back. It knows nothing about ranks, residuals or devices: the
kernels (`reference`, `native`, `triton`) add the residual and use the fastest code for the codec, and `collectives`
adds the ranks. A codec is one file with `nbytes`, `encode`, `decode` and `decode_accumulate`. It is pure: the same
values give the same bytes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ringway.errors import UsageError, nearest


class Codec(abc.ABC):
    """Encodes values into fewer bytes and decodes them.

    A third-party codec defines `nbytes`, `encode` and `decode`, and `decode_accumulate` if it has a faster way. A codec
    whose scale spans the whole tensor (`tensor_scale`) also defines how to measure it, because tensors are encoded in
    pieces: `measure` each piece, `merge` the statistics, then `scale`.
    """

    name: ClassVar[str]
    tensor_scale: bool = False
    granule: int = 8
    """Tensors are split into pieces at multiples of this many elements."""

    @abc.abstractmethod
    def nbytes(self, numel: int) -> int:
        """The length of the message for `numel` elements."""

    @abc.abstractmethod
    def encode(self, values: Tensor, message: Tensor, scale: Tensor | None = None) -> None:
        """Write `values` (fp32, one dimension) into `message` (uint8, `nbytes` long).

        `scale` is given if `tensor_scale` is set and the values are a piece of a larger tensor.
        """

    @abc.abstractmethod
    def decode(self, message: Tensor, values: Tensor) -> None:
        """Write the values that `message` encodes into `values` (fp32, one dimension)."""

    def decode_accumulate(self, message: Tensor, accumulator: Tensor, factor: float = 1.0) -> None:
        """Add the values that `message` encodes, times `factor`, to `accumulator`."""
        decoded = torch.empty_like(accumulator)
        self.decode(message, decoded)
        accumulator.add_(decoded, alpha=factor)

    def measure(self, values: Tensor) -> Tensor:
        """The statistic of a piece, from which the scale of the whole tensor is computed."""
        raise UsageError(f"codec '{self.name}' has no whole-tensor scale to measure")

    def merge(self, statistics: Sequence[Tensor]) -> Tensor:
        """The statistic of the whole tensor, from those of its pieces."""
        raise UsageError(f"codec '{self.name}' has no whole-tensor scale to merge")

    def scale(self, statistic: Tensor, numel: int) -> Tensor:
        """The scale of a tensor of `numel` elements with this statistic."""
        raise UsageError(f"codec '{self.name}' has no whole-tensor scale")

    @property
    def native_format(self) -> tuple[int, int, int] | None:
        """The codec's kind, block and bits in the native core (`csrc/pack/pack.h`); None if it is not there."""
        return None

    @property
    def spec(self) -> str:
        """The codec in the form `get_codec` accepts. The same text on every rank means the same bytes."""
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec!r})"


_FACTORIES: dict[str, Callable[..., Codec]] = {}
_made: dict[str, Codec] = {}
"""Cached by spec: codecs are values, and every call looks one up."""


def register_codec(name: str, factory: Callable[..., Codec]) -> None:
    """Make `codec=name` mean `factory()`. `codec="name:64"` means `factory(block=64)`, or `factory.from_argument("64")`
    if the factory has that method."""
    if not name or ":" in name:
        raise UsageError(f"a codec's name must not be empty or contain a colon, got {name!r}")
    if name == "auto":
        raise UsageError("'auto' chooses between a codec and no compression; it cannot be registered as a codec")
    _FACTORIES[name] = factory
    _made.clear()


def codec_names() -> list[str]:
    """The names that `get_codec` accepts."""
    return sorted(_FACTORIES)


def get_codec(codec: str | Codec) -> Codec:
    """Look up a codec by name (`"int8"`) or name and argument (`"onebit:512"`, `"onebit:tensor"`, `"topk:0.01:2"`). A
    codec returns itself."""
    if isinstance(codec, Codec):
        return codec
    known = _made.get(codec)
    if known is None:
        known = _made[codec] = _make(codec)
    return known


def _make(codec: str) -> Codec:
    name, _, block = codec.partition(":")
    factory = _FACTORIES.get(name)
    if factory is None:
        raise UsageError(
            f"codec {name!r} is unknown; available: {', '.join(codec_names())}" + nearest(name, _FACTORIES)
        )
    from_argument: Callable[[str], Codec] | None = getattr(factory, "from_argument", None)
    if from_argument is not None:
        return from_argument(block)
    settings: dict[str, Any] = {}
    if block == "tensor":
        settings["block"] = None
    elif block.isdigit():
        settings["block"] = int(block)
    elif block:
        raise UsageError(f"codec {codec!r}: expected a block length or 'tensor' after the colon")
    return factory(**settings)
