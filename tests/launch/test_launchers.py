"""One unchanged program under every launcher available here, with the same result and with a secret."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from free_ports import free_port
from mpi_homes import mpi_home
from programs import ended_with, run_launched, run_program
from ringway.testing import RankPool

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "torch_dropin.py"
RESULT = re.compile(r"weights (.*) from 24 samples on (\d+) ranks")
HOSTS_FILE = r"this host's file \S+/ringway\S*/[0-9a-f]{32}"


pytestmark = pytest.mark.processes


def _clean_environment() -> dict[str, str]:
    """This process's environment, without variables of a launcher around the tests."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    prefixes = ("RINGWAY_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith(prefixes)}
    return kept | {"OMP_NUM_THREADS": "1", "RINGWAY_REQUIRE_SECRET": "1"}


def _run(command: list[str | Path], environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env=_clean_environment() | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def expected(pool: RankPool) -> str:
    """What the program computes without a launcher."""
    (ended,) = run_program(pool, PROGRAM)
    found = RESULT.search(ended.output)
    assert found is not None, ended
    assert found.group(2) == "1"
    assert found.group(1).startswith("0.9")  # near the true 1, -2, 0.5
    return found.group(1)


def _check(output: str, expected: str, secret: str) -> None:
    """The result of two ranks, and where each got the job's secret from."""
    found = RESULT.search(output)
    assert found is not None, output
    assert (found.group(1), found.group(2)) == (expected, "2")
    sources = re.findall("secret from (.*)", output)
    assert len(sources) == 2, output
    assert all(re.fullmatch(secret, source) for source in sources), sources


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, after whose start each rank says where its secret came from."""
    path = tmp_path_factory.mktemp("launched") / "program.py"
    path.write_text(
        f"""
import runpy, sys
import ringway
from ringway.store import key_of

start = ringway.init_distributed

def init_distributed(**options):
    start(**options)
    sys.stdout.write(f"secret from {{key_of(ringway.communicator().info.store).source}}\\n")
    sys.stdout.flush()

ringway.init_distributed = init_distributed
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""
    )
    return path


def test_ringway_run(expected: str, program: Path) -> None:
    output = _run([sys.executable, "-m", "ringway.cli", "run", "-n", "2", program])
    _check(output, expected, r"/proc/\d+/fd/\d+ \(RINGWAY_JOB_SECRET_FILE\)")
    assert "[rank 0] weights" in output
    assert "ringway run: 2 ranks finished" in output


_TELLS_ITS_SECRET = """
import json, os, sys
from pathlib import Path

secret = Path(os.environ["RINGWAY_JOB_SECRET_FILE"]).read_text()
shown = {"argv": str(sys.argv), "environ": str(os.environ)}
for pid in (os.getpid(), os.getppid()):  # the rank and the launcher
    for part in ("cmdline", "environ", "comm", "maps"):
        shown[f"{pid} {part}"] = Path(f"/proc/{pid}/{part}").read_text(errors="replace")
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps([secret, [k for k, v in shown.items() if secret in v]]))
print("rank", os.environ["RANK"], "ends", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def test_the_secret_of_ringway_run_is_new_each_time_and_shows_nowhere(tmp_path: Path) -> None:
    """A run that fails, and the same run once more."""
    program = tmp_path / "tells.py"
    program.write_text(_TELLS_ITS_SECRET)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    secrets = []
    for code in (3, 0):
        told = tmp_path / f"told {code}"
        told.mkdir()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "ringway.cli",
                "run",
                "-n",
                "2",
                "--on-death",
                "keep",
                str(program),
                str(told),
                str(code),
            ],
            env=_clean_environment() | {"TMPDIR": str(temporary), "RINGWAY_JOB_SECRET": "of another job" * 3},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        assert done.returncode == code, done.stdout
        (secret, shown), (other, shown_by_other) = (json.loads(path.read_text()) for path in sorted(told.iterdir()))
        assert secret == other
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert shown == shown_by_other == []
        assert "rank 0 ends" in done.stdout
        assert secret not in done.stdout
        secrets.append(secret)
    assert secrets[0] != secrets[1]
    left = [path for path in temporary.rglob("*") if path.is_file() and any(s in path.read_text() for s in secrets)]
    assert left == []


def test_torchrun(pool: RankPool, expected: str, program: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    run = run_launched(pool, launcher, program, ranks=2, environment=_clean_environment())
    assert run.returncode == 0, run.stderr
    _check(run.stdout, expected, HOSTS_FILE)


_RESTARTED = """
import os, signal, sys
from pathlib import Path

import torch
import ringway as dist

first = Path(sys.argv[1], os.environ["RANK"])
restarted = first.exists()
first.touch()
dist.init_distributed("gloo", verbose=False, timeout=60)
one = torch.ones(1)
dist.all_reduce(one)
if os.environ["RANK"] == "1" and not restarted:
    os.kill(os.getpid(), signal.SIGKILL)
if not restarted:
    dist.barrier()  # the rank is dead
print("rank", os.environ["RANK"], "has", one.item(), "after", os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.destroy_process_group()
"""


@pytest.mark.skipif(not os.environ.get("RINGWAY_SOAK"), reason="imports torch eight times; make soak")
def test_torchrun_restarts_ranks_on_two_hosts(tmp_path: Path) -> None:
    """Two agents, of which only one has seen a rank fail. tests/groups/test_drop_in.py does the same without them."""
    program = tmp_path / "restarted.py"
    program.write_text(_RESTARTED)
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "restarted"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, str(program), str(tmp_path)],
            env=_clean_environment() | {"RINGWAY_JOB_SECRET": "5" * 64},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = "".join(agent.communicate(timeout=200)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "rank 0 has 2.0 after 0" in said
    assert "rank 1 has 2.0 after 1" in said


def test_mpich(pool: RankPool, expected: str, program: Path) -> None:
    folder = mpi_home("mpich")
    launcher = [folder / "bin" / "mpiexec", "-n", "2"]
    run = run_launched(pool, launcher, program, ranks=2, environment=_clean_environment(), prefix=folder)
    assert run.returncode == 0, run.stderr
    _check(run.stdout, expected, HOSTS_FILE)


def test_open_mpi(expected: str, program: Path) -> None:
    folder = mpi_home("openmpi")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    _check(_run([folder / "bin" / "mpirun", *options, folder / "bin" / "python", program]), expected, HOSTS_FILE)


def test_slurms_variables(pool: RankPool, expected: str, program: Path) -> None:
    """As srun sets them for two tasks on one node: no address, no port, only the step's numbers."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "thishost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "RINGWAY_REQUIRE_SECRET": "1",
    }
    environments = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    ranks = run_program(pool, program, environments=environments)
    assert all(map(ended_with, ranks)), ranks
    _check("".join(rank.output for rank in ranks), expected, HOSTS_FILE)


_SEVERAL_HOSTS = """
from dataclasses import replace
from ringway.launch.discover import discover
from ringway.launch.rendezvous import rendezvous
from ringway.store import key_of
# As on several hosts: the launcher gives rank and size, but no address.
info = replace(discover(), address=None, local_size=1)
store = rendezvous(info, 60, require_secret=True)
store.set(f"from {info.rank}", info.source)
store.wait(["from 0", "from 1"])
store.add("done", 1)
while info.rank == 0 and store.add("done", 0) < 2:
    pass
print(f"rank {info.rank} met by {info.source}, secret from {key_of(store).source}", flush=True)
"""


def test_mpi_sends_the_address_and_a_secret_if_none_is_given(pool: RankPool, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_SEVERAL_HOSTS)
    folder = mpi_home("mpich")
    run = run_launched(
        pool,
        [folder / "bin" / "mpiexec", "-n", "2"],
        program,
        ranks=2,
        environment=_clean_environment(),
        prefix=folder,
    )
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        assert f"rank {rank} met by PMI (MPICH, Intel MPI), secret from MPI\n" in run.stdout
