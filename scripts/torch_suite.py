"""torch's own suite for backends, as its wheel ships it, on `gloo` and on `shm`.

python scripts/torch_suite.py                        all tests on both; exits 1 unless shm passes what runs on gloo
python scripts/torch_suite.py all_reduce broadcast   only the tests whose names contain one of these words

The suite decides at import, by the backend's name, which tests it skips. With an unknown name it would silently skip
half of them. So it is imported as for gloo, and the name is set to shm afterwards: every test that runs on gloo runs on
shm. Ranks are processes, forked from one that has imported torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import textwrap
import time
import unittest
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORLD = 4
"""The smallest world in which all tests run, except those that need a large one."""
LARGE_WORLD = 8
TOO_SMALL = "Skipped due to small world size."
ONLY_MPI = "Only MPI supports"
"""The start of the suite's message that gloo lacks an op on CPUs. shm has all ops."""
TEST_LIMIT = 180
"""Seconds for one test."""

NAMES_GLOO_IN_ITS_BODY = "test_accumulate_gradients"
"""These tests choose their model by the backend's name, and have one for CPUs only for the name gloo."""

Outcome = dict[str, Any]


class Outcomes(unittest.TestResult):
    """Writes one line per test: its name, its outcome, the reason, and the seconds it took."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.too_small: list[str] = []
        self._file = path.open("w", buffering=1)
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        self._began = time.monotonic()

    def _write(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        took = round(time.monotonic() - self._began, 1)
        line = {"test": test.id().rpartition(".")[2], "outcome": outcome, "why": why, "seconds": took}
        self._file.write(json.dumps(line) + "\n")

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._write(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        if reason == TOO_SMALL:
            self.too_small.append(test.id().rpartition(".")[2])
        self._write(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._write(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure  # noqa: N815


def import_suite(scratch: str) -> Any:
    """The suite as defined for gloo. Its settings are environment variables."""
    tempfile.tempdir = scratch  # it leaves files behind
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(WORLD),
        TEMP_DIR=scratch,
        INIT_METHOD=f"file://{scratch}/shared_init_file",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_LIMIT),
        OMP_NUM_THREADS="1",
    )
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def turn_to(suite: Any, backend: str) -> None:
    """Sets the suite's backend, and what it supports, after the tests were defined."""
    import ringway

    # torch's function refuses every backend whose name is not gloo, before it asks the group.
    suite.dist.monitored_barrier = ringway.monitored_barrier
    for feature, backends in suite.DistTestCases.backend_feature.items():
        if "gloo" in backends or feature == "plugin":
            backends.add(backend)
    for test in vars(suite.DistributedTest._DistTestBase).values():
        if getattr(test, "__unittest_skip_why__", "").startswith(ONLY_MPI):
            test.__unittest_skip__ = False
    suite.BACKEND = os.environ["BACKEND"] = backend


def test_case(suite: Any) -> Any:
    """The suite's tests as a class whose ranks are forked from this process."""

    class Ranks(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            if test_name.startswith(NAMES_GLOO_IN_ITS_BODY):
                suite.BACKEND = "gloo"  # the group has been made; this is only the name the body asks for
            super().run_test(test_name, parent_pipe)

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)
            # torch looks at rank 0 only.
            killed = {rank: p.exitcode for rank, p in enumerate(self.processes) if p.exitcode < 0}
            assert not killed, f"ranks ended by a signal: {killed}"

        def tearDown(self) -> None:
            ranks = self.processes
            super().tearDown()
            for rank in ranks:
                rank.join(1)
                rank.kill()

    return Ranks


def run(suite: Any, backend: str, words: Sequence[str], folder: Path) -> None:
    """Runs in a separate process: each test once, in the usual world, or in a large one if it needs that."""
    with (folder / f"{backend}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if backend != "gloo":
        turn_to(suite, backend)
    ranks = test_case(suite)
    names = [
        name
        for name in unittest.defaultTestLoader.getTestCaseNames(ranks)
        if not words or any(word in name for word in words)
    ]
    for world in (WORLD, LARGE_WORLD):
        os.environ["WORLD_SIZE"] = str(world)
        written = Outcomes(folder / f"{backend}-{world}.jsonl")
        unittest.TestSuite(map(ranks, names)).run(written)
        names = written.too_small


def outcomes(suite: Any, backend: str, words: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """The outcome of each test, by name."""
    process = multiprocessing.get_context("fork").Process(target=run, args=(suite, backend, words, folder))
    process.start()
    process.join()
    if process.exitcode:
        log = (folder / f"{backend}.log").read_text()
        raise SystemExit(f"the suite did not run to its end on {backend}:\n{log[-4000:]}")
    files = [folder / f"{backend}-{world}.jsonl" for world in (WORLD, LARGE_WORLD)]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {line["test"]: line for line in lines}


def print_counts(backend: str, found: dict[str, Outcome]) -> None:
    count = Counter(outcome["outcome"] for outcome in found.values())
    seconds = sum(outcome["seconds"] for outcome in found.values())
    print(
        f"{backend:5} {len(found)} tests: {count['passed'] + count['failed']} executed, {count['passed']} passed, "
        f"{count['failed']} failed, {count['skipped']} skipped ({seconds:.0f} s)"
    )


def compare(gloo: dict[str, Outcome], shm: dict[str, Outcome]) -> int:
    """Prints the differences; returns how many tests fail on shm, or run only on gloo."""
    print_counts("gloo", gloo)
    print_counts("shm", shm)
    worse = 0
    for name, outcome in gloo.items():
        ours = shm[name]
        if outcome["outcome"] == "failed":
            print(f"\non gloo itself, {name} failed:\n{outcome['why']}")
        if ours["outcome"] == "passed" or outcome["outcome"] == ours["outcome"] == "skipped":
            continue
        worse += 1
        print(f"\n{name}: {outcome['outcome']} on gloo, {ours['outcome']} on shm:\n{ours['why']}")
    print_where("\nOnly on shm, because gloo cannot", gloo, [name for name in gloo if shm[name]["outcome"] == "passed"])
    print_where("\nOn neither", gloo, [name for name in gloo if shm[name]["outcome"] == "skipped"])
    return worse


def print_where(title: str, gloo: dict[str, Outcome], names: Sequence[str]) -> None:
    """The tests that gloo skips, by reason."""
    skipped = defaultdict(list)
    for name in names:
        if gloo[name]["outcome"] == "skipped":
            skipped[gloo[name]["why"]].append(name)
    print(f"{title}: {sum(map(len, skipped.values()))}")
    for why, tests in sorted(skipped.items(), key=lambda item: -len(item[1])):
        print(textwrap.fill(f"{len(tests)}  {why}: {', '.join(tests)}", 120, subsequent_indent="     "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--keep", type=Path, help="a folder for the outcomes and the ranks' output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        suite = import_suite(scratch)
        gloo, shm = (outcomes(suite, backend, arguments.words, folder) for backend in ("gloo", "shm"))
    worse = compare(gloo, shm)
    print(f"\n{worse} tests fail on shm, or execute on gloo only")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
