"""Runs DeepSpeed's own tests of its communication on ringway.compat, with nothing but imports replaced.

    python scripts/deepspeed_tests.py CHECKOUT                    all of them (make deepspeed-tests CHECKOUT=...)
    python scripts/deepspeed_tests.py CHECKOUT --only test_dist   those whose name contains a word; writes no page

CHECKOUT is a clone of DeepSpeed's repository at version 0.19.6. Later releases have no 1-bit optimizers. The tests are
copied, IMPORTS are replaced in them, and each file imports ON_RINGWAY first. The largest need 20 GB of memory. Results
are kept in .cache for the commit they were made on, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import mpi_env
import proofs

import frameworks

VERSION = "0.19.6"
UNIT = (
    "unit/comm/test_comms_logger.py",
    "unit/comm/test_dist.py",
    "unit/runtime/comm/test_coalesced_collectives.py",
    "unit/runtime/half_precision/onebit/test_onebit.py",
)
SCRIPTS = ("test_nccl_backend", "test_compressed_backend", "test_mpi_backend")
CUDA_ONLY = {
    "TestLocoQuantized": "tests a CUDA kernel of DeepSpeed",
    "Pipeline": "the three pipelines ask torch for the state of an accelerator's random numbers: torch.cpu has no "
    "get_rng_state",
}
ROUNDED = ("TestCompressedAllReduceBasic", *SCRIPTS)
"""They compare with norms that torch sums in fp32. ringway's kernels sum more accurately."""
IMPORTS = {
    "from deepspeed.utils.comms_logging import": "from ringway.compat.deepspeed import",
    "from deepspeed.utils.timer import": "from ringway.compat.deepspeed import",
    "from deepspeed.runtime.comm.coalesced_collectives import": "from ringway.compat.deepspeed import",
    "from deepspeed.runtime.comm.nccl import": "from ringway.compat.compressed import",
    "from deepspeed.runtime.comm.mpi import": "from ringway.compat.compressed import",
    "from deepspeed.runtime.comm.compressed import": "from ringway.compat.compressed import",
    # Only asked whether DeepSpeed can compile it. ringway needs no such op.
    "import QuantizerBuilder": "import FusedAdamBuilder as QuantizerBuilder",
}
ON_RINGWAY = """\
import multiprocessing
import sys

import ringway.compat

ringway.compat.install()  # deepspeed.comm is ringway's, also in DeepSpeed's engine

from ringway.compat.deepspeed import lamb, onebit, zoadam

for name, module in (("adam", onebit), ("zoadam", zoadam), ("lamb", lamb)):
    sys.modules[f"deepspeed.runtime.fp16.onebit.{name}"] = module

multiprocessing.set_forkserver_preload(["on_ringway", "deepspeed"])  # else every rank imports it, for every test
"""
AS_DEEPSPEED = """
from ringway.compat.compressed import CompressedBackend, MpiBackend

for backend in (CompressedBackend, MpiBackend):  # NcclBackend has the same function
    backend.__init__.__kwdefaults__["kernels"] = "reference"  # sums in fp32, as DeepSpeed does
"""
PROVES = ("src/ringway/compat", "src/ringway/compress")
NORMS = """
import torch
for size in (100 << 20, 300 << 20):
    torch.manual_seed(0)
    values = torch.rand(size) - 0.5
    exact = sum(part.double().square().sum() for part in values.split(1 << 20)).sqrt()
    print(f"{size >> 20} Mi values: torch's fp32 norm is {(values.norm().double() / exact - 1).item():+.2%} off")
"""
LIMIT = 3600


def copy_tests(checkout: Path, scratch: Path) -> Path:
    """The tests, on ringway."""
    tests = scratch / "tests"
    shutil.copytree(checkout / "tests" / "unit", tests / "unit")
    shutil.copytree(checkout / "tests" / "onebit", tests / "onebit")
    shutil.copy(checkout / "tests" / "conftest.py", tests)
    for file in (*tests.glob("unit/*.py"), *map(tests.joinpath, UNIT), *tests.glob("onebit/*.py")):
        text = file.read_text()
        for theirs, ours in IMPORTS.items():
            text = text.replace(theirs, ours)
        file.write_text(f"import on_ringway\n{text}")
    return tests


class Run:
    """Where the tests are, and how they are started."""

    def __init__(self, checkout: Path, scratch: Path) -> None:
        self.tests = copy_tests(checkout, scratch)
        self.first = scratch / "on_ringway.py"
        self.first.write_text(ON_RINGWAY)
        self.python = frameworks.environment("deepspeed_tests", frameworks.PROGRAMS / "deepspeed_tests.txt")
        extensions = frameworks.CACHE / "deepspeed_tests" / "torch_extensions"
        for lock in extensions.glob("*/lock"):  # of a run that was ended while it compiled: torch would wait for it
            lock.unlink()
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(self.python.parent.parent)}))
        self.variables = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": "4",  # DeepSpeed takes it for the number of its devices
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(map(str, (scratch, checkout, packages))),
            "TORCH_EXTENSIONS_DIR": str(extensions),
        }

    def start(self, *command: str) -> tuple[int, str]:
        """The status and the output of a command that runs in a session of its own."""
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                command, cwd=self.tests, env=self.variables, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                status = 124
            finally:
                frameworks.end(process)
            output.seek(0)
            return status, output.read()

    def as_deepspeed(self, job: Callable[[str], tuple[str, bool]], name: str) -> tuple[str, bool]:
        """The same with sums in fp32."""
        self.first.write_text(ON_RINGWAY + AS_DEEPSPEED)
        try:
            return job(name)
        finally:
            self.first.write_text(ON_RINGWAY)

    def unit(self, file: str, *chosen: str) -> tuple[str, bool]:
        """What became of the tests of a file, by class. `chosen` are pytest's options for other ones than usual."""
        report = self.tests / "report.xml"
        report.unlink(missing_ok=True)
        usual = ("-k", " and ".join(f"not {name}" for name in (*CUDA_ONLY, ROUNDED[0])))
        options = ("-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}")
        options += chosen or usual
        status, output = self.start(str(self.python), "-m", "pytest", file, *options)
        print(output[-6000:], flush=True)
        if not report.exists():
            return f"no result: pytest ended with status {status}", False
        counts: dict[str, Counter[str]] = {}
        wrong = []
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            kind = "passed" if outcome is None else "skipped" if outcome.tag == "skipped" else "failed"
            name = case.get("classname", "").rpartition(".")[2]
            counts.setdefault(name if name.startswith("Test") else "functions", Counter())[kind] += 1
            if outcome is not None:
                said = (outcome.get("message") or "").splitlines() or [""]
                wrong.append(f"{name}.{case.get('name')} {kind}: {said[0][:200]}")
        told = [f"{name}: {', '.join(f'{n} {kind}' for kind, n in found.items())}" for name, found in counts.items()]
        return "<br>".join([*told, *wrong]), status == 0

    def rounded(self, name: str) -> tuple[str, bool]:
        if name in SCRIPTS:
            return self.script(name)
        return self.unit(UNIT[-1], "-k", name)

    def norms(self) -> tuple[str, bool]:
        """How far the norms of the tests in ROUNDED are off: torch's, in fp32, of the values that the tests draw."""
        status, output = self.start(str(self.python), "-c", NORMS)
        return "<br>".join(output.splitlines()), status == 0

    def script(self, name: str) -> tuple[str, bool]:
        """What a script of tests/onebit prints on 2 ranks."""
        if "mpi" in name:
            folder = mpi_env.mpi_env("mpich")
            launcher = (str(folder / "bin" / "mpiexec"), "-n", "2", str(folder / "bin" / "python"))
        else:
            launcher = (str(self.python), *frameworks.TORCHRUN)
        status, output = self.start(*launcher, f"onebit/{name}.py")
        print(output[-6000:], flush=True)
        told = [line for line in output.splitlines() if line.startswith(("Successfully", "Fails", "min, max"))]
        passed = status == 0 and bool(told) and not any(line.startswith("Fails") for line in told)
        return "<br>".join([*sorted(set(told)), *([f"status {status}"] if status else [])]), passed

    def trajectories(self) -> tuple[str, bool]:
        """ringway's 1-bit optimizers against DeepSpeed's."""
        program = str(proofs.ROOT / "tests" / "compat" / "onebit_trajectories.py")
        status, output = self.start(str(self.python), *frameworks.TORCHRUN, program)
        print(output[-3000:], flush=True)
        return "<br>".join(line for line in output.splitlines() if "bit by bit" in line), status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", help="run only the tests whose name contains this, and write no page")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    checkout: Path = given.checkout.resolve()
    version = (checkout / "version.txt").read_text().strip()
    if version != VERSION:
        raise SystemExit(f"{checkout} is DeepSpeed {version}; these tests are of {VERSION}")
    with tempfile.TemporaryDirectory(prefix="deepspeed-tests-") as scratch:
        run = Run(checkout, Path(scratch))
        jobs = {
            "ringway's optimizers and DeepSpeed's": run.trajectories,
            **{file: lambda file=file: run.unit(file) for file in UNIT},
            "norms": run.norms,
            **{name: lambda name=name: run.rounded(name) for name in ROUNDED},
            **{f"{name}, sums in fp32": lambda name=name: run.as_deepspeed(run.rounded, name) for name in ROUNDED},
        }
        rows, all_passed = [], True
        for number, (name, job) in enumerate(jobs.items()):
            if given.only is not None and given.only not in name:
                continue
            kept = frameworks.CACHE / "deepspeed_tests" / "results" / proofs.commit() / f"{number}.json"
            if kept.exists():
                told, passed, seconds = json.loads(kept.read_text())
            else:
                began = time.monotonic()
                told, passed = job()
                seconds = round(time.monotonic() - began)
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps([told, passed, seconds]))
            print(f"{name}: {'passed' if passed else 'FAILED'}\n  " + told.replace("<br>", "\n  "), flush=True)
            rows.append(f"| {name} | {'passes' if passed else 'fails'} | {told} | {seconds} s |")
            all_passed = all_passed and (passed or name in ROUNDED)
    if given.only is None:
        write(rows)
    return 0 if all_passed else 1


def write(rows: list[str]) -> None:
    lines = [
        "    make deepspeed-tests CHECKOUT=...",
        "",
        f"DeepSpeed {VERSION}, Python {platform.python_version()}, torch {metadata.version('torch')},"
        f" {platform.machine()}, {os.cpu_count()} cores, no GPU.",
        "",
        "These imports are replaced in the tests, and nothing else:",
        "",
        "```",
        *(f"{theirs} -> {ours}" for theirs, ours in IMPORTS.items()),
        "```",
        "",
        "Each file imports this first, so that DeepSpeed's engine uses ringway too:",
        "",
        "```python",
        ON_RINGWAY.rstrip(),
        "```",
        "",
        "| tests | | what they say | time |",
        "|---|---|---|---|",
        *rows,
        "",
        "The tests of the last rows compare with DeepSpeed's formulas, whose norms torch sums in fp32. The row `norms`",
        "says how far such a norm is off on this CPU. ringway's kernels sum more accurately, so they differ from it.",
        "The rows 'sums in fp32' are the same tests with ringway's reference kernels, which use its formulas.",
        "",
        "Not run: "
        + "; ".join(f"{name} ({why})" for name, why in CUDA_ONLY.items())
        + "; `onebit/*_perf.py` (they measure, and check nothing).",
    ]
    proofs.write(proofs.FOLDER / "deepspeed_tests.md", "DeepSpeed's own tests on ringway", PROVES, "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
