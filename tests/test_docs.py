"""The programs in the documentation run and print what the page says, the `ringway` commands on it are ones that the
command takes, and the files that pages name exist.

A program is a ```python block of README.md or docs/*.md. Its first line is a comment that says how to start it, as in
`# python hello.py` or `# ringway run -n 2 hello.py`. A ```text output block after it holds lines that the program
prints; `…` in it stands for any text. A block that cannot run here is marked ```python notest and listed in
NOT_RUN with the reason. A `ringway` command in another block, or at the start of a program, is parsed, but not run.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from programs import ended_with, run_launched, run_program, torchrun_variables
from ringway.cli import app
from ringway.config import resolve
from ringway.testing import RankPool

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MORE_PAGES = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]

NO_PROGRAM = {
    "reference.md": "it is made from the docstrings when the site is built",
}
"""The pages that do not open with a program or a command, and why."""

OPENING_LINES = 15
"""A page's first block begins within these."""

NOT_RUN = {
    "from ringway.testing import check_backend": "the suite takes minutes, and the module is the reader's",
    "# ringway run -n 2 on_one_gpu.py": "it needs a GPU",
    "# python actors.py": "it needs Ray; make frameworks runs tests/frameworks/with_ray.py, which does the same",
}
"""The first line of each block marked `notest`, and why it cannot run in the tests."""

BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^(?:import|from) \w", re.MULTILINE)
START = re.compile(r"# (?:python|ringway run -n (?P<ranks>\d+)) (?P<name>\w+\.py)\b")


@dataclass(frozen=True)
class Program:
    """A ```python block and the output that the page shows for it."""

    page: str
    line: int
    name: str
    ranks: int
    text: str
    output: str | None

    @property
    def label(self) -> str:
        return f"{self.page}:{self.line}:{self.name}"


def _blocks(page: Path) -> Iterator[tuple[str, str, int]]:
    """The info string, the text and the line of each fenced block."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield found[1].strip(), found[2], text.count("\n", 0, found.start()) + 1


def _programs() -> list[Program]:
    programs = []
    for page in PAGES:
        blocks = list(_blocks(page))
        for index, (info, text, line) in enumerate(blocks):
            start = START.match(text)
            if info == "python" and start is not None:
                following = blocks[index + 1] if index + 1 < len(blocks) else ("", "", 0)
                output = following[1] if following[0] == "text output" else None
                ranks = int(start["ranks"] or 1)
                programs.append(Program(page.name, line, start["name"], ranks, text, output))
    return programs


PROGRAMS = _programs()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.label)
def test_program_runs(program: Program, pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / program.name).write_text(program.text)
    environments = torchrun_variables(program.ranks) if program.ranks > 1 else [{}]
    secret = {"RINGWAY_JOB_SECRET": "0123456789abcdef" * 4}  # as under ringway run, the job has one
    ranks = run_program(pool, tmp_path / program.name, environments=[given | secret for given in environments])
    printed = [
        f"[rank {rank.rank}] {line.rstrip()}" if program.ranks > 1 else line.rstrip()
        for rank in ranks
        for line in rank.output.splitlines()
    ]
    story = "\n".join(printed)
    assert all(map(ended_with, ranks)), f"{program.label}: {[rank.detail for rank in ranks]}\n{story}"
    for line in (program.output or "").splitlines():
        pattern = re.compile(".*".join(map(re.escape, line.rstrip().split("…"))))
        assert any(map(pattern.fullmatch, printed)), f"{program.label} does not print\n{line}\nbut\n{story}"


@pytest.mark.processes
def test_the_first_program_runs_under_the_real_launcher(pool: RankPool, tmp_path: Path) -> None:
    program = next(program for program in PROGRAMS if program.page == "README.md")
    (tmp_path / program.name).write_text(program.text)
    launcher = [sys.executable, "-m", "ringway.cli", "run", "-n", str(program.ranks)]
    run = run_launched(pool, launcher, tmp_path / program.name, ranks=program.ranks, environment=os.environ)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "[rank 1] tensor([3., 3., 3., 3.])" in run.stdout


def test_every_block_runs_or_has_a_reason() -> None:
    not_run = set()
    for page in PAGES:
        for info, text, line in _blocks(page):
            if info == "python":
                assert START.match(text), f"{page.name}:{line}: the first line does not say how to start the program"
            elif info.startswith("python"):
                assert info == "python notest", f"{page.name}:{line}: unknown info string {info!r}"
                not_run.add(text.splitlines()[0])
            elif not info:
                assert not PYTHON.search(text), f"{page.name}:{line}: Python in a block without a language is not run"
    assert not_run == set(NOT_RUN)


COMMAND = re.compile(r"^.*?(?<![^\s/])ringway +(?P<arguments>[\w-]+(?: .*)?)$")
"""A line with a command, perhaps behind a prompt, variables or a launcher. What ringway prints has a colon there."""
EXPLAINED = re.compile(r"\s{2,}|\s#|\s[|&>;]")
"""What may end a command: a comment, a description in a second column, or the shell's operators."""
SUBCOMMANDS = typer.main.get_command(app).commands


def _commands(page: Path) -> Iterator[tuple[str, int]]:
    """The arguments of each `ringway` in a block of commands, or in the first line of a program, and their line."""
    for info, text, line in _blocks(page):
        if info == "text output":
            continue
        lines = text.splitlines()
        for number, said in enumerate(lines[:1] if info.startswith("python") else lines, line + 1):
            while found := COMMAND.match(said):
                said = found["arguments"]
                yield EXPLAINED.split(said)[0], number


def test_commands_are_ones_that_ringway_takes() -> None:
    """As its own parser reads them: a subcommand or an option that has another name by now is an error."""
    found = set()
    for page in PAGES:
        for said, line in _commands(page):
            name, *arguments = shlex.split(said)
            where = f"{page.name}:{line}: ringway {said}"
            assert name in SUBCOMMANDS or said == "--help", where
            if name in SUBCOMMANDS:
                found.add(name)
                try:
                    SUBCOMMANDS[name].make_context(name, arguments)
                except Exception as error:
                    raise AssertionError(f"{where}: {error}") from error
    assert {"run", "env", "doctor", "bench", "tune", "report"} <= found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_the_text_exist(page: Path) -> None:
    """In `ringway run --join HOST:PORT`, and what else is not a whole command."""
    for said in re.findall(r"`ringway ([^`\n]+)`", BLOCK.sub("", page.read_text())):
        name, *words = said.split()
        assert name in SUBCOMMANDS, f"{page.name}: ringway {said}"
        known = {option for parameter in SUBCOMMANDS[name].params for option in parameter.opts}
        unknown = [word for word in re.findall(r"(?<!\S)\[?(--?[\w-]+)", " ".join(words)) if word not in known]
        assert not unknown, f"{page.name}: ringway {said}: {name} has no {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_open_with_a_program(page: Path) -> None:
    """A reader can paste something before the page explains it."""
    pastable = {"python", "python notest", "bash", ""}
    opens = any(info in pastable and line <= OPENING_LINES for info, _, line in _blocks(page))
    assert opens != (page.name in NO_PROGRAM), f"{page.name} does not open with a program, or needs no exception"


def test_configurations_in_toml_are_accepted(tmp_path: Path) -> None:
    found = [text for page in PAGES for info, text, _ in _blocks(page) if info == "toml"]
    assert found
    for text in found:
        file = tmp_path / "ringway.toml"
        file.write_text(text)
        assert resolve(str(file), environ={}).notes == ()


def _slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES + MORE_PAGES, ids=lambda page: page.name)
def test_links_have_a_target(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", linked.read_text()), re.MULTILINE)
            assert anchor in map(_slug, headings), f"{page.name} links to {target}"


def test_the_site_has_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the README, which is not a page of it. scripts/docs_hooks.py adds them to a page that links there."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    on_page_markdown = importlib.import_module("docs_hooks").on_page_markdown
    made = on_page_markdown((ROOT / "docs" / "performance.md").read_text())
    readme = (ROOT / "README.md").read_text()
    assert "[The README](#measured)" in made
    _, _, measured = made.partition("\n## Measured\n")
    figures = [line for line in readme.partition("\n## Measured\n")[2].splitlines() if re.match(r"\|.*\d", line)]
    assert figures
    assert set(figures) <= set(measured.splitlines())
    targets = re.findall(r"\]\(([^)\s#]+)", measured)
    assert targets
    assert [target for target in targets if not (ROOT / "docs" / target).is_file()] == []


PATH = re.compile(r"(?<![\w./{-])((?:src|csrc|tests|docs|scripts|benchmarks|examples)/[\w./*-]*[\w*/])")
SHORT_PATH = re.compile(r"`([\w.*-]+/[\w./*-]+\.(?:py|cpp|h|md|json|svg|sh|toml))`")


@pytest.mark.parametrize("page", PAGES + MORE_PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    text = page.read_text()
    missing = [path for path in PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))]
    short = [path for path in SHORT_PATH.findall(text) if not PATH.match(path)]
    places = (ROOT, ROOT / "src" / "ringway", page.parent)
    missing += [path for path in short if not any(any(place.glob(path)) for place in places)]
    assert not missing, f"{page.name} names files that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES + MORE_PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    """A dotted name in backticks, such as `ringway.compress.OneBitAdam`, can be imported."""
    names = set(re.findall(r"`(ringway(?:\.[A-Za-z_]\w*)+)", BLOCK.sub("", page.read_text())))
    missing = sorted(name for name in names - NOT_MODULES if not _exists(name))
    assert not missing, f"{page.name} names {missing}"


NOT_MODULES = {"ringway.backends", "ringway.calls", "ringway.call.time"}
"""An entry point group and names of counters, which look like modules."""


def _exists(name: str) -> bool:
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:index]))
            except ModuleNotFoundError as error:
                # It exists if what it lacks is an optional library.
                return not (error.name or "").startswith("ringway")
    return True
