"""Runs a part of the suite that `make test` leaves out, and writes its page of docs/proofs.

    python scripts/suite_proof.py sanitizers        the tests marked `sanitizers`
    python scripts/suite_proof.py browser           the tests marked `browser`
    python scripts/suite_proof.py attack            the attackers of tests/security, 10,000 times
    python scripts/suite_proof.py torch 2.15.0      the whole suite on another torch, in a separate environment

If the part fails, its page is not written, so it stays older than the code it proves.
"""

from __future__ import annotations

import fcntl
import os
import platform
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
_VERSIONS = "import sys, torch; print(f'Python {sys.version.split()[0]}, torch {torch.__version__}')"


@dataclass(frozen=True)
class Part:
    title: str
    proves: tuple[str, ...]
    selection: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    lists_skipped: bool = False


PARTS = {
    "sanitizers": Part(
        "The shared-memory engine under ThreadSanitizer, AddressSanitizer and UBSan",
        ("csrc/shm", "csrc/reduce", "csrc/pack", "tests/native"),
        ("-m", "sanitizers"),
    ),
    "browser": Part(
        "The report in a browser", ("src/ringway/observe/report", "tests/observe/browser.py"), ("-m", "browser")
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


def prove(name: str, part: Part, python: str) -> int:
    """Runs the part; writes its page if every test passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [python, "-m", "pytest", "-q", *part.selection, f"--junitxml={report}"]
        began = time.monotonic()
        ended = subprocess.run(command, cwd=proofs.ROOT, check=False, env={**os.environ, **part.variables})
        seconds = time.monotonic() - began
        if ended.returncode != 0:
            return ended.returncode
        all_cases = list(ElementTree.parse(report).iter("testcase"))
    cases = [case for case in all_cases if case.find("skipped") is None]
    skipped = [case for case in all_cases if case.find("skipped") is not None]
    if not cases:
        print(f"no test ran, so {name} is not proven", file=sys.stderr)
        return 1
    versions = subprocess.run([python, "-c", _VERSIONS], check=True, capture_output=True, text=True).stdout.strip()
    lines = [
        "    " + " ".join([*(f"{k}={v}" for k, v in part.variables.items()), "pytest -q", *part.selection]),
        "",
        f"{len(cases)} tests passed in {seconds:.0f} s: {versions}, {platform.machine()}, {os.cpu_count()} cores.",
    ]
    if part.lists_skipped:
        lines += ["", "Skipped: " + (", ".join(f"`{case.get('name')}`" for case in skipped) or "none") + "."]
    if len(cases) <= 30:
        lines += ["", "| test | seconds |", "|---|---|"]
        lines += [f"| `{case.get('name')}` | {float(case.get('time', 0)):.1f} |" for case in cases]
    proofs.write(proofs.FOLDER / f"{name}.md", part.title, part.proves, "\n".join(lines))
    return 0


def main() -> int:
    match sys.argv[1:]:
        case [name] if name in PARTS:
            return prove(name, PARTS[name], sys.executable)
        case ["torch", version]:
            part = Part(f"The suite on torch {version}", ("src/ringway", "csrc"), ("-n", "2", "--dist", "worksteal"))
            return prove(f"torch_{'_'.join(version.split('.')[:2])}", part, str(torch_python(version)))
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
