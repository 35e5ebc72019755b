"""The public names: torch's signatures, all documented, all other names forwarded, fast to import."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway
import ringway._core as _core
from ringway.call import ALL_REDUCE, DTYPES, OPS, Reduce
from wheel_bits import AVX512, best_instructions, check_instructions

ROOT = Path(__file__).parent.parent

OWN = {
    "allgather_object",
    "broadcast_object",
    "reduce_object",
    "communicator",
    "premul_sum",
    "Backend",
    "ProcessGroup",
    "Work",
    "ReduceOp",
    "P2POp",
    "register_backend",
}
"""Names that ringway defines itself although torch has the same name."""


SINCE_2_11 = {
    "barrier": {"timeout"},
    "new_group": {"sort_ranks"},
    "init_process_group": {"enable_reconfigure"},
    "all_gather_object": {"weights_only"},
    "gather_object": {"weights_only"},
    "broadcast_object_list": {"weights_only"},
    "scatter_object_list": {"weights_only"},
    "send_object_list": {"weights_only"},
    "recv_object_list": {"weights_only"},
}
"""Parameters that ringway accepts and that torch may not have yet."""


def _collectives() -> set[str]:
    return {name for name in ringway.__all__ if "log_name" in _parameters(getattr(ringway, name))}


def _parameters(thing: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(thing).parameters) if inspect.isfunction(thing) else {}


@pytest.mark.parametrize("name", sorted(n for n in ringway.__all__ if hasattr(c10d, n) and n not in OWN))
def test_signature_is_torchs(name: str) -> None:
    ours, theirs = getattr(ringway, name), getattr(c10d, name)
    if not inspect.isfunction(theirs):
        return
    parameters = inspect.signature(theirs).parameters
    expected = [(p.name, p.kind, p.default) for p in parameters.values()]
    own = {"log_name"} | (SINCE_2_11.get(name, set()) - set(parameters))
    actual = [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values() if p.name not in own]
    assert actual == expected


def test_every_collective_takes_a_label() -> None:
    communication = {op.name for op in OPS if op.collective and op.name not in ("reduce_scatter_coalesced",)} | {
        "send",
        "recv",
        "isend",
        "irecv",
        "monitored_barrier",
    }
    assert communication <= _collectives()
    for name in _collectives():
        label = _parameters(getattr(ringway, name))["log_name"]
        assert label.kind is inspect.Parameter.KEYWORD_ONLY, name
        assert label.default is None, name


def test_all_lists_the_documented_names() -> None:
    """docs/api.md has one entry, a name in backticks at the start of a table row, for each public name."""
    page = (ROOT / "docs" / "api.md").read_text()
    documented = set(re.findall(r"^\| `([A-Za-z0-9_]+)", page, re.MULTILINE))
    assert documented == set(ringway.__all__)


PUBLIC_MODULES = [
    "ringway",
    "ringway.compress",
    "ringway.parallel",
    "ringway.lowcomm",
    "ringway.errors",
    "ringway.testing",
    "ringway.notebook",
    "ringway.compat",
    "ringway.compat.compressed",
    "ringway.compat.deepspeed",
    "ringway.compat.vllm",
]
DEEPSPEEDS = "ringway.compat.deepspeed"
"""Its names mean what DeepSpeed's do, and most need no docstring of their own."""


def _in_reference() -> Iterator[tuple[str, Any]]:
    """The names on docs/reference.md and what they stand for, from its mkdocstrings directives: of a module, those
    that `members` lists, or else its `__all__`, from which mkdocstrings leaves out what is also a module's name."""
    page = (ROOT / "docs" / "reference.md").read_text()
    for directive in re.finditer(r"^::: ([\w.]+)\n((?:    .*\n)*)", page, re.MULTILINE):
        path = directive[1]
        parent, _, last = path.rpartition(".")
        if not _is_module(path):
            yield last, getattr(importlib.import_module(parent), last)
            continue
        module = importlib.import_module(path)
        yield last, module
        members = re.findall(r"^        - (\w+)$", directive[2], re.MULTILINE)
        if not members:
            members = [name for name in module.__all__ if not _is_module(f"{path}.{name}")]
        for name in members:
            yield name, getattr(module, name)


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False


def test_the_reference_has_every_public_name() -> None:
    shown = {(name, id(thing)) for name, thing in _in_reference()}
    for path in PUBLIC_MODULES:
        module = importlib.import_module(path)
        missing = [name for name in module.__all__ if (name, id(getattr(module, name))) not in shown]
        assert not missing, f"docs/reference.md lacks these names of {path}"


@pytest.mark.parametrize("path", [path for path in PUBLIC_MODULES if path != DEEPSPEEDS])
def test_every_public_name_has_a_docstring(path: str) -> None:
    module = importlib.import_module(path)
    things = {name: getattr(module, name) for name in module.__all__}
    described = {name: thing for name, thing in things.items() if inspect.isroutine(thing) or inspect.isclass(thing)}
    assert not [name for name, thing in described.items() if not inspect.getdoc(thing)]


def test_all_exists_once() -> None:
    assert len(ringway.__all__) == len(set(ringway.__all__))
    for name in ringway.__all__:
        assert getattr(ringway, name) is not None


def test_every_other_name_is_forwarded() -> None:
    public = [name for name in dir(c10d) if not name.startswith("_")]
    for name in public:
        assert hasattr(ringway, name), name
    assert ringway.TCPStore is c10d.TCPStore
    assert set(public) <= set(dir(ringway))
    with pytest.raises(AttributeError, match=r"neither ringway nor torch\.distributed has a name 'all_redcue'"):
        ringway.all_redcue  # noqa: B018


def test_torchs_names_of_backends_are_found_on_ringways_class() -> None:
    assert ringway.Backend.NCCL == "nccl"
    assert ringway.Backend("gloo") == "gloo"


def test_codes_match_the_native_core() -> None:
    header = (ROOT / "csrc" / "codes.h").read_text()

    def members(name: str) -> list[int]:
        body = re.search(rf"enum class {name} : uint8_t {{(.*?)}};", header, re.DOTALL)
        assert body is not None
        return [int(code) for code in re.findall(r"= (\d+)", body.group(1))]

    assert members("Op") == [op.code for op in OPS] == list(range(len(OPS)))
    assert members("Reduce") == [int(reduce) for reduce in Reduce]
    assert members("DType") == [*range(len(DTYPES)), 255]
    # The dtypes too, as DLPack passes them to the native core.
    record = _core.GroupRecord(recorder := _core.Recorder(64), "test")
    for code, dtype in enumerate(DTYPES[:10]):
        tensor = torch.zeros(3).to(dtype)
        for summed, taken in ((1 << code, True), (~(1 << code) & 0xFFFF, False)):
            path = _core.FastPath(record, 0, 1, _core.CPU, 0, summed, 1 << ALL_REDUCE.code)
            assert (path.begin(ALL_REDUCE.code, tensor, tensor, -1) > 0) == taken, dtype
            record.started(0)
        assert recorder.recent(1)[0][3] == code


def test_the_citation_names_this_version() -> None:
    assert f'\nversion: "{ringway.__version__}"\n' in (ROOT / "CITATION.cff").read_text()


def test_the_core_uses_the_best_instructions() -> None:
    """Every wheel is asked this too (scripts/wheel_test.py)."""
    assert best_instructions("aarch64", ()) == {"sums": "neon", "codecs": "neon"}
    assert best_instructions("x86_64", AVX512) == {"sums": "avx512", "codecs": "avx2"}
    assert best_instructions("x86_64", AVX512 - {"avx512vl"}) == {"sums": "avx2", "codecs": "avx2"}
    assert best_instructions("x86_64", {"sse2"}) == {"sums": "plain", "codecs": "baseline"}
    check_instructions()


def test_a_core_with_lesser_instructions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "shm_isa", lambda: "lesser")
    with pytest.raises(AssertionError, match=r"the core has chosen .*lesser"):
        check_instructions()


def _imported() -> tuple[float, set[str]]:
    """How much longer ringway makes the import of torch, in CPU time, which a busy machine does not stretch; and the
    packages that it adds."""
    script = (
        "import sys, time; start = time.process_time(); import torch; before = set(sys.modules); "
        "middle = time.process_time(); import ringway; end = time.process_time(); "
        "print((end - middle) / (middle - start), *{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    ratio, *packages = done.stdout.split()
    return float(ratio), set(packages)


@pytest.mark.processes
def test_import_adds_little_to_the_import_of_torch() -> None:
    optional = {"mpi4py", "triton", "cupy", "msgspec", "typer", "rich", "plotly", "prometheus_client", "pytest"}
    ratios = []
    for _ in range(5):
        ratio, packages = _imported()
        assert not packages & (optional | {"hypothesis"})
        ratios.append(ratio)
        if ratio < 0.15:
            return
    raise AssertionError(ratios)
