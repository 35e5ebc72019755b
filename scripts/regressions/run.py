"""Runs regression tests of this checkout on commit 72db06d, which has the bugs. Each of them must fail there.

    git worktree add --detach OLD 72db06d && sh OLD/scripts/build_in_place.sh
    python scripts/regressions/run.py OLD [WORDS OF TEST NAMES ...]

The tests are those that docs/proofs/regressions.md lists. They are copied to another folder. There, names that 72db06d
spells differently are replaced (`REPLACED`), and `missing.py` stands in for names that it does not have. Needs root:
each test runs in a PID namespace of its own, because some of the bugs leave processes behind.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "proofs" / "regressions.md"
SECONDS = 120

REPLACED = (
    ("from __future__ import annotations\n", "from __future__ import annotations\n\nimport missing\n"),
    ("from ringway.backends.base import GroupInfo", "from missing import GroupInfo"),
    ("from ringway.backends.process import", "from missing import"),
    ("from ringway.backends.several.hosts import host", "from missing import host"),
    ("from ringway.backends.shm import join", "from ringway.backends import shm_meeting as join"),
    ("from ringway.backends.shm import link as links", "from missing import links"),
    ("from ringway.backends.shm.backend import", "from ringway.backends.shm import"),
    ('"ringway.backends.shm.backend"', '"ringway.backends.shm"'),
    ("from ringway.backends.shm.join import", "from missing import"),
    ("from ringway.backends.shm.peers import", "from missing import"),
    ("from ringway.backends.torch.gloo import GlooFastPath", "from missing import GlooFastPath"),
    ("from ringway.compress.agreement import", "from missing import"),
    (
        "from ringway.compress.background import Background",
        "from ringway.compress.lane import ThreadLane as Background",
    ),
    ("from ringway.compress.windows import", "from missing import"),
    ("from ringway.compress.workspace import BufferPool", "from ringway.compress.workspace import Shelf as BufferPool"),
    ("feedback.background(", "feedback.lane("),
    ("mixed.background(", "mixed.lane("),
    ("from ringway.groups import objects", "from ringway import objects"),
    ("from ringway.groups.listener import", "from missing import"),
    ("from ringway.groups.object_frames import", "from missing import"),
    ("from ringway.groups.world import", "from ringway.world import"),
    ("from ringway.keys import", "from missing import"),
    ("from ringway.observe.log", "from ringway.observe"),
    ("from ringway.observe.stall.peers import request", "from missing import request"),
    ("from ringway.observe.trace import clock", "from ringway.observe import clock"),
    ("from ringway.observe.trace.writer import", "from ringway.observe.trace import"),
    ("from ringway.store import", "from missing import"),
    ("context.world_size, 50, world.process)", "context.world_size, 50)"),
    ('optimizer.state[weights]["step"]', 'optimizer.param_groups[0]["step"]'),
    ('optimizer.state[parameter]["step"]', 'optimizer.param_groups[0]["step"]'),
    ('torch.tensor(state["step"])', 'torch.tensor(optimizer.param_groups[0]["step"])'),
    ("csrc/record/ledger.cpp", "csrc/ledger.cpp"),
    ('#include "record/', '#include "'),
)


def adapt(old: Path, folder: Path) -> None:
    """Copies the tests, with 72db06d's names of modules, next to links to 72db06d's files."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("csrc", "docs", "README.md"):
        (folder / name).symlink_to(old / name)
    for file in (folder / "tests").rglob("*.*"):
        if file.suffix in (".py", ".cpp") and file.name != "handover.py":
            text = file.read_text()
            for today, before in REPLACED:
                text = text.replace(today, before)
            file.write_text(text)
    shutil.copy(Path(__file__).with_name("missing.py"), folder / "tests")


def run(old: Path, folder: Path, test: str) -> list[str]:
    """What pytest printed about a failure on 72db06d, or nothing if the test passed."""
    environment = {**os.environ, "PYTHONPATH": f"{old / 'src'}:{folder / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=short", test]
    tested = subprocess.Popen(
        alone + pytest, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed = tested.communicate(timeout=SECONDS)[0].splitlines()
    except subprocess.TimeoutExpired:
        tested.kill()
        tested.communicate()
        return [f"hung until the limit of {SECONDS} s"]
    if tested.returncode == 0:
        return []
    return [line[1:].strip() for line in printed if line.startswith("E ")] or printed[-1:]


def main() -> None:
    old, words = Path(sys.argv[1]).resolve(), sys.argv[2:]
    passed = []
    with tempfile.TemporaryDirectory() as folder:
        adapt(old, Path(folder))
        for test in dict.fromkeys(re.findall(r"`(tests/[^`]+::[^`]+)`", PAGE.read_text())):
            if words and not any(word in test for word in words):
                continue
            began = time.monotonic()
            failure = run(old, Path(folder), test)
            print(f"{'failed' if failure else 'PASSED'} after {time.monotonic() - began:.0f} s: {test}")
            print("".join(f"    {line[:200]}\n" for line in failure[:12]), end="", flush=True)
            if not failure:
                passed.append(test)
    if passed:
        raise SystemExit(f"{len(passed)} tests cannot see the bugs of 72db06d")


if __name__ == "__main__":
    main()
