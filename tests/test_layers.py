"""Imports point down the layers that docs/architecture.md lists, and never in a circle."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "ringway"

LAYERS = (
    ("tools", {"cli", "bench", "doctor", "notebook", "testing", "__main__"}),
    ("compatibility", {"compat"}),
    ("package", {"__init__"}),
    ("job", {"job"}),
    ("api", {"api"}),
    ("features", {"parallel", "lowcomm", "compress", "observe"}),
    ("groups", {"groups"}),
    ("comparison", {"compare"}),
    ("backends", {"backends"}),
    ("launch", {"launch"}),
    (
        "vocabulary",
        {
            "call",
            "work",
            "errors",
            "config",
            "config_file",
            "keys",
            "store",
            "threads",
            "references",
            "torch_versions",
            "version",
        }
        | {"torch_patches", "forwarding", "descriptors", "_core"},
    ),
)
HEIGHT = {folder: len(LAYERS) - level for level, (_, folders) in enumerate(LAYERS) for folder in folders}


def _modules() -> dict[str, Path]:
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        modules[".".join(("ringway", *parts)).removesuffix(".__init__")] = path
    return modules


def _folder(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """The ringway modules that the file imports, anywhere in it, including under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.split(".")[0] == "ringway":
                for name in node.names:
                    whole = f"{node.module}.{name.name}"
                    found.add(whole if whole in modules else node.module)
        elif isinstance(node, ast.Import):
            found.update(name.name for name in node.names if name.name.split(".")[0] == "ringway")
    return found


def test_imports_point_down() -> None:
    modules = _modules()
    wrong = []
    for module, path in modules.items():
        assert _folder(module) in HEIGHT, f"{module} has no layer: add it to LAYERS and to docs/architecture.md"
        for imported in _imports(path, modules):
            if HEIGHT[_folder(imported)] > HEIGHT[_folder(module)]:
                wrong.append(f"{module} imports {imported}, which is in a layer above it")
    assert not wrong, "\n".join(sorted(wrong))


def test_the_architecture_page_lists_the_layers() -> None:
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text()
    table = re.search(r"^## Layers$.*?\n\|---\|---\|\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    listed = []
    for row in table[1].splitlines():
        _, name, folders, _ = (cell.strip() for cell in row.split("|"))
        names = re.findall(r"`([^`]+)`", folders.partition(":")[0])
        listed.append((name, {Path(each).stem for each in names}))
    assert listed == list(LAYERS)


def test_imports_have_no_cycle() -> None:
    modules = _modules()
    graph = {module: _imports(path, modules) & modules.keys() for module, path in modules.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        if module in above:
            circle = " -> ".join((*above[above.index(module) :], module))
            raise AssertionError(f"imports go in a circle: {circle}")
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_native_code_uses_no_streams() -> None:
    """Processes with torch's CUDA libraries crashed where they were used (docs/proofs/suite_gpu.md)."""
    for path in (SOURCE.parent.parent / "csrc").rglob("*.*"):
        assert not re.search(r"#include <(fstream|sstream|iostream|iomanip)>", path.read_text()), path


def test_files_stay_small() -> None:
    """A file longer than this holds more than one thing."""
    native = SOURCE.parent.parent / "csrc"
    files = [*SOURCE.rglob("*.py"), *native.rglob("*.cpp"), *native.rglob("*.h")]
    long = {str(f.relative_to(SOURCE.parent.parent)): n for f in files if (n := len(f.read_text().splitlines())) > 600}
    assert not long, long
