"""Under an MPI launcher that sets no variable that ringway knows, MPI is asked, and it is said that it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_homes import mpi_home
from ringway.launch import ask_mpi
from ringway.launch.ancestry import Ancestor, Ancestry, ancestors
from ringway.launch.discover import discover, explore
from ringway.launch.info import LaunchInfo


def _below(*names: str) -> Ancestry:
    def ancestry() -> Iterator[Ancestor]:
        for pid, name in enumerate(names, start=100):
            yield Ancestor(pid, 1, {}, name)

    return ancestry


FAKE = """
import sys
class Communicator:
    def __init__(self, rank, size): self.rank, self.size = rank, size
    def Get_rank(self): return self.rank
    def Get_size(self): return self.size
    def Split_type(self, kind): return Communicator(1, 2)
    def Free(self): pass
COMM_TYPE_SHARED = 0
COMM_WORLD = Communicator({rank}, {size})
def Is_initialized(): return True
def Is_finalized(): return False
{more}
"""


@pytest.fixture
def fake_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which a test writes a module mpi4py of its own."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: initialize = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        del sys.modules[name]


def _ask(*names: str) -> LaunchInfo:
    return discover({}, ancestry=_below(*names), asks_mpi=True)


def test_names_of_ancestors() -> None:
    me = Path("/proc/self/comm").read_text().strip()
    assert all(ancestor.name for ancestor in ancestors())
    child = subprocess.run(
        [sys.executable, "-c", "from ringway.launch.ancestry import ancestors; print(next(ancestors()).name)"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert child.stdout.strip() == me


def test_mpi_is_asked(fake_mpi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake_mpi / "MPI.py").write_text(FAKE.format(rank=0, size=4, more=""))
    info = _ask("bash", "prted", "mpirun")
    assert (info.rank, info.size, info.local_rank, info.local_size, info.source) == (0, 4, 1, 2, "mpi4py")
    assert info.address is None, "MPI sends the address"
    said = capsys.readouterr().err
    assert "prted (process 101) set no variable that ringway knows, so MPI was asked through mpi4py: 4 ranks" in said


@pytest.mark.usefixtures("fake_mpi")
def test_mpi_is_not_asked_without_a_reason(fake_mpi: Path) -> None:
    (fake_mpi / "MPI.py").write_text(FAKE.format(rank=0, size=4, more=""))
    assert _ask("bash", "python", "mpiexecutor").size == 1, "no launcher"
    known = discover({"RANK": "0", "WORLD_SIZE": "1"}, ancestry=_below("mpirun"), asks_mpi=True)
    assert known.source != "mpi4py", "variables are set"
    assert discover({}, ancestry=_below("mpirun")).size == 1
    assert "mpi4py.MPI" not in sys.modules
    assert explore({}, ancestry=_below("mpirun")).info.notes == (
        "mpirun (process 100), an MPI launcher, is above it",
    ), "for `ringway env`"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (FAKE.format(rank=0, size=1, more=""), "MPI, which was asked, knows of this rank only"),
        (FAKE.format(rank=0, size=4, more="def Is_finalized(): return True"), "not initialized in this process"),
        ("raise RuntimeError('cannot load MPI library')", "mpi4py cannot load MPI: cannot load MPI library"),
        ("import os; os.abort()", "mpi4py cannot load MPI: exit status -6"),
        ("import time; time.sleep(60)", "has not loaded MPI within 1 s"),
    ],
)
def test_a_world_of_one_says_why(fake_mpi: Path, monkeypatch: pytest.MonkeyPatch, module: str, words: str) -> None:
    monkeypatch.setattr(ask_mpi, "_LOAD_SECONDS", 1.0 if "sleep" in module else 60.0)
    (fake_mpi / "MPI.py").write_text(module)
    info = _ask("hydra_pmi_proxy")
    assert (info.rank, info.size) == (0, 1)
    (note,) = info.notes
    assert note.startswith("hydra_pmi_proxy (process 100), an MPI launcher, is above it, and ")
    assert words in note


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_mpi, "find_spec", lambda name: None)
    (note,) = _ask("mpirun").notes
    assert note.endswith("and mpi4py, which could be asked, is not installed")


PROGRAM = """
import os
from mpi4py import MPI  # MPI reads its launcher's variables here; then they are gone, as if it used others
for name in [name for name in os.environ if name.startswith(("PMI", "HYDRA", "MPI"))]:
    del os.environ[name]
import torch
import ringway as dist
dist.init_distributed()
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(f"sum {tensor.item():g} on rank {dist.get_rank()} of {dist.get_world_size()}, local {dist.get_local_rank()}")
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_real_launcher_without_variables(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    home = mpi_home("mpich") / "bin"
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    run = subprocess.run(
        [home / "mpiexec", "-n", "2", home / "python", tmp_path / "program.py"],
        env={name: value for name, value in os.environ.items() if name not in ours},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ringway: 2 ranks, by mpi4py;" in run.stderr
    assert "set no variable that ringway knows, so MPI was asked" in run.stderr
    for rank in range(2):
        assert f"sum 2 on rank {rank} of 2, local {rank}" in run.stdout
