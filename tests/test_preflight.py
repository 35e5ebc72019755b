"""The check before the setup reports what the machine lacks, and how to install it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "preflight.sh"


def _preflight(python: str, path: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        ["/bin/sh", str(SCRIPT), python],
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_machine_that_has_everything_passes() -> None:
    assert _preflight(sys.executable, os.environ["PATH"]) == (0, "")


def test_no_python() -> None:
    code, said = _preflight("no-such-python", os.environ["PATH"])
    assert code == 1
    assert "apt install python3" in said


def test_no_compiler(tmp_path: Path) -> None:
    code, said = _preflight(sys.executable, str(tmp_path))
    assert code == 1
    assert "apt install g++" in said


def test_no_headers(tmp_path: Path) -> None:
    """A Python that looks for its headers in an empty folder."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
case "$2" in *get_paths*) echo "{tmp_path}" ;; *) exec "{sys.executable}" "$@" ;; esac
""")
    python.chmod(0o755)
    code, said = _preflight(str(python), os.environ["PATH"])
    assert code == 1
    assert "apt install python3-dev" in said
