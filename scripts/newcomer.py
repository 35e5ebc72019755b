"""Walks the path of a newcomer in an empty folder, and writes docs/proofs/newcomer.md.

    python scripts/newcomer.py           all of it: about half an hour on two cores
    python scripts/newcomer.py --quick   without make test; writes nothing

A fresh clone runs `make demo` and `make test`. A wheel of that clone goes into an empty environment, with torch. There
an existing program for torch.distributed runs under torchrun, and then with another import under `ringway run`: it must
print the same losses. Its trace becomes a report, which headless Chromium opens. Each step must end well, and none of
ringway's own may print a warning or a traceback.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import proofs

sys.path.insert(0, str(proofs.ROOT / "tests"))
from browser import Browser, find_chromium

PROVES = ("Makefile", "README.md", "constraints.txt", "pyproject.toml", "scripts/wheels.py", "src/ringway/cli")
LIMIT = 3600
WRONG = re.compile(r"Traceback|Warning\b")
PROGRAM = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
data = torch.randn(64, 16)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print("loss", step, (mean / dist.get_world_size()).item(), flush=True)
dist.destroy_process_group()
"""
SWITCHES = (
    ("import torch.distributed as dist", "import ringway as dist"),
    ('dist.init_process_group("gloo")', "dist.init_distributed()"),
)
TRACED = (
    "for step in range(20):\n",
    'tracing = dist.trace("trace.json")\ntracing.__enter__()\nfor step in range(20):\n',
)
TRACE_ENDS = ("dist.destroy_process_group()", "tracing.__exit__(None, None, None)\ndist.destroy_process_group()")


class Walk:
    """The steps that were made: what was typed, how long it took, and what it showed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[tuple[str, float, str]] = []
        kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "PATH", "TMPDIR")}
        self._variables = {**kept, "OMP_NUM_THREADS": "1"}

    def step(self, typed: str, *command: str | Path, inside: str = "", quiet: bool = True) -> str:
        """Runs the command that a user would type. With `quiet`, warnings are an error."""
        print(f"$ {typed}", flush=True)
        began = time.monotonic()
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.folder / inside,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if done.returncode != 0 or (quiet and WRONG.search(done.stdout)):
            raise SystemExit(f"{typed}: status {done.returncode}\n{done.stdout[-6000:]}")
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
        self.rows.append((typed, time.monotonic() - began, last.strip("= ")))
        return done.stdout


def walk(folder: Path, with_tests: bool) -> Walk:
    made = Walk(folder)
    made.step("git clone ringway", "git", "clone", "--quiet", proofs.ROOT, "ringway")
    made.step("make demo", "make", "demo", inside="ringway", quiet=False)
    if with_tests:
        made.step("make test", "make", "test", inside="ringway", quiet=False)
    python = "".join(platform.python_version_tuple()[:2])
    target = f"cp{python}-{platform.machine()}"
    built = made.step(
        f"python scripts/wheels.py {target}", sys.executable, "scripts/wheels.py", target, inside="ringway", quiet=False
    )
    wheel = re.findall(r"^dist/\S+\.whl", built, re.MULTILINE)[-1]
    made.step("python -m venv mine", sys.executable, "-m", "venv", "mine")
    programs = folder / "mine" / "bin"
    pip = (programs / "pip", "--disable-pip-version-check", "install", "--quiet")
    constraints = folder / "ringway" / "constraints.txt"
    made.step(
        f"pip install torch {Path(wheel).name}",
        *pip,
        "-c",
        constraints,
        "torch",
        folder / "ringway" / wheel,
        quiet=False,
    )
    for name in ("demo", "doctor"):
        # The doctor's status says whether it found something about this machine.
        shell = f"{programs / 'ringway'} {name}" + (" || [ $? = 1 ]" if name == "doctor" else "")
        made.step(f"ringway {name}", "sh", "-c", shell)
    program = PROGRAM
    (folder / "train.py").write_text(program)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    before = losses(made.step("torchrun --nproc-per-node 2 train.py", programs / "python", *torchrun, quiet=False))
    for old, new in (*SWITCHES, TRACED, TRACE_ENDS):
        program = program.replace(old, new)
    (folder / "switched.py").write_text(program)
    after = losses(made.step("ringway run -n 2 switched.py", programs / "ringway", "run", "-n", "2", "switched.py"))
    if before != after or len(before) != 20:
        raise SystemExit(f"the switched program has other losses: {before} and {after}")
    made.step(
        "ringway report trace.json -o report.html", programs / "ringway", "report", "trace.json", "-o", "report.html"
    )
    return made


def losses(output: str) -> list[str]:
    return re.findall(r"loss (\d+ \S+)", output)


def opened(page: Path, profile: Path) -> str:
    """What the page says first, in a browser."""
    program = find_chromium()
    if program is None:
        return "no Chromium is installed here, so nobody looked at the report"
    browser = Browser(program, profile)
    try:
        browser.open(page.as_uri())
        said = str(browser.evaluate("document.body.innerText"))
        complaints = browser.complaints()
    finally:
        browser.close()
    if complaints or "all_reduce" not in said:
        raise SystemExit(f"the report in a browser: {complaints}\n{said[:2000]}")
    return "the report opens in Chromium without a complaint, and names the all_reduces"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without make test; writes nothing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        folder = Path(name)
        made = walk(folder, not given.quick)
        report = opened(folder / "report.html", folder / "profile")
    lines = [
        "    python scripts/newcomer.py",
        "",
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores. pip's downloads come from "
        "a cache or the network, whatever there was.",
        "",
        "| typed | seconds | the last line |",
        "|---|---|---|",
        *(f"| `{typed}` | {seconds:.0f} | {last.replace('|', '/')[:160]} |" for typed, seconds, last in made.rows),
        "",
        f"The switched program printed the same 20 losses as the one for torch.distributed on gloo; {report}.",
    ]
    print("\n".join(lines))
    if not given.quick:
        proofs.write(proofs.FOLDER / "newcomer.md", "A newcomer's path", PROVES, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
