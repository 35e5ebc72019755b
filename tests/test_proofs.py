"""Proofs name the commit they were made on, and are listed when the code has changed since."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import proofs  # noqa: E402


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a history: one file, one commit."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    git("init", "-q")
    (tmp_path / "code.py").write_text("one\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "one")
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
    return tmp_path


def test_a_proof_lasts_until_its_code_changes(tree: Path) -> None:
    page = tree / "docs" / "proofs" / "code.md"
    proofs.write(page, "Proof", ["code.py"], "It ran.")
    assert proofs.outdated(page) is None
    (tree / "other.py").write_text("new\n")
    assert proofs.outdated(page) is None
    (tree / "code.py").write_text("two\n")
    assert proofs.outdated(page) == "changed since: code.py"
    (tree / "code.py").unlink()
    assert proofs.outdated(page) == "it proves code.py, which is gone"


def test_a_proof_of_an_unknown_commit_does_not_count(tree: Path) -> None:
    page = tree / "proof.md"
    proofs.write(page, "Proof", ["code.py"], "It ran.", commit="0" * 40)
    assert "is not in this history" in str(proofs.outdated(page))
    page.write_text("It ran, believe me.\n")
    assert "does not name its commit" in str(proofs.outdated(page))


def test_the_scripts_name_files_that_exist() -> None:
    benchmarks = [f"../benchmarks/{name}.py" for name in ("door_cost", "bench_agrees", "compare_agrees")]
    for script in ("nccl_proof.py", "ccl_proof.py", "numerics_proof.py", *benchmarks):
        listed = re.search(r"^PROVES = (\(.*?^\))", (SCRIPTS / script).read_text(), re.MULTILINE | re.DOTALL)
        assert listed is not None
        for name in ast.literal_eval(listed[1]):
            assert (proofs.ROOT / name).exists(), f"{script} lists {name}"


def test_the_proofs_of_this_tree_name_their_commit_and_files() -> None:
    pages = sorted(proofs.FOLDER.glob("*.md"))
    assert pages
    for page in pages:
        assert "does not name" not in str(proofs.outdated(page)), page.name


def test_the_tests_that_pages_name_exist() -> None:
    written = "".join(path.read_text() for path in (proofs.ROOT / "tests").rglob("*.py"))
    for page in ("docs/security.md", "docs/proofs/regressions.md"):
        named = set(re.findall(r"\b(test_\w+)(?=[`\[])", (proofs.ROOT / page).read_text()))
        assert len(named) > 20, page
        assert {name for name in named if f"def {name}(" not in written} == set(), page
