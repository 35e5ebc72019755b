"""Model parallelism without a wrapper: a plan says how layers are split over the ranks of a group."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from ringway.errors import UsageError, nearest
from ringway.groups.communicator import Communicator
from ringway.groups.split import mark_split
from ringway.parallel.agreement import agreed, broadcast, describe, member
from ringway.parallel.data import has_data_parallel_hooks
from ringway.parallel.functions import even_shares, gathered
from ringway.parallel.gradients import watch_torch
from ringway.parallel.styles import PARALLEL, STYLES, Attached, Settings, Style


def register_model_parallel_hooks(
    model: nn.Module, plan: Mapping[str, str | Style], group: c10d.ProcessGroup | None = None
) -> ModelParallel:
    """Split the model's layers over the group's ranks.

    `plan` maps patterns of module names, in which `*` stands for anything without a dot, to a style of
    `ringway.parallel` or its name, as in `{"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}`. Parameters take
    rank 0's values, then each rank keeps its share of those that are split, in place: the parameter objects and the
    state dict's keys stay.

    Register before an optimizer has state and before data-parallel hooks. All ranks of the group call this together,
    with the same model and plan. If those differ, all ranks get an error here.
    """
    communicator = member(group, "register_model_parallel_hooks")
    styles = agreed(communicator, lambda: planned(model, plan), "register_model_parallel_hooks")
    broadcast(communicator, [*model.parameters(), *model.buffers()])
    handle = ModelParallel(model, communicator)
    try:
        for name, style in styles.items():
            handle.place(name, style)
        handle.require_splits_planned()
    except BaseException:
        handle.remove()
        raise
    return handle


def planned(model: nn.Module, plan: Mapping[str, str | Style]) -> tuple[list[str], dict[str, Style]]:
    """The plan and the model as text, and the style of each module the plan names."""
    if has_data_parallel_hooks(model):
        raise UsageError("the model has data-parallel hooks already; register the model-parallel hooks first")
    styles = _resolve(model, plan)
    return [f"plan '{name}' {style}" for name, style in styles.items()] + describe(model), styles


def _resolve(model: nn.Module, plan: Mapping[str, str | Style]) -> dict[str, Style]:
    """The style of each module that the plan names, in the model's order."""
    if not plan:
        raise UsageError("the plan is empty; it must name the layers to split")
    names = [name for name, _ in model.named_modules() if name]
    matched: dict[str, tuple[str, Style]] = {}
    for pattern, wanted in plan.items():
        style = STYLES.get(wanted) if isinstance(wanted, str) else wanted
        if style is None:
            raise UsageError(f"plan['{pattern}'] is {wanted!r}, which is not a style{nearest(str(wanted), STYLES)}")
        if not isinstance(style, Style):
            raise UsageError(f"plan['{pattern}'] is a {type(style).__name__}; pass a style of ringway.parallel")
        shape = re.compile("[^.]*".join(re.escape(piece) for piece in pattern.split("*")))
        found = [name for name in names if shape.fullmatch(name)]
        if not found:
            raise UsageError(f"plan['{pattern}'] names no module of the model{nearest(pattern, names)}")
        for name in found:
            other = matched.setdefault(name, (pattern, style))
            if other[0] != pattern:
                raise UsageError(f"module '{name}' is named twice in the plan, by '{other[0]}' and '{pattern}'")
    return {name: matched[name][1] for name in names if name in matched}


@dataclass(frozen=True)
class _Split:
    """How one parameter is split: along `dim`, each of its `parts` over all ranks."""

    parameter: nn.Parameter
    dim: int
    parts: int
    shares: Sequence[int]

    @property
    def lengths(self) -> list[int]:
        return [share * self.parts for share in self.shares]

    @property
    def whole_shape(self) -> list[int]:
        shape = list(self.parameter.shape)
        shape[self.dim] = sum(self.lengths)
        return shape

    def own(self, whole: Tensor, rank: int) -> Tensor:
        pieces = [part.split(list(self.shares), self.dim)[rank] for part in whole.chunk(self.parts, self.dim)]
        return torch.cat(pieces, self.dim).clone(memory_format=torch.contiguous_format)

    def whole(self, communicator: Communicator) -> Tensor:
        joined = gathered(self.parameter, self.dim, communicator, self.lengths)
        if self.parts == 1:
            return joined
        by_rank = [shard.chunk(self.parts, self.dim) for shard in joined.split(self.lengths, self.dim)]
        return torch.cat([shard[part] for part in range(self.parts) for shard in by_rank], self.dim)


@dataclass
class _Site:
    """One module that a style works on."""

    name: str
    module: Any
    communicator: Communicator
    handle: ModelParallel
    split_parameters: list[nn.Parameter] = field(default_factory=list)

    def split(self, parameter: str, dim: int, parts: int = 1) -> list[int]:
        found = getattr(self.module, parameter)
        self.split_parameters.append(found)
        return self.handle.split(f"{self.name}.{parameter}", found, dim, parts)

    def sum_gradient(self, parameter: nn.Parameter) -> None:
        self.handle.sum_gradient(self.name, parameter)

    def replace_forward(self, forward: Callable[[Any, Tensor], Tensor], settings: Settings) -> None:
        setattr(self.module, PARALLEL, settings)
        self.module.forward = MethodType(forward, self.module)
        self.handle.keep(_Attribute(self.module, "forward"))
        setattr(self.module, _MARKS, _Marks(self.communicator, tuple(self.split_parameters)))
        self.handle.keep(_Attribute(self.module, _MARKS))
        self.handle.keep(self.module.register_load_state_dict_pre_hook(_refuse_other_parameters))

    def after_forward(self, change: Callable[[Tensor], Tensor]) -> None:
        self.handle.keep(self.module.register_forward_hook(_AfterForward(change)))


@dataclass(frozen=True)
class _Attribute:
    """An attribute that was set on a module and hides the one of its class."""

    module: nn.Module
    name: str

    def remove(self) -> None:
        vars(self.module).pop(self.name, None)


_MARKS = "_ringway_marks"


@dataclass(frozen=True)
class _Marks(Attached):
    """A layer's split parameters. When the layer is copied, its new parameters are marked as split too."""

    over: Communicator
    parameters: tuple[nn.Parameter, ...]

    def __deepcopy__(self, memo: Any) -> _Marks:
        # A module's parameters are copied before its other attributes.
        copies = tuple(memo[id(parameter)] for parameter in self.parameters if id(parameter) in memo)
        for copy in copies:
            mark_split(copy, self.over)
        return _Marks(self.over, copies)


def _refuse_other_parameters(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
    """Before a split layer loads a state dict."""
    if metadata.get("assign_to_params_buffers"):
        raise UsageError(
            f"load_state_dict(assign=True) would replace the split parameters of '{prefix.removesuffix('.')}', and the "
            "new ones are not known to be parts; use assign=False, or load_full_state_dict()"
        )


@dataclass(frozen=True)
class _AfterForward(Attached):
    change: Callable[[Tensor], Tensor]

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise UsageError(
                f"{type(module).__name__} gives a {type(output).__name__}, but only a tensor can be scattered or "
                "gathered; name a module with one output, such as an nn.Identity, in the plan"
            )
        return self.change(output)


class ModelParallel:
    """One split model, as returned by `register_model_parallel_hooks`."""

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._model = model
        self._communicator = communicator
        self._splits: dict[int, _Split] = {}
        self._split_names: set[str] = set()
        self._summed: dict[int, nn.Parameter] = {}
        self._handles: list[Any] = []

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the model before it was split, on every rank. All ranks must call this together."""
        wholes: dict[int, Tensor] = {}
        splits = self._splits_by_name()
        state = dict(self._model.state_dict())
        for name in state:
            split = splits.get(name)
            if split is not None:
                key = id(split.parameter)
                if key not in wholes:
                    wholes[key] = split.whole(self._communicator)
                state[name] = wholes[key]
        return state

    def load_full_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load this rank's shares from a full state dict. Nothing is sent."""
        splits = self._splits_by_name()
        own = {}
        for name, value in state.items():
            split = splits.get(name)
            if split is not None and list(value.shape) != split.whole_shape:
                raise UsageError(
                    f"'{name}' is {list(value.shape)} in the state dict, but {split.whole_shape} in the unsplit model"
                )
            own[name] = value if split is None else split.own(value, self._communicator.rank)
        return self._model.load_state_dict(own, strict=strict)

    def remove(self) -> None:
        """Restore the whole parameters and the original forwards. All ranks call it together. Safe to repeat."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._summed.clear()
        splits, self._splits = self._splits, {}
        for split in splits.values():
            mark_split(split.parameter, None)
            split.parameter.data = split.whole(self._communicator)
            split.parameter.grad = None

    # For registration and styles

    def place(self, name: str, style: Style) -> None:
        module = self._model.get_submodule(name)
        if hasattr(module, PARALLEL):
            raise UsageError(f"'{name}' is parallel already; remove() those hooks first")
        setattr(module, PARALLEL, Settings(self._communicator))
        self.keep(_Attribute(module, PARALLEL))
        style.place(_Site(name, module, self._communicator, self))

    def require_splits_planned(self) -> None:
        """Raise if a layer shares a split parameter and the plan does not name it."""
        for module_name, module in self._model.named_modules():
            for own_name, parameter in module._parameters.items():
                name = f"{module_name}.{own_name}"
                if id(parameter) in self._splits and name not in self._split_names:
                    raise UsageError(
                        f"'{name}' is shared with a layer that the plan splits; name '{module_name}' in the plan too"
                    )

    def keep(self, handle: Any) -> None:
        """Keep something that has a `remove()` to call when the model is restored."""
        self._handles.append(handle)

    def split(self, name: str, parameter: nn.Parameter, dim: int, parts: int) -> list[int]:
        """Keep this rank's share. A parameter that two layers share is split once."""
        self._split_names.add(name)
        known = self._splits.get(id(parameter))
        if known is not None:
            if (known.dim, known.parts) != (dim, parts):
                raise UsageError(f"'{name}' is shared with a layer that splits it differently")
            return known.lengths
        if id(parameter) in self._summed:
            raise UsageError(f"'{name}' cannot be split: another layer of the plan needs it whole")
        length, ranks = parameter.shape[dim], self._communicator.size
        if length % parts or length // parts < ranks:
            raise UsageError(
                f"'{name}': cannot split length {length} of dimension {dim} into {parts} parts over {ranks} ranks"
            )
        made = _Split(parameter, dim, parts, even_shares(length // parts, ranks))
        parameter.data = made.own(parameter.data, self._communicator.rank)
        parameter.grad = None
        self._splits[id(parameter)] = made
        mark_split(parameter, self._communicator)
        watch_torch()
        return made.lengths

    def sum_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Sum the parameter's gradient over the group once per backward, however many layers share it."""
        if id(parameter) in self._splits:
            raise UsageError(f"'{name}' needs whole parameters, but another layer of the plan splits one of them")
        if id(parameter) in self._summed or self._communicator.size == 1:
            return
        self._summed[id(parameter)] = parameter
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter accepts no hook, and may be unfrozen later
        self.keep(parameter.register_hook(self._sum))
        parameter.requires_grad_(trained)

    def _sum(self, gradient: Tensor) -> Tensor:
        total = gradient.detach().clone(memory_format=torch.contiguous_format)
        self._communicator.all_reduce(total, log_name="sequence-parallel gradient")
        return total

    def _splits_by_name(self) -> dict[str, _Split]:
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: self._splits[id(p)] for name, p in named if id(p) in self._splits}
