"""Every name of deepspeed.comm exists here, with deepspeed's parameters.

scripts/deepspeed_names.py makes the record from a pinned release.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as c10d

from ringway.compat import deepspeed

RECORD = json.loads((Path(__file__).parent / "data" / "deepspeed_comm.json").read_text())
NAMES: dict[str, dict[str, Any]] = RECORD["names"]
BY_KIND = {
    kind: [name for name, what in NAMES.items() if what["kind"] == kind]
    for kind in ("function", "class", "constant", "variable", "torch")
}


def _check_parameters(ours: Callable[..., Any], theirs: list[list[str | None]], where: str) -> None:
    """The same names in the same order; a default where deepspeed has one, equal if it is a plain value."""
    found = inspect.signature(ours).parameters
    spelled = [{"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(p.kind.name, "") + p.name for p in found.values()]
    assert spelled == [name for name, _ in theirs], f"{where} has other parameters"
    for name, default in theirs:
        if name is None or name.startswith("*"):
            continue
        value = found[name].default
        if default is None:
            assert value is inspect.Parameter.empty, f"{where}: {name} has no default in deepspeed"
            continue
        assert value is not inspect.Parameter.empty, f"{where}: {name} needs a default"
        try:
            plain = ast.literal_eval(default)
        except ValueError:  # an expression: only reductions among these must mean the same
            if default.endswith("ReduceOp.SUM"):
                assert value is deepspeed.ReduceOp.SUM, f"{where}: {name}"
            continue
        assert value == plain or (plain == [] and value == ()), f"{where}: {name}={value!r}, deepspeed {plain!r}"


def test_record_is_of_a_release_and_not_empty() -> None:
    assert RECORD["release"].count(".") == 2
    assert len(RECORD["sha256"]) == 64
    assert {"all_reduce", "init_distributed", "TorchBackend", "CommsLogger", "get_msg_size_from_args"} <= set(NAMES)
    assert len(BY_KIND["function"]) > 60


@pytest.mark.parametrize("name", sorted(NAMES))
def test_name_is_here(name: str) -> None:
    assert hasattr(deepspeed, name)


@pytest.mark.parametrize("name", BY_KIND["function"])
def test_function_takes_what_deepspeeds_takes(name: str) -> None:
    _check_parameters(getattr(deepspeed, name), NAMES[name]["parameters"], name)


@pytest.mark.parametrize("name", BY_KIND["class"])
def test_class_has_every_method(name: str) -> None:
    ours = getattr(deepspeed, name)
    for method, parameters in NAMES[name]["methods"].items():
        assert hasattr(ours, method), f"{name}.{method} is missing"
        # deepspeed's CCLBackend overrides its parent with parameters that do not work (scatter has gather's); ringway
        # keeps the parent's.
        if name != "CCLBackend" or method == "__init__":
            bound = inspect.ismethod(getattr(ours, method))
            _check_parameters(getattr(ours, method), parameters[1:] if bound else parameters, f"{name}.{method}")
    if issubclass(ours, Enum):
        assert {member.name: str(member.value) for member in ours} == NAMES[name]["members"]


@pytest.mark.parametrize("name", BY_KIND["constant"])
def test_constant_has_its_value(name: str) -> None:
    assert getattr(deepspeed, name) == NAMES[name]["value"]


def test_torchs_names_are_torchs() -> None:
    for name in BY_KIND["torch"]:
        assert getattr(deepspeed, name) is getattr(c10d, name)


def test_all_lists_what_is_public() -> None:
    made_when_asked = {"cdb", "nccl_backend", "mpi_backend", "ccl_backend", "hccl_backend", *BY_KIND["torch"]}
    assert set(NAMES) - made_when_asked <= set(deepspeed.__all__)
    for name in deepspeed.__all__:
        assert hasattr(deepspeed, name)
