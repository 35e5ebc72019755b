"""Record every public name of `deepspeed.comm`, with its parameters, from a release of deepspeed.

    python scripts/deepspeed_names.py                     # downloads the pinned release
    python scripts/deepspeed_names.py deepspeed-X.tar.gz  # reads a local file

The sources are parsed, never imported, so deepspeed need not be installable. tests/compat/test_deepspeed_names.py
compares `ringway.compat.deepspeed` with the record.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

RELEASE = "0.19.8"
RECORD = Path(__file__).resolve().parent.parent / "tests" / "compat" / "data" / "deepspeed_comm.json"

# Names that `from .x import *` makes visible although they are not part of deepspeed.comm's interface.
NOT_OURS = {
    "get_accelerator": "deepspeed.accelerator's",
    "timer": "a module of deepspeed's",
    "utils": "a module of deepspeed's",
}

Public = dict[str, dict[str, Any]]


class Sources:
    """The Python files of a release, by module name."""

    def __init__(self, archive: Path) -> None:
        self._files: dict[str, str] = {}
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                path = Path(member.name)
                if member.isfile() and path.suffix == ".py" and path.parts[1:2] == ("deepspeed",):
                    parts = list(path.with_suffix("").parts[1:])
                    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                    file = tar.extractfile(member)
                    assert file is not None
                    self._files[name] = file.read().decode()
                    if path.name == "__init__.py":
                        self._files[name + ".__init__"] = ""

    def is_module(self, name: str) -> bool:
        return name in self._files

    def package_of(self, module: str) -> str:
        return module if module + ".__init__" in self._files else module.rpartition(".")[0]

    def tree(self, module: str) -> ast.Module:
        return ast.parse(self._files[module])


def public_names(sources: Sources, module: str, seen: frozenset[str] = frozenset()) -> Public:
    """The names that `from module import *` imports, each with its description."""
    names: Public = {}
    if module in seen:  # modules of deepspeed.comm import each other
        return names
    for node in sources.tree(module).body:
        names |= _defined(node)
        if isinstance(node, ast.ImportFrom):
            names |= _imported(sources, module, node, seen | {module})
    return {name: what for name, what in names.items() if not name.startswith("_")}


def _defined(node: ast.stmt) -> Public:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name: describe(node)}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {target.id: _variable(node.value) for target in targets if isinstance(target, ast.Name)}
    return {}


def _imported(sources: Sources, module: str, node: ast.ImportFrom, seen: frozenset[str]) -> Public:
    origin = _origin(sources, module, node)
    if origin == "torch.distributed":
        return {alias.asname or alias.name: {"kind": "torch"} for alias in node.names}
    if not sources.is_module(origin):
        return {}
    if node.names[0].name == "*":
        return public_names(sources, origin, seen)
    found = {alias.asname or alias.name: _find(sources, origin, alias.name) for alias in node.names}
    return {name: what for name, what in found.items() if what is not None}


def _origin(sources: Sources, module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = sources.package_of(module).split(".")
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _find(sources: Sources, module: str, name: str) -> dict[str, Any] | None:
    """The description of a name, found through the module's imports; None for a module."""
    if sources.is_module(f"{module}.{name}"):
        return None
    for node in sources.tree(module).body:
        defined = _defined(node)
        if name in defined:
            return defined[name]
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            origin = _origin(sources, module, node)
            return _find(sources, origin, name) if sources.is_module(origin) else None
    return None


def describe(node: ast.FunctionDef | ast.ClassDef) -> dict[str, Any]:
    if isinstance(node, ast.FunctionDef):
        return {"kind": "function", "parameters": parameters(node.args)}
    methods = {
        item.name: parameters(item.args)
        for item in node.body
        if isinstance(item, ast.FunctionDef) and (item.name == "__init__" or not item.name.startswith("_"))
    }
    members = {
        target.id: ast.unparse(item.value)
        for item in node.body
        if isinstance(item, ast.Assign)
        for target in item.targets
        if isinstance(target, ast.Name)
    }
    return {"kind": "class", "methods": methods, "members": members}


def parameters(arguments: ast.arguments) -> list[list[str | None]]:
    """[name, default] in order. The default is its source text, or None if there is none."""
    listed: list[list[str | None]] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    for place, argument in enumerate(positional):
        default = None if place < missing else ast.unparse(arguments.defaults[place - missing])
        listed.append([argument.arg, default])
    if arguments.vararg:
        listed.append(["*" + arguments.vararg.arg, None])
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        listed.append([argument.arg, None if value is None else ast.unparse(value)])
    if arguments.kwarg:
        listed.append(["**" + arguments.kwarg.arg, None])
    return listed


def _variable(value: ast.expr | None) -> dict[str, Any]:
    """A constant with its value. Long texts and values computed at import have only their name."""
    try:
        constant = ast.literal_eval(value) if value else ...
    except ValueError:
        constant = ...
    if constant is ... or "\n" in str(constant):
        return {"kind": "variable"}
    return {"kind": "constant", "value": constant}


def record(archive: Path) -> dict[str, Any]:
    sources = Sources(archive)
    names = public_names(sources, "deepspeed.comm")
    names["Backend"] = public_names(sources, "deepspeed.comm.backend")["Backend"]
    return {
        "release": RELEASE,
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "not_ours": NOT_OURS,
        "names": {name: what for name, what in sorted(names.items()) if name not in NOT_OURS},
    }


def _download(folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, "-d", folder, f"deepspeed=={RELEASE}"], check=True, timeout=600)
    return next(Path(folder).glob("deepspeed-*.tar.gz"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(sys.argv[1]) if len(sys.argv) > 1 else _download(folder)
        found = record(archive)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found['names'])} names of deepspeed.comm {RELEASE} in {RECORD}")


if __name__ == "__main__":
    main()
