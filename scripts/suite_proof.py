"""Runs a part of the suite that `make test` leaves out, and writes its page of docs/proofs.

    python scripts/suite_proof.py sanitizers        the tests marked `sanitizers`
    python scripts/suite_proof.py browser           the tests marked `browser`
    python scripts/suite_proof.py attack            the attackers of tests/security, 10,000 times
    python scripts/suite_proof.py kills             10,000 ranks killed at random moments
    python scripts/suite_proof.py random_programs   random programs over compression for 10 minutes
    python scripts/suite_proof.py elastic_programs  10,000 random programs of elastic jobs
    python scripts/suite_proof.py timing            the tests that depend on time, ten times
    python scripts/suite_proof.py busy              the suite while two other processes keep two cores busy
    python scripts/suite_proof.py suite_gpu         the suite, on a machine with a GPU
    python scripts/suite_proof.py torch 2.15.0      the whole suite on another torch, in a separate environment

If the part fails, its page is not written, so it stays older than the code it proves.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import proofs

CACHE = proofs.ROOT / ".cache" / "torch"
SUITE = ("--dist", "worksteal", "-m", "not sanitizers and not browser")
_VERSIONS = """
import sys, torch
gpu = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}{gpu}")
"""


@dataclass(frozen=True)
class Part:
    title: str
    proves: tuple[str, ...]
    selection: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    lists_skipped: bool = False
    shows_output: bool = False
    rounds: int = 1
    busy_processes: int = 0


PARTS = {
    "sanitizers": Part(
        "The native core under ThreadSanitizer, AddressSanitizer and UBSan",
        (
            "csrc",
            "tests/native",
            "tests/backends/test_shm_ends.py",
            "tests/backends/test_shm_signals.py",
        ),
        ("-m", "sanitizers"),
    ),
    "browser": Part(
        "The pages of report and bench in a browser",
        (
            "src/ringway/observe/report",
            "src/ringway/bench/page.py",
            "tests/browser.py",
            "tests/observe/test_report_page.py",
        ),
        ("-m", "browser"),
    ),
    "attack": Part(
        "10,000 attacks on jobs with a secret",
        (
            "csrc/record/caller_source.cpp",
            "csrc/record/responder.cpp",
            "src/ringway/keys.py",
            "src/ringway/launch",
            "src/ringway/observe/stall/peers.py",
            "src/ringway/store.py",
            "tests/security",
        ),
        ("tests/security",),
        {"RINGWAY_ATTACK": "10000"},
        lists_skipped=True,
    ),
    "suite_gpu": Part(
        "The suite on a machine with a GPU, which its tests do not use",
        ("src/ringway", "csrc"),
        ("-n", "10", *SUITE),
    ),
    "timing": Part(
        "The tests that depend on time, ten times",
        ("src/ringway", "csrc"),
        ("-n", "2", "--dist", "worksteal", "-m", "timing and not sanitizers and not browser"),
        rounds=10,
    ),
    "busy": Part(
        "The suite while two other processes keep two cores busy",
        ("src/ringway", "csrc"),
        ("-n", "3", *SUITE),
        busy_processes=2,
    ),
    "random_programs": Part(
        "Random programs over compression, 10 minutes, against float64",
        ("src/ringway/compress", "src/ringway/parallel", "tests/compress/random_programs.py"),
        ("tests/compress/test_random_programs.py",),
        {"RINGWAY_SOAK": "1"},
        shows_output=True,
    ),
    "elastic_programs": Part(
        "10,000 random programs of elastic jobs: ranks join, leave, are killed and are cut off",
        ("src/ringway/job/elastic", "tests/elastic_processes.py", "tests/job/test_elastic_programs.py"),
        ("tests/job/test_elastic_programs.py", "-k", "random_programs"),
        {"RINGWAY_SOAK": "1"},
        shows_output=True,
    ),
    "kills": Part(
        "10,000 ranks of shm groups killed at random moments",
        ("csrc/shm", "src/ringway/backends/shm", "tests/backends/test_shm_kills.py"),
        ("tests/backends/test_shm_kills.py", "-k", "survivors"),
        {"RINGWAY_SOAK": "1"},
        shows_output=True,
    ),
}


def torch_python(version: str) -> Path:
    """A Python with this torch and all other packages of the Python that runs this script. Made on first use."""
    folder = CACHE / version
    python, done = folder / "bin" / "python", folder / ".ready"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{version}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
            pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
            subprocess.run([*pip, "install", "--quiet", f"torch=={version}"], check=True)
            query = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
            packages = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
            shared = sysconfig.get_path("purelib")
            Path(packages, "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
            done.touch()
    return python


def prove(part: Part, python: str, output: Path, commit: str | None) -> int:
    """Runs the part; writes its page if every test passed in every round."""
    all_cases: list[ElementTree.Element] = []
    beside = [sys.executable, str(proofs.ROOT / "scripts/busy.py"), str(part.busy_processes)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            *(beside if part.busy_processes else ()),
            python,
            "-m",
            "pytest",
            "-q",
            *part.selection,
            f"--junitxml={report}",
            "-o",
            "junit_logging=system-out",
        ]
        began = time.monotonic()
        for _ in range(part.rounds):
            ended = subprocess.run(command, cwd=proofs.ROOT, check=False, env={**os.environ, **part.variables})
            if ended.returncode != 0:
                return ended.returncode
            all_cases += ElementTree.parse(report).iter("testcase")
        seconds = time.monotonic() - began
    cases = [case for case in all_cases if case.find("skipped") is None]
    skipped = [case for case in all_cases if case.find("skipped") is not None]
    if not cases:
        print(f"no test ran, so {output.stem} is not proven", file=sys.stderr)
        return 1
    versions = subprocess.run([python, "-c", _VERSIONS], check=True, capture_output=True, text=True).stdout.strip()
    lines = [
        "    " + " ".join([*(f"{k}={v}" for k, v in part.variables.items()), "pytest -q", shlex.join(part.selection)]),
        "",
        f"{len(cases)} passed, {len(skipped)} skipped, in {f'{part.rounds} rounds and ' if part.rounds > 1 else ''}"
        f"{seconds:.0f} s: {versions}, {platform.machine()}, {os.cpu_count()} cores.",
    ]
    if part.lists_skipped:
        lines += ["", "Skipped: " + (", ".join(map(_why_skipped, skipped)) or "none") + "."]
    for case in cases:
        for fact in case.iter("property"):
            lines += ["", f"`{case.get('name')}` {fact.get('name')} {fact.get('value')}."]
    if len(cases) <= 30:
        lines += ["", "| test | seconds |", "|---|---|"]
        lines += [f"| `{case.get('name')}` | {float(case.get('time', 0)):.1f} |" for case in cases]
    if part.shows_output:
        said = "\n".join(case.findtext("system-out") or "" for case in cases)
        lines += [
            "",
            *(f"    {line}" for line in said.split("\n") if line and not line.startswith("---")),
        ]
    proofs.write(output, part.title, part.proves, "\n".join(lines), commit)
    return 0


def _why_skipped(case: ElementTree.Element) -> str:
    skipped = case.find("skipped")
    return f"`{case.get('name')}` ({'' if skipped is None else skipped.get('message')})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "torch"])
    parser.add_argument("version", nargs="?", help="of torch")
    parser.add_argument("--output", type=Path, help="instead of the page in docs/proofs")
    parser.add_argument("--commit", help="for a tree without git history")
    given = parser.parse_args()
    name, python = given.part, sys.executable
    if name == "torch":
        if given.version is None:
            parser.error("torch needs a version, such as 2.15.0")
        part = Part(f"The suite on torch {given.version}", ("src/ringway", "csrc"), ("-n", "3", *SUITE))
        name, python = f"torch_{'_'.join(given.version.split('.')[:2])}", str(torch_python(given.version))
    else:
        part = PARTS[name]
    return prove(part, python, given.output or proofs.FOLDER / f"{name}.md", given.commit)


if __name__ == "__main__":
    sys.exit(main())
