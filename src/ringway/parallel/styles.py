"""Parallel styles: the entries of a plan, which say how one module is made parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F  # noqa: N812 - torch's usual spelling
from torch import Tensor, nn

from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.parallel.functions import copy, gather, reduce, reduce_scatter, require_all, scatter

PARALLEL = "_ringway_parallel"
"""The attribute of a parallel module that holds its `Settings`."""


class Site(Protocol):
    """What a style works on: one module of a model whose parameters can be split."""

    name: str
    module: Any
    communicator: Communicator

    def split(self, parameter: str, dim: int, parts: int = 1) -> list[int]:
        """Keep this rank's share of a parameter; return all ranks' lengths."""
        ...

    def sum_gradient(self, parameter: nn.Parameter) -> None:
        """Sum the parameter's gradient over the group before anything else sees it."""
        ...

    def replace_forward(self, forward: Callable[[Any, Tensor], Tensor], settings: Settings) -> None: ...

    def after_forward(self, change: Callable[[Tensor], Tensor]) -> None: ...


@dataclass(frozen=True)
class Attached:
    """Belongs to a layer on this rank. A copy of the model shares it, and it cannot be pickled."""

    def __deepcopy__(self, memo: Any) -> Attached:
        return self

    def __reduce__(self) -> Any:
        raise UsageError("a model with split layers cannot be pickled; save full_state_dict(), or remove() the hooks")


@dataclass(frozen=True)
class Settings(Attached):
    """What a replaced forward needs to know."""

    communicator: Communicator
    sizes: Sequence[int] = ()
    first: int = 0
    gather_output: bool = False
    split_input: bool = False
    sequence_dim: int | None = None
    padding_index: int | None = None


@dataclass(frozen=True)
class Column:
    """A Linear that computes a part of its outputs. `parts` is the number of layers in one, such as q, k and v; each is
    split.

    `gather_output` joins the outputs. With `sequence_dim`, the input is split along that dimension and joined first.
    """

    parts: int = 1
    gather_output: bool = False
    sequence_dim: int | None = None

    def place(self, site: Site) -> None:
        _require_plain(site, nn.Linear)
        if self.gather_output and self.parts > 1:
            raise UsageError(f"'{site.name}': gather_output would interleave the {self.parts} parts of the ranks")
        sizes = site.split("weight", 0, self.parts)
        if site.module.bias is not None:
            site.split("bias", 0, self.parts)
        settings = Settings(site.communicator, sizes, gather_output=self.gather_output, sequence_dim=self.sequence_dim)
        site.replace_forward(_column_forward, settings)


@dataclass(frozen=True)
class Row:
    """A Linear that takes a part of its inputs, from a column-parallel layer; its outputs are summed.

    `split_input` takes a whole input and splits it. With `sequence_dim`, the output stays split along that dimension.
    """

    split_input: bool = False
    sequence_dim: int | None = None

    def place(self, site: Site) -> None:
        _require_plain(site, nn.Linear)
        sizes = site.split("weight", 1)
        if self.sequence_dim is not None and site.module.bias is not None:
            site.sum_gradient(site.module.bias)
        settings = Settings(site.communicator, sizes, split_input=self.split_input, sequence_dim=self.sequence_dim)
        site.replace_forward(_row_forward, settings)


@dataclass(frozen=True)
class Vocabulary:
    """An Embedding whose rows are split. `vocabulary_parallel_cross_entropy` is the loss for its logits."""

    def place(self, site: Site) -> None:
        _require_plain(site, nn.Embedding)
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(site.module, option):
                raise UsageError(f"'{site.name}': an Embedding with {option} needs all its rows on one rank")
        sizes = site.split("weight", 0)
        first = sum(sizes[: site.communicator.rank])
        padding = site.module.padding_idx
        own_padding = None if padding is None else padding - first
        if own_padding is not None and not 0 <= own_padding < sizes[site.communicator.rank]:
            own_padding = None
        settings = Settings(site.communicator, sizes, first=first, padding_index=own_padding)
        site.replace_forward(_vocabulary_forward, settings)


@dataclass(frozen=True)
class SequenceNorm:
    """A norm, or any layer that treats tokens independently, on a part of the sequence. Each rank's gradient of its
    parameters is partial, so they are summed."""

    def place(self, site: Site) -> None:
        for parameter in site.module.parameters():
            site.sum_gradient(parameter)


@dataclass(frozen=True)
class ScatterOutput:
    """Splits a module's output, the same on every rank, along `dim`: where sequence parallelism begins."""

    dim: int = 1

    def place(self, site: Site) -> None:
        communicator = site.communicator
        site.after_forward(lambda output: scatter(output, self.dim, communicator))


@dataclass(frozen=True)
class GatherOutput:
    """Joins a module's output, split along `dim`, for computations that every rank repeats."""

    dim: int = 1

    def place(self, site: Site) -> None:
        communicator = site.communicator
        site.after_forward(lambda output: gather(output, self.dim, communicator))


Style = Column | Row | Vocabulary | SequenceNorm | ScatterOutput | GatherOutput

STYLES: dict[str, Style] = {
    "column": Column(),
    "row": Row(),
    "vocabulary": Vocabulary(),
    "sequence_norm": SequenceNorm(),
    "scatter_output": ScatterOutput(),
    "gather_output": GatherOutput(),
}
"""Styles without options, by the names a plan may use for them."""


def _require_plain(site: Site, kind: type[nn.Module]) -> None:
    module = site.module
    if not isinstance(module, kind):
        raise UsageError(f"'{site.name}' is a {type(module).__name__}, but this style is for {kind.__name__}")
    if type(module).forward is not kind.forward or "forward" in vars(module):
        raise UsageError(f"'{site.name}': {type(module).__name__} overrides the computation of {kind.__name__}")
    if "weight" not in module._parameters:
        raise UsageError(f"'{site.name}': its weight is computed (a parametrization?); only a parameter can be split")


def _column_forward(module: Any, input: Tensor) -> Tensor:
    settings: Settings = module._ringway_parallel
    if settings.sequence_dim is None:
        input = copy(input, settings.communicator)
    else:
        input = gather(input, settings.sequence_dim, settings.communicator, None, True)
    output = F.linear(input, module.weight, module.bias)
    return gather(output, -1, settings.communicator, settings.sizes) if settings.gather_output else output


def _row_forward(module: Any, input: Tensor) -> Tensor:
    settings: Settings = module._ringway_parallel
    if settings.split_input:
        input = scatter(input, -1, settings.communicator, settings.sizes)
    output = F.linear(input, module.weight)
    if settings.sequence_dim is None:
        output = reduce(output, settings.communicator)
    else:
        output = reduce_scatter(output, settings.sequence_dim, settings.communicator)
    return output if module.bias is None else output + module.bias.to(output.dtype)


def _vocabulary_forward(module: Any, input: Tensor) -> Tensor:
    settings: Settings = module._ringway_parallel
    _require_known(input, sum(settings.sizes))
    own = input - settings.first
    elsewhere = (own < 0) | (own >= module.weight.shape[0])
    own = own.masked_fill(elsewhere, 0)
    output = F.embedding(own, module.weight, settings.padding_index, sparse=module.sparse)
    return reduce(output.masked_fill(elsewhere[..., None], 0), settings.communicator)


def _require_known(numbers: Tensor, vocabulary: int) -> None:
    """Raise for an index that no rank has a row for; it would come out as zeros."""
    require_all((numbers >= 0) & (numbers < vocabulary), f"an index is outside the vocabulary of {vocabulary}")
