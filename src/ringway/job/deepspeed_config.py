"""What a DeepSpeed configuration says about communication, for `ringway.initialize`.

DeepSpeed reads one file for everything. ringway acts on the parts that are about what ranks send each other, and names
the rest, so that nobody believes it acts on them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as c10d

from ringway.config import lenient_flag
from ringway.errors import ConfigError, UsageError, nearest

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_OPTIMIZERS = {"onebitadam": "OneBitAdam", "zerooneadam": "ZeroOneAdam", "onebitlamb": "OneBitLamb"}
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FREEZE_STEP = 100_000
"""DeepSpeed's default for OneBitAdam, which ringway's own constructor asks for."""
_UNSET = (None, "auto")
"""What stands for a value that is not set: transformers fills in "auto" before DeepSpeed reads the file."""


@dataclass
class GradientSettings:
    """How gradients travel, by the keys of a DeepSpeed configuration."""

    communication_dtype: torch.dtype | None = None
    predivide_factor: float | None = None
    sparse_embeddings: bool = False
    optimizer: str | None = None
    """The 1-bit optimizer in `ringway.compress`, which averages by itself."""
    optimizer_arguments: dict[str, Any] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    """Blocks that were found and that ringway does not act on."""

    def hook_arguments(self) -> dict[str, Any]:
        """Arguments of `register_data_parallel_hooks`."""
        names = ("communication_dtype", "predivide_factor", "sparse_embeddings")
        return {name: getattr(self, name) for name in names}


def read_gradient_settings(blocks: Mapping[str, Any], with_model: bool) -> GradientSettings:
    """Read the blocks that are not ringway's own. Without a model there are no gradients, so nothing acts."""
    found = GradientSettings()
    readers: dict[str, Callable[[Any], None]] = {}
    if with_model:
        readers = {
            "communication_data_type": lambda value: setattr(found, "communication_dtype", _dtype(value)),
            "gradient_predivide_factor": lambda value: setattr(found, "predivide_factor", _factor(value)),
            "sparse_gradients": lambda value: setattr(found, "sparse_embeddings", _flag("sparse_gradients", value)),
            "optimizer": lambda value: _read_optimizer(found, value),
            # Read last: they give way to the keys above.
            "prescale_gradients": lambda value: _read_prescale(found, value),
            "fp16": lambda value: _read_half(found, "fp16", value),
            "bf16": lambda value: _read_half(found, "bf16", value),
        }
    for name, read in readers.items():
        if blocks.get(name) not in _UNSET:
            read(blocks[name])
    found.unused += [name for name in blocks if name not in readers]
    found.unused.sort()
    return found


def _refuse(key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{key} is {value!r} in the configuration; expected {expected}", key=key)


def _flag(key: str, value: object) -> bool:
    try:
        return lenient_flag(value)
    except ValueError as error:
        raise _refuse(key, value, str(error)) from None


def _dtype(value: object) -> torch.dtype:
    if not isinstance(value, str) or value.lower() not in _DTYPES:
        raise _refuse("communication_data_type", value, f"one of {', '.join(_DTYPES)}")
    return _DTYPES[value.lower()]


def _factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise _refuse("gradient_predivide_factor", value, "a number above 0")
    return float(value)


def _read_prescale(found: GradientSettings, value: object) -> None:
    """DeepSpeed's `prescale_gradients` divides by the number of ranks before the sum, as ringway does by default.
    Without it, DeepSpeed divides by `gradient_predivide_factor`, 1 by default, and the sum by the rest."""
    if _flag("prescale_gradients", value):
        found.predivide_factor = None
    elif found.predivide_factor is None:
        found.predivide_factor = 1.0


def _read_half(found: GradientSettings, name: str, value: object) -> None:
    """DeepSpeed makes the model half precision, so its gradients travel in half precision. The rest of the block, such
    as loss scaling, is not about communication."""
    if not isinstance(value, Mapping):
        raise _refuse(name, value, "a table")
    if value.get("enabled", False) in _UNSET or not _flag(f"{name}.enabled", value.get("enabled", False)):
        return
    found.unused.append(f"{name} (except for what travels)")
    if found.communication_dtype is None:
        found.communication_dtype = _HALF[name]


def _read_optimizer(found: GradientSettings, value: object) -> None:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise _refuse("optimizer", value, 'a table with "type"')
    name = _OPTIMIZERS.get(value["type"].lower())
    if name is None:
        found.unused.append(f"optimizer ({value['type']})")
        return
    arguments = value.get("params") or {}
    if not isinstance(arguments, Mapping):
        raise _refuse("optimizer.params", arguments, "a table")
    unknown = sorted(set(value) - {"type", "params"})
    if unknown:
        raise ConfigError(f"optimizer.{unknown[0]}: ringway does not act on it with {name}", key="optimizer")
    found.optimizer = name
    found.optimizer_arguments = {key: content for key, content in arguments.items() if content not in _UNSET}


def make_optimizer(
    settings: GradientSettings, model: nn.Module, group: c10d.ProcessGroup | None, codec: Any
) -> Optimizer:
    """The 1-bit optimizer of the configuration, for all trained parameters of a model."""
    from ringway import compress

    assert settings.optimizer is not None
    kind = getattr(compress, settings.optimizer)
    known = set(inspect.signature(kind).parameters) - {"params", "group", "codec"}
    for key in settings.optimizer_arguments:
        if key not in known:
            raise ConfigError(
                f"optimizer.params has {key!r}, which {settings.optimizer} does not act on{nearest(key, known)}",
                key=key,
            )
    arguments = dict(settings.optimizer_arguments)
    if settings.optimizer == "OneBitAdam":
        arguments.setdefault("freeze_step", _FREEZE_STEP)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    if codec is not None:
        arguments["codec"] = codec
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        optimizer: Optimizer = kind(trained, group=group, **arguments)
    except (TypeError, UsageError) as error:
        raise ConfigError(f"optimizer.params of {settings.optimizer}: {error}", key="optimizer") from error
    return optimizer
