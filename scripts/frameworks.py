"""Runs frameworks with 2 ranks on gloo and on shm, compares them, and writes the table of docs/frameworks.md.

    python scripts/frameworks.py                    all of them (make frameworks)
    python scripts/frameworks.py --only lightning   the programs whose names contain a word; writes nothing

Every program runs on gloo, then unchanged with RINGWAY_REPLACE=gloo:shm, then with each change of one line that it
offers. On shm, every rank must have gloo's losses and parameters, bit by bit. With four ranks on two hosts, sums are
rounded in another order: losses must be close, and all ranks have the same parameters. Programs that report no losses
must end with status 0. The frameworks are installed into .cache/frameworks, next to the torch of the Python that runs
this.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import proofs

sys.path.insert(0, str(proofs.ROOT / "tests"))
import slow_link

CACHE = proofs.ROOT / ".cache"
PROGRAMS = proofs.ROOT / "tests" / "frameworks"
REQUIREMENTS = PROGRAMS / "requirements.txt"
PAGE = proofs.ROOT / "docs" / "frameworks.md"
MARK = "<!-- Written by scripts/frameworks.py from here on. -->\n"
PROVES = (
    "csrc/shm",
    "src/ringway/backends/shm",
    "src/ringway/compat",
    "src/ringway/groups",
    "src/ringway_autoload",
    "tests/frameworks",
)
NO_CHANGE = "RINGWAY_REPLACE=gloo:shm"
REPLACED = f"ringway: {NO_CHANGE}: gloo is replaced by shm"
HUNG = "not done"
RINGWAY_RUN = ("-m", "ringway", "run", "-n", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
VARIABLES = {
    "ACCELERATE_NUM_PROCESSES": "2",
    "ACCELERATE_USE_CPU": "1",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TORCH_EXTENSIONS_DIR": str(CACHE / "frameworks" / "torch_extensions"),
}


@dataclass(frozen=True)
class Program:
    """What to run, and the changes of one line that it offers: the text, and its value of FRAMEWORKS_CHANGED."""

    name: str
    command: tuple[str, ...]
    changes: Mapping[str, str] = field(default_factory=dict)
    limit: int = 300
    """Seconds for one run."""
    attempts: int = 1
    """How often to start it if it hangs."""
    fails_on_gloo: str = ""
    """Why a program that is not ours cannot pass on gloo, so that it proves nothing about shm."""
    tolerance: float = 0.0
    """How far a loss may be from gloo's, relative to it. 0: losses and parameters are equal."""
    obstacle: Callable[[], str | None] = lambda: None
    """Why it cannot run on this machine, if so."""


def _accelerate(script: str, *launcher: str, limit: int = 300, attempts: int = 1, fails_on_gloo: str = "") -> Program:
    command = (*launcher, "-m", f"accelerate.test_utils.scripts.{script}")
    return Program(f"accelerate's own {script}", command, {}, limit, attempts, fails_on_gloo)


ALL = (
    Program(
        "accelerate",
        (*TORCHRUN, str(PROGRAMS / "with_accelerate.py")),
        {'dist.init_process_group("shm")': "shm"},
    ),
    Program(
        "transformers",
        (*TORCHRUN, str(PROGRAMS / "with_transformers.py")),
        {'dist.init_process_group("shm")': "shm"},
    ),
    Program("transformers, started by ringway run", (*RINGWAY_RUN, str(PROGRAMS / "with_tp_plan.py"))),
    Program(
        "lightning",
        (*TORCHRUN, str(PROGRAMS / "with_lightning.py")),
        {'process_group_backend="shm"': "shm"},
    ),
    Program(
        "deepspeed",
        (*TORCHRUN, str(PROGRAMS / "with_deepspeed.py")),
        {'dist_backend="shm"': "shm", "ringway.compat.install()": "install"},
        600,  # it compiles its optimizers the first time
    ),
    Program("ray", (str(PROGRAMS / "with_ray.py"),), {'"shm" for "gloo"': "shm"}),
    Program(
        "ray on two hosts",
        (str(PROGRAMS / "with_ray_hosts.py"),),
        {'"hierarchical" for "gloo"': "hierarchical"},
        600,  # two nodes, and four ranks
        tolerance=1e-4,
        obstacle=slow_link.obstacle,
    ),
    _accelerate("test_ops", *TORCHRUN),
    _accelerate("test_sync", *TORCHRUN),
    _accelerate("test_script", *TORCHRUN),
    _accelerate(
        "test_merge_weights", *TORCHRUN, fails_on_gloo="because torch's FSDP restores a type that was never set"
    ),
    # Its ranks race for the last item of a queue: both see it, one takes it, and the other may wait for ever.
    _accelerate("test_notebook", limit=120, attempts=5),
    _accelerate("test_ddp_comm_hook", *TORCHRUN, fails_on_gloo="because it gives DDP device_ids, which GPUs have"),
    _accelerate(
        "test_distributed_data_loop",
        *TORCHRUN,
        limit=120,
        fails_on_gloo="because join_uneven_inputs does nothing on CPUs",
    ),
)
NOT_RUN = {
    "accelerate's test_cli": "it makes no group",
    "accelerate's external_deps": "they download models and datasets, and test_pippy does nothing without two GPUs",
}


@dataclass(frozen=True)
class Outcome:
    """One run: why it failed, or an empty string; what it reported by part and rank; and its output."""

    failed: str
    parts: dict[str, dict[str, Any]]
    output: str
    seconds: float


def environment(name: str = "frameworks", requirements: Path = REQUIREMENTS) -> Path:
    """A Python with these packages and those of the Python that runs this script. Made again for other pins."""
    folder, wanted = CACHE / name, requirements.read_text()
    python, done = folder / "bin" / "python", folder / "requirements.txt"
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
            query = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
            packages = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
            shared = sysconfig.get_path("purelib")
            Path(packages, "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
            pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
            # DeepSpeed's setup imports torch, so it cannot be built in an environment of its own.
            torch = f"torch=={metadata.version('torch').partition('+')[0]}"
            chosen = ["--quiet", "--no-build-isolation", torch]
            subprocess.run([*pip, *chosen, "-r", str(requirements)], check=True)
            done.write_text(wanted)
    return python


def run(program: Program, python: Path, variables: Mapping[str, str]) -> Outcome:
    for _ in range(program.attempts):
        outcome = run_once(program, python, variables)
        if not outcome.failed.startswith(HUNG):
            break
    return outcome


def run_once(program: Program, python: Path, variables: Mapping[str, str]) -> Outcome:
    """Runs the program in a session of its own, which is ended when its time is over."""
    with tempfile.TemporaryDirectory(prefix="frameworks-") as scratch:
        reports, output = Path(scratch, "reports"), Path(scratch, "output")
        reports.mkdir()
        # Without bytecode files, every rank would compile the frameworks.
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "RINGWAY_REPLACE")}
        path = f"{python.parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
        given = {**inherited, **VARIABLES, **variables, "PATH": path, "FRAMEWORKS_REPORT": str(reports)}
        began = time.monotonic()
        with output.open("w") as out:
            process = subprocess.Popen(
                [str(python), *program.command], cwd=scratch, env=given, stdout=out, stderr=out, start_new_session=True
            )
            try:
                status = process.wait(program.limit)
                failed = f"status {status}" if status else ""
            except subprocess.TimeoutExpired:
                failed = f"{HUNG} after {program.limit} s"
            finally:
                end(process)
        parts: dict[str, dict[str, Any]] = {}
        for file in sorted(reports.glob("*.json")):
            part, rank, _ = file.name.split(".")
            parts.setdefault(part.replace("_", " "), {})[rank] = json.loads(file.read_text())
        return Outcome(failed, parts, output.read_text(errors="replace"), time.monotonic() - began)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the session of a program that was started by `run`: first politely, so that it can end its ranks."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(45)  # torchrun gives its ranks, which have sessions of their own, 30 s to end
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def difference(part: str, gloo: Outcome, other: Outcome, tolerance: float) -> str:
    """How this part of the program differs from gloo on some rank, or an empty string."""
    theirs, ours = gloo.parts[part], other.parts.get(part, {})
    if set(ours) != set(theirs):
        return f"fails ({other.failed or 'no report'})"
    for rank, record in ours.items():
        if theirs[rank]["carried_by"] != "torch":
            return f"rank {rank} was not on gloo before"
        if record["carried_by"] != "ringway":
            return f"rank {rank} was not on ringway"
        pairs = zip(record["losses"], theirs[rank]["losses"], strict=True)
        if not all(math.isclose(float.fromhex(a), float.fromhex(b), rel_tol=tolerance) for a, b in pairs):
            return f"losses of rank {rank} differ"
        # Adam makes whole steps of gradients that are nothing but rounding, so parameters need not even be close.
        expected = next(iter(ours.values())) if tolerance else theirs[rank]
        if record["parameters"] != expected["parameters"]:
            return f"parameters of rank {rank} differ"
    return ""


def compare(program: Program, outcomes: Mapping[str, Outcome]) -> tuple[list[list[str]], bool]:
    """The rows of the table, and whether shm failed where gloo did not."""
    gloo, others = outcomes["gloo"], {way: other for way, other in outcomes.items() if way != "gloo"}
    if gloo.failed:
        return [
            [program.name, f"fails ({gloo.failed}) {program.fails_on_gloo}".rstrip(), "not run"]
        ], not program.fails_on_gloo
    rows, worse = [], False
    equal = f"losses within {program.tolerance:g}" if program.tolerance else "equal"
    for part in gloo.parts or [""]:
        found = []
        for way, other in others.items():
            if part:
                wrong = difference(part, gloo, other, program.tolerance)
            elif other.failed:
                wrong = f"fails ({other.failed})"
            else:
                wrong = "" if REPLACED in other.output else "gloo was not replaced"
            worse = worse or bool(wrong)
            found.append(f"`{way}`: {wrong or (equal if part else 'passes')}")
        loss = float.fromhex(gloo.parts[part]["0"]["losses"][-1]) if part else None
        told = "passes" if loss is None else f"ends at {loss:.6f}"
        rows.append([f"{program.name}: {part}" if part else program.name, told, "<br>".join(found)])
    return rows, worse or any(other.failed for other in others.values())


def write(rows: list[list[str]], left: Mapping[str, str], seconds: float) -> None:
    """Replaces what follows the mark in docs/frameworks.md."""
    named = [line for line in REQUIREMENTS.read_text().split("# ")[1].splitlines()[1:] if line]
    versions = ", ".join(line.replace("==", " ") for line in named)
    not_run = NOT_RUN | dict(left)
    lines = [
        *proofs.head(PROVES),
        "",
        "    make frameworks",
        "",
        f"In {seconds:.0f} s: Python {platform.python_version()}, torch {metadata.version('torch')}, {versions},"
        f" {platform.machine()}, {os.cpu_count()} cores.",
        "",
        "| program | gloo | shm |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "Not run: " + "; ".join(f"{name} ({why})" for name, why in not_run.items()) + ".",
    ]
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n")
    print(f"wrote {PAGE}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="run only the programs whose name contains this, and write nothing")
    parser.add_argument("--show", action="store_true", help="print the output of every run")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `run` ends its program on the way out
    python, began = environment(), time.monotonic()
    rows: list[list[str]] = []
    any_worse = False
    wanted = [program for program in ALL if given.only is None or given.only in program.name]
    impossible = {program.name: why for program in wanted if (why := program.obstacle())}
    print("".join(f"{name} is not run: {why}\n" for name, why in impossible.items()), end="", flush=True)
    chosen = [program for program in wanted if program.name not in impossible]
    for number, program in enumerate(chosen, 1):
        outcomes = {"gloo": run(program, python, {})}
        tell(program, "gloo", outcomes["gloo"], given.show)
        if not outcomes["gloo"].failed:
            ways = {NO_CHANGE: {"RINGWAY_REPLACE": "gloo:shm"}}
            ways.update({line: {"FRAMEWORKS_CHANGED": value} for line, value in program.changes.items()})
            for way, variables in ways.items():
                outcomes[way] = run(program, python, variables)
                tell(program, way, outcomes[way], given.show)
        found, worse = compare(program, outcomes)
        print("\n".join("   " + " | ".join(row) for row in found), flush=True)
        rows += found
        any_worse = any_worse or worse
        if given.only is None:  # after every program: a run that is interrupted leaves what it has found
            left = dict.fromkeys((program.name for program in chosen[number:]), "the run ended before it")
            write(rows, impossible | left, time.monotonic() - began)
    return 1 if any_worse else 0


def tell(program: Program, way: str, outcome: Outcome, show: bool) -> None:
    print(f"{program.name}, {way}: {outcome.failed or 'status 0'}, {outcome.seconds:.0f} s", flush=True)
    if show or outcome.failed:
        print(outcome.output[-6000:], flush=True)


if __name__ == "__main__":
    sys.exit(main())
