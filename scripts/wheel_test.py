"""Tests the wheels of dist/ that this machine can run, and writes docs/proofs/wheels_ARCHITECTURE.md (make wheel-test).

    python scripts/wheel_test.py                      all of them
    python scripts/wheel_test.py cp311-aarch64        some of them
    python scripts/wheel_test.py --speed cp311-aarch64  only compares the speed, for a quiet moment
    python scripts/wheel_test.py --page               only writes the page: what was found out about the wheels of dist/
    python scripts/wheel_test.py --seccomp FILE       docker's default seccomp profile, as scripts/sandbox.py takes it

Each wheel is installed into a fresh environment. As nobody, in a sandbox without a compiler and with a /dev/shm of
64 MB (scripts/sandbox.py, which needs root), `ringway demo`, `ringway bench` and `ringway doctor` must end within two
minutes each without a warning or a traceback, and the conformance suite and the tests of exits must pass. Results must
be those of the native build of the Python that runs this, bit by bit. Then `ringway bench` alternates between the two.

On free-threaded Python the GIL is on (PYTHON_GIL=1): ringway does not declare that it runs without it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import proofs
import wheels

CACHE = proofs.ROOT / ".cache" / "wheel-test"
TITLE = "The wheels"
PROVES = ("csrc", "CMakeLists.txt", "scripts/wheels.py", "scripts/sandbox.py", "src/ringway/testing")
LIMIT = 120
COMMANDS = {"ringway demo": ("demo",), "ringway bench": ("bench",), "ringway doctor": ("doctor",)}
TESTS = ("tests/test_conformance.py", "tests/groups/test_teardown.py")
TEST_SECONDS = 3600
BENCH = ("bench", "-n", "2", "--backends", "shm", "--ops", "all_reduce,all_gather", "--sizes", "8,64K,4M", "--json")
WRONG = re.compile(r"Traceback|Warning\b")
UV = "uv==0.13.7"
TEST_NEEDS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")


@dataclass
class Result:
    """What was found out about one wheel. Failures are not kept: such a wheel counts as untested."""

    seconds: dict[str, float] = field(default_factory=dict)
    tests: str = ""
    bits: str = ""
    ratios: dict[str, float] = field(default_factory=dict)
    seccomp: bool = False
    failures: list[str] = field(default_factory=list)

    def keep(self, wheel: Path) -> None:
        file = CACHE / f"{wheel.name}.json"
        file.write_text(json.dumps({**asdict(self), "digest": _digest(wheel)}))

    @staticmethod
    def kept(wheel: Path) -> Result | None:
        """What was kept about exactly this wheel."""
        file = CACHE / f"{wheel.name}.json"
        facts = json.loads(file.read_text()) if file.exists() else {"digest": None}
        return Result(**facts) if facts.pop("digest") == _digest(wheel) else None


def _digest(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def uv() -> Path:
    """uv, which links files from its cache: the environments need the space of one torch, and of one CUDA."""
    folder = CACHE / "uv"
    if not (folder / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "--disable-pip-version-check", "install", "-q", UV], check=True)
    return folder / "bin" / "uv"


def environment(target: wheels.Target, interpreter: Path, wheel: Path) -> Path:
    """A fresh environment with this wheel, and with torch and the wheel's other requirements from PyPI."""
    folder = CACHE / target.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    torch = next(line for line in (proofs.ROOT / "constraints.txt").read_text().splitlines() if line[:7] == "torch==")
    done = folder / "torch.txt"
    if not done.exists() or done.read_text() != torch:  # torch is large, and the wheel is what must be fresh
        subprocess.run([str(uv()), "venv", "--quiet", "--clear", "-p", str(interpreter), str(folder)], check=True)
        _install(folder, torch)
        done.write_text(torch)
    _install(folder, "--reinstall-package", "ringway", str(wheel))
    return folder


def _install(folder: Path, *arguments: str) -> None:
    variables = {"UV_CACHE_DIR": str(proofs.ROOT / ".cache" / "uv"), **os.environ}
    command = [str(uv()), "pip", "install", "--quiet", "-p", str(folder / "bin" / "python"), *arguments]
    subprocess.run(command, check=True, env=variables)


class Sandbox:
    """Runs commands of an environment in scripts/sandbox.py, in a scratch folder that belongs to nobody."""

    def __init__(
        self, folder: Path, interpreter: Path, scratch: Path, profile: Path | None, variables: dict[str, str]
    ) -> None:
        self._variables = variables
        reach = interpreter.resolve().parent.parent
        seccomp = () if profile is None else ("--seccomp", str(profile.resolve()))
        self._before = [sys.executable, str(proofs.ROOT / "scripts" / "sandbox.py"), *seccomp, "--reach", str(reach)]
        self._folder, self._scratch = folder, scratch

    def run(self, limit: float, *command: str) -> tuple[int | None, str, float]:
        """The exit status, or None if it was too late; the output; and the seconds that it took."""
        variables = {
            "HOME": str(self._scratch),
            "LANG": "C.UTF-8",
            "PATH": f"{self._folder / 'bin'}:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self._scratch),
            **self._variables,
        }
        began = time.monotonic()
        try:
            ended = subprocess.run(
                [*self._before, *command],
                cwd=self._scratch,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            said = late.stdout or b""
            return None, said.decode(errors="replace") if isinstance(said, bytes) else said, limit
        return ended.returncode, ended.stdout, time.monotonic() - began


def test(target: wheels.Target, wheel: Path, profile: Path | None) -> Result:
    interpreter = wheels.interpreter(target.python)
    assert interpreter is not None
    folder, result = environment(target, interpreter, wheel), Result(seccomp=profile is not None)
    with tempfile.TemporaryDirectory(prefix="wheel-") as made:
        scratch = Path(made, "nobody")
        scratch.mkdir()
        Path(made).chmod(0o755)
        for part in ("tests", "pyproject.toml"):  # without src, so that ringway is the installed one
            copy = shutil.copytree if part == "tests" else shutil.copy
            copy(proofs.ROOT / part, scratch / part)
        shutil.rmtree(scratch / "tests" / "frameworks")
        for path in [scratch, *scratch.rglob("*")]:
            shutil.chown(path, 65534, 65534)
        variables = {"PYTHON_GIL": "1"} if target.python.endswith("t") else {}
        sandbox = Sandbox(folder, interpreter, scratch, profile, variables)
        for name, arguments in COMMANDS.items():
            status, output, seconds = sandbox.run(LIMIT, "ringway", *arguments)
            result.seconds[name] = seconds
            print(f"{target.name}: {name}: status {status}, {seconds:.0f} s", flush=True)
            # The doctor's status says whether it found something about this machine.
            if status is None or (status != 0 and name != "ringway doctor") or WRONG.search(output):
                result.failures.append(f"{name}: status {status}\n{output[-3000:]}")
        ours = _bits(sandbox.run(LIMIT, "ringway", "run", "-n", "2", "tests/wheel_bits.py")[1])
        native = subprocess.run(
            [sys.executable, "-m", "ringway", "run", "-n", "2", str(proofs.ROOT / "tests" / "wheel_bits.py")],
            capture_output=True,
            text=True,
            check=True,
            timeout=LIMIT,
        )
        theirs = _bits(native.stdout)
        differing = sorted(case for case in theirs if ours.get(case) != theirs[case])
        print(f"{target.name}: {len(theirs)} results, {len(differing)} differ", flush=True)
        result.bits = f"{len(theirs) - len(differing)} of {len(theirs)} equal"
        if differing or not theirs:
            result.failures.append(f"bits differ: {', '.join(differing) or 'nothing was compared'}")
        # Some of the pinned tools need a newer Python than the oldest.
        pins = () if target.python == wheels.PYTHONS[0] else ("-c", str(proofs.ROOT / "constraints.txt"))
        _install(folder, *pins, *TEST_NEEDS)
        status, output, seconds = sandbox.run(
            TEST_SECONDS, "python", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *TESTS
        )
        result.tests = f"{_last(output)}"
        if status != 0:
            result.failures.append(f"tests: status {status}\n{output[-3000:]}")
    return result


def _bits(output: str) -> dict[str, str]:
    lines = re.findall(r"bits: (.*) (\w{16} \w{16})$", output, re.MULTILINE)
    return dict(lines)


def _last(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "").strip("= ")


def speeds(python: Path, rounds: int) -> dict[str, float]:
    """How long a call takes in the wheel, as a multiple of the native build: medians over alternating runs."""
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, each in {"native": sys.executable, "wheel": str(python)}.items():
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "bench.json")
                subprocess.run(
                    [each, "-m", "ringway", *BENCH, "-o", str(file)],
                    check=True,
                    cwd=folder,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=LIMIT,
                )
                for row in json.loads(file.read_text())["rows"]:
                    case = times.setdefault(f"{row['op']}, {row['nbytes']} B", {"native": [], "wheel": []})
                    case[name].append(row["seconds"]["median"])
    return {case: statistics.median(of["wheel"]) / statistics.median(of["native"]) for case, of in times.items()}


def why_untested(target: wheels.Target) -> str | None:
    if target.architecture != platform.machine():
        return f"this machine is {platform.machine()}"
    return None if wheels.interpreter(target.python) else f"no CPython {target.python} is installed here"


def sdist_builds() -> str:
    """Builds the sdist as an installer does: in an environment of its own, from the sdist alone."""
    (sdist,) = wheels.DIST.glob("ringway-*.tar.gz")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        variables = {k: v for k, v in os.environ.items() if k not in ("CMAKE_ARGS", "PYTHONPATH", "VIRTUAL_ENV")}
        build = [str(uv()), "build", "--quiet", "--wheel", "-p", sys.executable, "-o", folder, str(sdist)]
        subprocess.run(build, check=True, cwd=folder, env=variables)
        (made,) = Path(folder).glob("*.whl")
        return (
            f"`{sdist.name}` ({sdist.stat().st_size / 1e3:.0f} kB) builds `{made.name}` with this machine's compiler, \
in an environment of its own, in {time.monotonic() - began:.0f} s."
        )


def page(results: dict[str, Result], sdist: str) -> str:
    filtered = all(result.seccomp for result in results.values())
    option = " SECCOMP=default.json" if filtered else ""
    lines = [f"    make wheels wheel-test{option}", "", f"{platform.machine()}, {os.cpu_count()} cores.", ""]
    lines += ["| wheel | kB | tested |", "|---|---|---|"]
    for target in wheels.TARGETS.values():
        wheel = find(target)
        if target.architecture != platform.machine():
            continue
        if wheel is None:
            lines.append(f"| {target.name} | not built | |")
            continue
        told = "yes" if target.name in results else f"**no**: {why_untested(target) or 'not in this run'}"
        lines.append(f"| `{wheel.name}` | {wheel.stat().st_size / 1e3:.0f} | {told} |")
    profile = "docker's default seccomp profile" if filtered else "without a seccomp profile"
    lines += [
        "",
        f"Tested as nobody, without a compiler, with a /dev/shm of 64 MB and {profile}. Seconds of each command, what "
        "the conformance suite and the tests of exits said, and bits compared with the native build's:",
        "",
        f"| wheel | {' | '.join(COMMANDS)} | tests | bits |",
        f"|---|{'---|' * len(COMMANDS)}---|---|",
    ]
    for name, result in results.items():
        took = " | ".join(f"{result.seconds[command]:.0f} s" for command in COMMANDS)
        lines.append(f"| {name} | {took} | {result.tests} | {result.bits} |")
    measured = {name: result.ratios for name, result in results.items() if result.ratios}
    if measured:
        cases = list(next(iter(measured.values())))
        lines += [
            "",
            "Time of a call on shm with two ranks, as a multiple of the native build's "
            f"(g++, Python {platform.python_version()}), in alternation. Another Python has other costs of a call:",
            "",
            f"| wheel | {' | '.join(cases)} |",
            f"|---|{'---|' * len(cases)}",
            *(f"| {name} | {' | '.join(f'{of[case]:.2f}' for case in cases)} |" for name, of in measured.items()),
        ]
    return "\n".join([*lines, "", sdist])


def find(target: wheels.Target) -> Path | None:
    return next(wheels.DIST.glob(f"ringway-*-{target.abi.removesuffix('t')}-{target.abi}-{target.platform}.whl"), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(wheels.TARGETS))
    parser.add_argument("--seccomp", type=Path, help="docker's default profile")
    parser.add_argument("--rounds", type=int, default=5, help="runs of ringway bench for each side; 0: no comparison")
    parser.add_argument("--speed", action="store_true", help="only compare the speed of wheels that were tested")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--commit", help="for a tree without git history")
    parser.add_argument("--output", type=Path, default=proofs.FOLDER / f"wheels_{platform.machine()}.md")
    given = parser.parse_args()
    tested: dict[str, Result] = {}
    for name in [] if given.page else given.targets or wheels.TARGETS:
        target = wheels.TARGETS[name]
        wheel, why = find(target), why_untested(target)
        if wheel is None or why is not None:
            print(f"{name}: not tested: {why or 'not built'}", flush=True)
            continue
        known = Result.kept(wheel) if given.speed else test(target, wheel, given.seccomp)
        if known is None:
            print(f"{name}: its speed is compared once it was tested", flush=True)
            continue
        result = tested[name] = known
        if given.rounds and not result.failures:
            result.ratios = speeds(CACHE / name / "bin" / "python", given.rounds)
        ratios = ", ".join(f"{case}: {ratio:.2f}" for case, ratio in result.ratios.items())
        print(f"{name}: {result.tests}; {ratios}", flush=True)
        for failure in result.failures:
            print(f"{name}: FAILED {failure}", flush=True)
        if not result.failures:
            result.keep(wheel)
    if any(result.failures for result in tested.values()):
        return 1
    if given.page or not given.targets:
        made = {name: wheel for name, target in wheels.TARGETS.items() if (wheel := find(target)) is not None}
        results = {name: known for name, wheel in made.items() if (known := Result.kept(wheel)) is not None}
        if not results:
            print("no wheel was tested", file=sys.stderr)
            return 1
        proofs.write(given.output, TITLE, PROVES, page(results, sdist_builds()), given.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
