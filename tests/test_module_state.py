"""Modules keep no state of their own, except for what docs/architecture.md lists under "Where state lives"."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ringway"

STATE = {
    "backends/mpi/world.py": {"LOCK", "_abandoned", "_groups", "_rank_in_words"},
    "backends/nccl/group.py": {"_environment"},
    "backends/registry.py": {"_COMBINED", "_OWN"},
    "backends/shm/cuda_kernels.py": {"_compiled"},
    "compat/deepspeed/logging.py": {"_assigned"},
    "compress/codecs/codec.py": {"_FACTORIES", "_made"},
    "groups/split.py": {"_split_over"},
    "launch/rendezvous.py": {"_hosted"},
    "launch/roll_call.py": {"_turns"},
    "launch/secret.py": {"_known"},
    "notebook/__init__.py": {"_current"},
    "notebook/rank.py": {"_interrupt"},
    "observe/trace/writer.py": {"_one_at_a_time"},
    "parallel/data.py": {"_registered"},
    "testing/conformance.py": {"CASES", "_last_subgroup"},
    "testing/rank.py": {"_started"},
}
"""Names of modules that functions change, by file."""

CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("acquire", "setdefault", "subtract", "update"),
}
"""Methods that change what they are called on."""


def _own_names(module: ast.Module) -> set[str]:
    """The names that the module itself assigns."""
    targets: list[ast.expr] = []
    for node in module.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _changed(node: ast.AST) -> Iterator[str]:
    """The names that the node itself changes, or changes the contents of."""
    if isinstance(node, ast.Global):
        yield from node.names
    elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        if isinstance(node.value, ast.Name):
            yield node.value.id
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if isinstance(node.func.value, ast.Name) and node.func.attr in CHANGES:
            yield node.func.value.id
    elif isinstance(node, ast.withitem) and isinstance(node.context_expr, ast.Name):
        yield node.context_expr.id  # a lock


def state(source: str) -> set[str]:
    """The names of a module that its functions change."""
    module = ast.parse(source)
    functions = [node for node in ast.walk(module) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    changed = {name for function in functions for node in ast.walk(function) for name in _changed(node)}
    return changed & _own_names(module)


def test_modules_keep_no_state_that_is_not_listed() -> None:
    found = {path.relative_to(SOURCE).as_posix(): state(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == STATE


def test_the_architecture_names_the_modules_that_keep_state() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## Where state lives")[1].split("\n## ")[0]
    assert [path for path in STATE if path not in section and not path.startswith(("testing/", "notebook/rank"))] == []


@pytest.mark.parametrize(
    "change",
    ["kept.append(1)", "kept[1] = 2", "del kept[1]", "global kept; kept = []", "kept.field = 1", "with kept: pass"],
)
def test_state_is_found(change: str) -> None:
    assert state(f"kept = []\n\ndef function():\n    {change}\n") == {"kept"}


def test_names_of_a_function_are_no_state() -> None:
    assert state("kept = []\n\ndef function():\n    other = []\n    other.append(kept)\n") == set()
