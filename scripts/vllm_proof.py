"""Runs vLLM on two CPU ranks with its own shared memory and with ringway, and writes docs/proofs/vllm.md.

    python scripts/vllm_proof.py                    (make vllm)
    python scripts/vllm_proof.py --only compiled    the runs whose names contain a word; writes nothing

A tiny model of random weights must make the same tokens with both. `tests/frameworks/vllm_op.py` compares the two
communicators call by call. vLLM is installed into .cache/vllm. It uses the torch of the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import proofs

import frameworks

PROGRAMS = proofs.ROOT / "tests" / "frameworks"
REQUIREMENTS = PROGRAMS / "vllm_requirements.txt"
PAGE = proofs.FOLDER / "vllm.md"
PROVES = (
    "csrc/shm",
    "src/ringway/backends/shm",
    "src/ringway/compat/vllm",
    "src/ringway/groups",
    "src/ringway_autoload",
    "tests/frameworks/vllm_op.py",
    "tests/frameworks/with_vllm.py",
)
UNUSED = ("torchaudio", "torchcodec", "torchvision")
"""vLLM asks for them, and PyPI has them only for torch with CUDA: importing them fails. Models of text need none."""
# No pipeline: with its own communicator, vLLM 0.32 fails on two stages of CPUs (a KeyError in its scheduler).
RUNS = {
    "tensor parallel": ("--tensor", "2"),
    "tensor parallel, compiled": ("--tensor", "2", "--layers", "2", "--compiled"),
}
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_NO_USAGE_STATS": "1",
}
LIMIT = 600


def environment() -> Path:
    python = frameworks.environment("vllm", REQUIREMENTS)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNUSED], check=True)
    return python


def run(command: list[str], variables: Mapping[str, str]) -> Any:
    """What the program prints as its result."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RINGWAY_")}
    done = subprocess.run(
        command, env={**inherited, **VARIABLES, **variables}, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    found = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")
    return json.loads(found[0])


def served(python: str, folder: str, options: tuple[str, ...], rounds: int) -> tuple[str, bool]:
    """A row of the table, and whether both made the same tokens. The two take turns."""
    program = [python, str(PROGRAMS / "with_vllm.py"), folder, "--dtype", "bfloat16" if has_bf16() else "float32"]
    program += ["--seconds", "8", *options]
    results: dict[str, list[Any]] = {"0": [], "1": []}
    for _ in range(rounds):
        for asked, found in results.items():
            found.append(run(program, {"RINGWAY_VLLM": asked}))
    for asked, found in results.items():
        carried = {name for one in found for rank in one["carried_by"] for name in rank}
        expected = "ringway" if asked == "1" else "vllm"
        if not carried or not all(name.startswith(expected) for name in carried):
            raise SystemExit(f"RINGWAY_VLLM={asked}: the ranks communicated through {carried}")
    tokens = [one["tokens"] for found in results.values() for one in found]
    same = all(one == tokens[0] for one in tokens)
    own, ours = (statistics.median(rate for one in found for rate in one["rates"]) for found in results.values())
    made = sum(map(len, tokens[0]))
    return f"{f'equal ({made})' if same else 'DIFFERENT'} | {own:.0f} | {ours:.0f} | {ours / own:.2f}", same


def operations(python: str) -> list[str]:
    """The lines about single calls."""
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = run([*torchrun, str(PROGRAMS / "vllm_op.py")], {"OMP_NUM_THREADS": "1"})
    lines = [
        f"One call, {found['dtype']}, in µs: the median of {len(next(iter(found['times'].values()))['vllm'])} rounds, "
        "and the median of the rounds' ratios.",
        "",
        "| call | vLLM | ringway | ringway / vLLM |",
        "|---|---|---|---|",
    ]
    for name, times in found["times"].items():
        ratio = statistics.median(ours / own for own, ours in zip(times["vllm"], times["ringway"], strict=True))
        own, ours = (statistics.median(times[side]) * 1e6 for side in ("vllm", "ringway"))
        lines.append(f"| {name} | {own:.1f} | {ours:.1f} | {ratio:.2f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="run only the runs whose name contains this, and write nothing")
    parser.add_argument("--rounds", type=int, default=2, help="how often each run is made with both")
    parser.add_argument("--python", help="a Python that has vLLM, instead of .cache/vllm")
    given = parser.parse_args()
    python = given.python or str(environment())
    rows, all_same = [], True
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        for name, options in RUNS.items():
            if given.only is None or given.only in name:
                row, same = served(python, folder, options, given.rounds)
                all_same = all_same and same
                rows.append(f"| {name} | {row} |")
                print(rows[-1], flush=True)
    if given.only is not None:
        return 0 if all_same else 1
    calls = operations(python)
    print("\n".join(calls))
    version = REQUIREMENTS.read_text().partition("vllm-cpu==")[2].split()[0]
    body = [
        f"`make vllm`: vllm-cpu {version}, Python {platform.python_version()}, torch {metadata.version('torch')}, "
        f"{platform.machine()}, {os.cpu_count()} cores. Two ranks, a Llama of random weights in "
        f"{'bf16' if has_bf16() else 'fp32'}, 8 prompts, 32 tokens each, repeated for 8 s after each of {given.rounds} "
        "starts of each engine.",
        "",
        "| model | tokens | vLLM, tokens/s | ringway, tokens/s | ringway / vLLM |",
        "|---|---|---|---|---|",
        *rows,
        "",
        *calls,
    ]
    if not has_bf16():
        body += [
            "",
            "This CPU has no bf16 instructions. vLLM's wheel needs them for its operation and models in bf16, and",
            "is killed by SIGILL. So the model is in fp32 and the calls are in fp16.",
        ]
    if all_same:
        proofs.write(PAGE, "vLLM on ringway", PROVES, "\n".join(body))
    return 0 if all_same else 1


def has_bf16() -> bool:
    return platform.machine() != "aarch64" or " bf16" in Path("/proc/cpuinfo").read_text()


if __name__ == "__main__":
    sys.exit(main())
