"""What a codec is, and the table of those there are.

A codec turns a flat fp32 tensor into fewer bytes and back. It knows nothing of ranks, residuals or
devices: the kernels (`reference`, `native`, `triton`) add the residual and pick the fastest code for it,
and `collectives` adds the ranks. A codec is one file with `nbytes`, `encode`, `decode` and
`decode_accumulate`, and is pure: the same values give the same bytes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ringway.errors import UsageError, nearest


class Codec(abc.ABC):
    """Fewer bytes, and back.

    A codec of a third party defines `nbytes`, `encode` and `decode`; `decode_accumulate` where it has a
    faster way. One whose scale spans the whole tensor (`tensor_scale`) also says how that scale is measured,
    because a tensor is encoded piece by piece: `measure` each piece, `merge` the measures, `scale`.
    """

    name: ClassVar[str]
    tensor_scale: bool = False
    granule: int = 8
    """Tensors are cut into pieces at multiples of so many elements."""

    @abc.abstractmethod
    def nbytes(self, numel: int) -> int:
        """How long the message of so many elements is."""

    @abc.abstractmethod
    def encode(self, values: Tensor, message: Tensor, scale: Tensor | None = None) -> None:
        """Write `values` (fp32, one dimension) into `message` (uint8, `nbytes` long).

        `scale` is given when `tensor_scale` is set and the values are a piece of a larger tensor.
        """

    @abc.abstractmethod
    def decode(self, message: Tensor, values: Tensor) -> None:
        """Write what `message` stands for into `values` (fp32, one dimension)."""

    def decode_accumulate(self, message: Tensor, accumulator: Tensor, factor: float = 1.0) -> None:
        """Add what `message` stands for, times `factor`, to `accumulator`."""
        decoded = torch.empty_like(accumulator)
        self.decode(message, decoded)
        accumulator.add_(decoded, alpha=factor)

    def measure(self, values: Tensor) -> Tensor:
        """The statistic of a piece from which the scale of the whole is made."""
        raise UsageError(f"codec '{self.name}' has no scale of a whole tensor to measure")

    def merge(self, statistics: Sequence[Tensor]) -> Tensor:
        """The statistic of the whole, from those of its pieces."""
        raise UsageError(f"codec '{self.name}' has no scale of a whole tensor to merge")

    def scale(self, statistic: Tensor, numel: int) -> Tensor:
        """The scale of a tensor of `numel` elements with this statistic."""
        raise UsageError(f"codec '{self.name}' has no scale of a whole tensor")

    @property
    def spec(self) -> str:
        """The codec as `get_codec` takes it; the same text on every rank means the same bytes."""
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec!r})"


_FACTORIES: dict[str, Callable[..., Codec]] = {}
_made: dict[str, Codec] = {}
"""By what was asked for: a codec is a value, and every call asks."""


def register_codec(name: str, factory: Callable[..., Codec]) -> None:
    """Make `codec=name` mean `factory()`; `codec="name:64"` means `factory(block=64)`."""
    if not name or ":" in name:
        raise UsageError(f"a codec's name is not empty and has no colon, got {name!r}")
    if name == "auto":
        raise UsageError("'auto' is the choice between a codec and none; it cannot be registered")
    _FACTORIES[name] = factory
    _made.clear()


def codec_names() -> list[str]:
    """The names that `get_codec` knows."""
    return sorted(_FACTORIES)


def get_codec(codec: str | Codec) -> Codec:
    """The codec for a name (`"int8"`), a name and a block (`"onebit:512"`, `"onebit:tensor"`), or itself."""
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
            f"codec {name!r} is not known; there are {', '.join(codec_names())}" + nearest(name, _FACTORIES)
        )
    settings: dict[str, Any] = {}
    if block == "tensor":
        settings["block"] = None
    elif block.isdigit():
        settings["block"] = int(block)
    elif block:
        raise UsageError(f"codec {codec!r}: after the colon comes a block length or 'tensor'")
    return factory(**settings)
