"""Submodules of torch.distributed under ringway's name: `from ringway.fsdp import fully_shard`.

`ringway.fsdp` is torch's module itself, not a copy. A submodule that ringway has is ringway's; if torch has one of the
same name, ringway's leads on to its attributes (`attributes_of`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OURS, TORCHS = "ringway", "torch.distributed"


class _Forwarder(MetaPathFinder, Loader):
    """Finds `ringway.X` if nothing else does, and what is beneath it, in torch.distributed.

    It comes first: beneath a package of torch's, another finder would find torch's file and load it a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package.partition(".")[0] != OURS or package not in sys.modules:
            return None
        actual = sys.modules[package].__name__  # another one if the package is torch's
        if package == OURS:
            others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            own = next((spec for spec in others if spec is not None), None)
            if own is not None:
                return own
            actual = TORCHS
        elif actual == package:
            return None  # beneath a package of ringway's own
        found = importlib.util.find_spec(f"{actual}.{name}")
        return None if found is None else ModuleSpec(fullname, self, origin=found.name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # The import system takes what is here: torch's module, with its own name and spec.
        sys.modules[module.__spec__.name] = importlib.import_module(str(module.__spec__.origin))


def install() -> None:
    """From now on, torch.distributed's submodules can be imported under ringway's name."""
    if not any(isinstance(finder, _Forwarder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Forwarder())


def attributes_of(submodule: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that leads on to torch.distributed's submodule of the same name. ringway's own files
    come first: `from ringway.launch import run` asks here before it looks for a file."""
    own = f"{OURS}.{submodule}"

    def __getattr__(name: str) -> Any:  # noqa: N807 - a module's
        if "__path__" in vars(sys.modules[own]) and importlib.util.find_spec(f"{own}.{name}") is not None:
            return importlib.import_module(f"{own}.{name}")
        # Not every torch has the submodule, and the import system asks for names with underscores.
        if not name.startswith("__") and importlib.util.find_spec(f"{TORCHS}.{submodule}") is not None:
            theirs = importlib.import_module(f"{TORCHS}.{submodule}")
            if hasattr(theirs, name):
                return getattr(theirs, name)
        raise AttributeError(f"neither {OURS}.{submodule} nor {TORCHS}.{submodule} has a name '{name}'")

    return __getattr__
