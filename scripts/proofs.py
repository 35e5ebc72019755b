"""Proofs that CI cannot make: what ran, on which machine, on which commit.

A proof is a page of `docs/proofs/`, or one in ELSEWHERE, that names the commit it was made on and the files it proves.

    python scripts/proofs.py        lists the proofs that are older than the code they prove (make proofs, make test)
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "proofs"
MADE_BY = {
    "attack": "make attack",
    "before_after": "python benchmarks/before_after.py CHECKOUT",
    "bench_agrees": "python benchmarks/bench_agrees.py --check --output docs/proofs/bench_agrees.md",
    "browser": "make browser",
    "busy": "make busy",
    "ccl": "make ccl-proof",
    "compiled": "python benchmarks/compiled.py --check --output docs/proofs/compiled.md",
    "compare": "python benchmarks/compare_agrees.py --check --output docs/proofs/compare.md",
    "deepspeed_tests": "make deepspeed-tests CHECKOUT=...",
    "door_cost": "make door-cost",
    "elastic": "python benchmarks/elastic.py --chaos",
    "elastic_programs": "make elastic_programs",
    "frameworks": "make frameworks",
    "kills": "make kills",
    "nccl": "python scripts/nccl_proof.py",
    "nccl_faults": "python scripts/nccl_faults.py",
    "newcomer": "python scripts/newcomer.py",
    "numerics_gpu": "python scripts/numerics_proof.py",
    "onebit_gpu": "python benchmarks/onebit_gpu.py",
    "random_programs": "make random_programs",
    "regressions": "python scripts/regressions/run.py CHECKOUT",
    "sanitizers": "make sanitizers",
    "suite_gpu": "python scripts/suite_proof.py suite_gpu",
    "shm_cuda": "python scripts/shm_cuda_proof.py",
    "shm_aarch64": "python benchmarks/collectives.py; python benchmarks/busy.py",
    "shm_x86": "python benchmarks/collectives.py",
    "timing": "make timing",
    "topk_gpu": "python scripts/topk_proof.py",
    "torch_2_11": "make torch-versions",
    "torch_2_15": "make torch-versions",
    "torch_reconfigure": "python scripts/torch_reconfigure.py FILE",
    "vllm": "make vllm",
    "wheels_aarch64": "make wheels wheel-test",
    "wheels_x86_64": "make wheels wheel-test",
}
"""The expected pages, and the command that makes each."""
ELSEWHERE = {"frameworks": ROOT / "docs" / "frameworks.md"}
"""The proofs that are a part of another page."""

_LISTED = 3
_COMMIT = re.compile(r"^- Commit: `([0-9a-f]+)`", re.MULTILINE)
_PROVES = re.compile(r"^- Proves: (.*)$", re.MULTILINE)


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return run.stdout.strip() if run.returncode == 0 else ""


def loaded_nccl() -> str:
    """The version of NCCL that is loaded. torch names the one it was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"


def commit() -> str:
    """The commit of this tree."""
    found = _git("rev-parse", "HEAD")
    if not found:
        raise SystemExit("this tree has no git history: pass its commit with --commit")
    return found


def arguments() -> str:
    """The arguments of this program, without those that say where its page goes."""
    shown, given = [], iter(sys.argv[1:])
    for argument in given:
        if argument in ("--output", "--commit"):
            next(given, None)
        else:
            shown.append(argument)
    return " ".join(shown)


def head(proves: Sequence[str], named: str | None = None) -> list[str]:
    """The lines that make a page a proof. In a copy of the tree without git history, the commit must be given."""
    return [
        f"- Commit: `{named or commit()}`",
        f"- Made: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"- Proves: {', '.join(f'`{name}`' for name in proves)}",
    ]


def write(path: Path, title: str, proves: Sequence[str], body: str, commit: str | None = None) -> None:
    """Writes a proof: a page with nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([f"# {title}", "", *head(proves, commit), "\n"]) + body.rstrip() + "\n")
    print(f"wrote {path}")


def outdated(page: Path) -> str | None:
    """Why a proof no longer counts, or None."""
    if not page.exists():
        return "not made yet"
    text = page.read_text()
    commit, proves = _COMMIT.search(text), _PROVES.search(text)
    if commit is None or proves is None:
        return "it does not name its commit and the files it proves"
    if not _git("cat-file", "-t", commit.group(1)):
        return f"its commit {commit.group(1)[:12]} is not in this history"
    files = re.findall(r"`([^`]+)`", proves.group(1))
    gone = [name for name in files if not (ROOT / name).exists()]
    if gone:
        return f"it proves {', '.join(gone)}, which is gone"
    changed = _git("diff", "--name-only", commit.group(1), "--", *files).split()
    if not changed:
        return None
    more = f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
    return f"changed since: {', '.join(changed[:_LISTED])}{more}"


def main() -> None:
    names = sorted({*MADE_BY, *(page.stem for page in FOLDER.glob("*.md"))})
    for name in names:
        page = ELSEWHERE.get(name, FOLDER / f"{name}.md")
        why = outdated(page)
        again = f" ({MADE_BY[name]})" if why and name in MADE_BY else ""
        print(f"{page.relative_to(ROOT)}: {why or 'up to date'}{again}")


if __name__ == "__main__":
    main()
