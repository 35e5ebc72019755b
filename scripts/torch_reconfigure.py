"""torch's own tests of groups whose members change, on shm, with a report for docs/proofs/torch_reconfigure.md.

    python scripts/torch_reconfigure.py FILE [--torch 2.15.0]

FILE is `test/distributed/test_c10d_fault_tolerance.py` of torch's repository; no wheel has it. It lists the backends
that it tests, and `("shm", "cpu")` is added to them. torch 2.15 has the interface first, so it is installed in an
environment of its own. Exits with 1 unless every test on shm passes, except those that torch itself skips for
backends other than nccl2.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import proofs
from suite_proof import torch_python

PROVES = ("src/ringway/groups/reconfigure.py", "src/ringway/api/reconfigure.py", "src/ringway/groups/bridge.py")
BACKENDS = "FAULT_TOLERANCE_BACKENDS = ["
TEST = re.compile(r"^(test_\w+) \(\S*ShmFaultToleranceTest", re.MULTILINE)
OUTCOME = re.compile(r"^(?:test_.* \.\.\. )?(ok|skipped .*|FAIL|ERROR)$", re.MULTILINE)
NOT_FOR_US = "specific to nccl2"


def outcomes(said: str) -> list[tuple[str, str]]:
    """The tests that ran, and how they ended. Lines of their ranks stand between."""
    _, *parts = TEST.split(said.partition("\n======")[0])
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [(name, _outcome(f"{name}{text}")) for name, text in pairs]


def _outcome(said: str) -> str:
    outcome: str = (OUTCOME.findall(said) or ["no outcome"])[-1]
    return f"skipped: {NOT_FOR_US}" if outcome.startswith("skipped") and NOT_FOR_US in said else outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--torch", default="2.15.0")
    parser.add_argument("--output", type=Path, default=proofs.FOLDER / "torch_reconfigure.md")
    parser.add_argument("--commit")
    options = parser.parse_args()
    text = options.file.read_text()
    if text.count(BACKENDS) != 1:
        raise SystemExit(f"{options.file} has no list '{BACKENDS}': it is another version of torch's test")
    python = torch_python(options.torch)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, options.file.name)
        program.write_text(text.replace(BACKENDS, f'{BACKENDS}\n    ("shm", "cpu"),'))
        command = [str(python), str(program), "-v", "ShmFaultToleranceTest"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    found = outcomes(ended.stderr)
    wrong = [name for name, outcome in found if outcome != "ok" and NOT_FOR_US not in outcome]
    passed = sum(outcome == "ok" for _, outcome in found)
    if ended.returncode != 0 or wrong or not passed:
        print(ended.stdout[-2000:], ended.stderr[-6000:], f"not passed: {wrong}", sep="\n")
        return 1
    rows = [f"| `{name}` | {outcome} |" for name, outcome in found]
    body = [f"torch {options.torch}, {passed} tests passed.", "", "| test | outcome |", "|---|---|", *rows]
    title = "torch's own tests of groups whose members change"
    proofs.write(options.output, title, PROVES, "\n".join(body), options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
