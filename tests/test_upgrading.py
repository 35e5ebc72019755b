"""docs/upgrading.md names what exists and what is gone, and nothing of 0.1.0 is missing from it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "upgrading.md").read_text()
OPTIONAL = ("mpi4py", "triton")
BEFORE = json.loads((Path(__file__).parent / "data" / "names_0_1_0.json").read_text())
"""The modules of 0.1.0, and the public names of those that other projects import."""


def _rows(heading: str) -> list[tuple[str, str]]:
    """The two columns of the table under a heading."""
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return rows[1:]


def _names(cell: str) -> list[str]:
    return re.findall(r"`(ringway[\w.]*)`", cell)


def _found(name: str) -> bool:
    """Whether the module, or the name in a module, can be imported."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name in OPTIONAL:
                pytest.skip(f"{error.name} is not installed")
            continue
        for attribute in parts[end:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


MOVED = _rows("Modules that moved")
NEW_NAMES = sorted({name for _, new in [*MOVED, *_rows("Names that changed")] for name in _names(new)})
STAY = [name for names, _ in _rows("What stays") for name in _names(names)]


@pytest.mark.parametrize("name", NEW_NAMES)
def test_new_names_exist(name: str) -> None:
    assert _found(name)


@pytest.mark.parametrize("name", STAY)
def test_names_that_stay_exist(name: str) -> None:
    assert _found(name)


def test_old_modules_are_gone() -> None:
    """A module that moved must not be found under its old name, except as the package that replaced it."""
    assert len(MOVED) > 60
    for cell, _ in MOVED:
        old = "ringway." + cell.split("`")[1]
        parent = importlib.import_module(old.rpartition(".")[0])
        spec = importlib.util.find_spec(old) if hasattr(parent, "__path__") else None
        is_package = spec is not None and spec.submodule_search_locations is not None
        assert is_package if cell.endswith("*") else spec is None, old


def test_every_module_of_before_exists_or_is_named() -> None:
    named = {"ringway." + cell.split("`")[1] for cell, _ in MOVED}
    assert len(BEFORE["modules"]) > 150
    assert [name for name in BEFORE["modules"] if name not in named and not _found(name)] == []


@pytest.mark.parametrize("module", BEFORE["names"])
def test_names_that_other_projects_import_stay(module: str) -> None:
    imported = importlib.import_module(module)
    assert [name for name in BEFORE["names"][module] if not hasattr(imported, name)] == []
