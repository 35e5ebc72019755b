"""The command where ringway itself cannot be imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from ringway.doctor import Finding

_PROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"
_OLD = '__version__ = "2.5.1+cpu"\n'
_PROBLEM = "needs torch 2.8 or newer, and torch 2.5.1+cpu is installed"


def _with_torch(folder: Path, text: str, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch/__init__.py").write_text(text)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=100)


def test_a_torch_that_is_too_old(tmp_path: Path) -> None:
    script = re.search(r'^ringway = "(.+):(.+)"$', _PROJECT.read_text(), re.MULTILINE)
    assert script is not None
    starts = f"from {script[1]} import {script[2]}; {script[2]}()"  # what the installed script does
    for arguments in (("doctor",), ("env", "--json")):
        ended = _with_torch(tmp_path, _OLD, "-c", starts, *arguments)
        assert ended.returncode == 1, ended
        assert _PROBLEM in ended.stderr, ended
        assert ended.stderr.count("\n") == 1, ended
        assert "Traceback" not in ended.stderr, ended
    ended = _with_torch(tmp_path, _OLD, "-m", "ringway", "env")
    assert ended.returncode == 1, ended
    assert _PROBLEM in ended.stderr, ended
    assert "Traceback" not in ended.stderr, ended
    ended = _with_torch(tmp_path, _OLD, "-c", starts, "doctor", "--json")
    assert (ended.returncode, ended.stderr) == (1, ""), ended
    document = json.loads(ended.stdout)
    (finding,) = document["findings"]
    assert list(finding) == [field.name for field in fields(Finding)]
    assert _PROBLEM in Finding(**finding).says
    assert document["worst"] == finding["level"] == "error"


def test_another_import_error_is_shown_in_full(tmp_path: Path) -> None:
    starts = "from ringway_autoload.command import main; main()"
    ended = _with_torch(tmp_path, "raise ImportError('no libcudart')\n", "-c", starts, "doctor")
    assert ended.returncode == 1, ended
    assert "Traceback" in ended.stderr, ended
    assert "no libcudart" in ended.stderr, ended
