"""Serves `import deepspeed.comm` from `ringway.compat.deepspeed`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ringway.compat import deepspeed
from ringway.errors import UsageError

_PACKAGE = "deepspeed"
_COMM = "deepspeed.comm"


class _Loader(Loader):
    """Puts an existing module under another name."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what sys.modules holds now. The module itself keeps its own name and spec.
        sys.modules[module.__name__] = self._module


class _Comm(MetaPathFinder):
    """Finds `deepspeed.comm` and the modules beneath it, before any other finder does."""

    def __init__(self) -> None:
        self._served: dict[str, ModuleType] = {_COMM: deepspeed}
        for module in deepspeed.SUBMODULES:
            self._served[f"{_COMM}.{module.__name__.rpartition('.')[2]}"] = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._served.get(fullname)
        return None if module is None else ModuleSpec(fullname, _Loader(module), is_package=fullname == _COMM)


class _Package(MetaPathFinder, Loader):
    """Finds `deepspeed` itself if it is not installed: a package with nothing but `comm` and `init_distributed`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname == _PACKAGE else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Stands in for DeepSpeed, which is not installed: only `deepspeed.comm`, by ringway."
        module.comm = deepspeed  # type: ignore[attr-defined]
        module.init_distributed = deepspeed.init_distributed  # type: ignore[attr-defined]


def serve_deepspeed_comm() -> None:
    """See `ringway.compat.install`."""
    if sys.modules.get(_COMM) is deepspeed or any(isinstance(finder, _Comm) for finder in sys.meta_path):
        return
    if _COMM in sys.modules:
        raise UsageError(
            "deepspeed.comm is imported already, and deepspeed's modules hold it: call ringway.compat.install() before "
            "the first `import deepspeed`"
        )
    sys.meta_path.insert(0, _Comm())
    sys.meta_path.append(_Package())
