"""The ccl backend on a stand-in for oneCCL that is built here. The stand-in has the real header's prototypes and moves
real data between processes. `docs/proofs/ccl.md` (make ccl-proof) is the proof on the real library."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import SOME, about_the_backend

from ringway.backends.ccl import library as ccl_library
from ringway.backends.ccl.backend import configure
from ringway.call import Reduce
from ringway.errors import BackendUnavailable, CommTimeout, RingwayError
from ringway.testing import RankContext, RankPool, Report
from ringway.testing.conformance import Setting, all_cases, run_setting

HERE = Path(__file__).parent
STAND_IN = HERE / "ccl_stand_in.cpp"
sys.path.insert(0, str(HERE.parents[1] / "scripts"))
import oneccl_api  # noqa: E402

RECORDED = json.loads((HERE / "data" / "oneccl_api.json").read_text())


def _compiled(source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "a C++ compiler built the core; now it is gone"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-Wl,-soname,libccl.so.2"]
    subprocess.run([compiler, *flags, "-o", str(folder / "libccl.so.2"), str(source)], check=True, timeout=120)
    return folder / "libccl.so.2"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The value of CCL_ROOT with which ringway finds the stand-in."""
    root = tmp_path_factory.mktemp("oneccl")
    _compiled(STAND_IN, root / "lib")
    return str(root)


def _set_root(context: RankContext, root: str) -> None:
    os.environ["CCL_ROOT"] = root


@pytest.fixture
def ccl_pool(pool: RankPool, stand_in: str) -> Iterator[RankPool]:
    """Three ranks that find the stand-in."""
    pool.replace()
    pool.run(_set_root, stand_in, world_size=3)
    yield pool
    pool.replace()


@pytest.mark.processes
def test_conformance_on_the_stand_in(ccl_pool: RankPool) -> None:
    """Three ranks, with every reduction of every dtype, and a sub-group of two."""
    cases = [case.name for case in all_cases().values() if about_the_backend(case)]
    report = Report()
    run_setting(ccl_pool, Setting("ccl", 3, every=min(SOME, 3)), cases, report)
    run_setting(ccl_pool, Setting("ccl", 3, members=(1, 2), every=SOME), cases, report)
    assert not report.findings, str(report)
    assert len(report.seconds) > 120


def test_the_stand_in_has_the_real_prototypes() -> None:
    own = oneccl_api.functions(STAND_IN.read_text())
    assert set(own) == set(ccl_library.PROTOTYPES)
    assert own == {name: RECORDED["functions"][name] for name in own}


def test_ringways_prototypes_are_those_of_the_header() -> None:
    """Compares ringway's ctypes prototypes with the recorded header: types, number and order of the arguments."""
    kinds: dict[Any, set[str]] = {
        ctypes.c_int: {"int", "onecclResult_t", "onecclDataType_t", "onecclRedOp_t"},
        ctypes.c_size_t: {"size_t"},
        ctypes.c_char_p: {"char *"},
        ctypes.c_void_p: {"void *", "onecclComm_t"},
        ctypes.POINTER(ctypes.c_size_t): {"size_t *"},
        ctypes.POINTER(ctypes.c_int): {"int *"},
        ctypes.POINTER(ctypes.c_void_p): {"onecclComm_t *"},
        ctypes.POINTER(ccl_library.UniqueId): {"onecclUniqueId *"},
        ccl_library.UniqueId: {"onecclUniqueId"},
    }
    for name, (result, arguments) in ccl_library.PROTOTYPES.items():
        declared_result, declared = RECORDED["functions"][name]
        assert declared_result in kinds[result], name
        assert len(arguments) == len(declared), name
        for argument, written in zip(arguments, declared, strict=True):
            assert written in kinds[argument], (name, written)


def test_constants_are_those_of_the_header() -> None:
    values = RECORDED["values"]
    assert values["ONECCL_UNIQUE_ID_BYTES"] == ccl_library.ID_BYTES == ctypes.sizeof(ccl_library.UniqueId)
    assert values["onecclSuccess"] == ccl_library.SUCCESS
    names = {dtype: "oneccl" + str(dtype).removeprefix("torch.").capitalize() for dtype in ccl_library.DATATYPES}
    assert {dtype: values[name] for dtype, name in names.items()} == ccl_library.DATATYPES
    spelled = {Reduce.SUM: "Sum", Reduce.PRODUCT: "Prod", Reduce.MAX: "Max", Reduce.MIN: "Min"}
    assert {reduce: values[f"oneccl{name}"] for reduce, name in spelled.items()} == ccl_library.REDUCTIONS


def test_a_missing_library_is_reported_with_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CCL_ROOT", str(tmp_path))
    ccl_library.load.cache_clear()
    try:
        with pytest.raises(BackendUnavailable) as caught:
            ccl_library.load()
    finally:
        ccl_library.load.cache_clear()
    assert str(tmp_path / "lib" / "libccl.so.2") in str(caught.value)
    if platform.machine() == "x86_64":
        assert "pip install oneccl" in str(caught.value)
    else:
        assert f"oneCCL exists for x86_64 only, and this is {platform.machine()}" in str(caught.value)


@pytest.mark.processes
def test_another_library_under_the_same_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int onecclGetVersion(int *version) { return *version = 0; }\n')
    _compiled(source, tmp_path / "lib")
    monkeypatch.setenv("CCL_ROOT", str(tmp_path))
    ccl_library.load.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="has no onecclGetUniqueId: it is not oneCCL 2022"):
            ccl_library.load()
    finally:
        ccl_library.load.cache_clear()


def test_a_file_that_is_not_a_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ringway does not fall back to another library that the loader might find: CCL_ROOT named this one."""
    (tmp_path / "lib").mkdir()
    file = tmp_path / "lib" / "libccl.so.2"
    file.write_text("this is a text\n")
    monkeypatch.setenv("CCL_ROOT", str(tmp_path))
    ccl_library.load.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="does not load") as caught:
            ccl_library.load()
    finally:
        ccl_library.load.cache_clear()
    assert str(file) in caught.value.reason
    assert "CCL_ROOT" in str(caught.value)


def test_the_users_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CCL_ATL_TRANSPORT", "CCL_PROCESS_LAUNCHER", "CCL_LOCAL_RANK", "CCL_LOCAL_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("CCL_ATL_TRANSPORT", "mpi")
    configure(["a", "b", "a", "b"], 3)
    assert os.environ["CCL_ATL_TRANSPORT"] == "mpi"
    assert os.environ["CCL_PROCESS_LAUNCHER"] == "none"
    assert (os.environ["CCL_LOCAL_RANK"], os.environ["CCL_LOCAL_SIZE"]) == ("1", "2")


def _mismatched(context: RankContext) -> str:
    dist = context.start("ccl", group_name="mismatched")
    dist.barrier()
    dist.communicator().set_timeout(2.0)  # of the rank whose peer has failed
    rows = [1, 2] if context.rank == 0 else [1, 1]
    try:
        dist.all_to_all_single(torch.zeros(2), torch.ones(sum(rows)), [1, 1], rows)
    except RingwayError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


@pytest.mark.processes
def test_errors_of_the_library_are_mapped(ccl_pool: RankPool) -> None:
    said = ccl_pool.run(_mismatched, world_size=2)
    assert any("onecclAllToAllV" in text and "Invalid argument" in text for text in said)


def _late(context: RankContext) -> tuple[str, float]:
    dist = context.start("ccl", group_name="late")
    group = dist.new_group()
    dist.communicator(group).set_timeout(1.0)
    reported, waited = "", 0.0
    if context.rank == 1:
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except CommTimeout as error:
            reported, waited = str(error), time.monotonic() - began
    total = torch.ones(1)
    dist.all_reduce(total)
    return reported + f" and the world still sums to {total.item():g}", waited


@pytest.mark.processes
def test_a_call_that_cannot_be_interrupted_is_given_up(ccl_pool: RankPool) -> None:
    """The library never returns from the call, but the waiting rank does, and other groups stay usable."""
    (first, _), (second, waited) = ccl_pool.run(_late, world_size=2)
    assert "the world still sums to 2" in first
    assert "all_reduce" in second
    assert "the world still sums to 2" in second
    assert 1.0 <= waited < 30
