"""Where the command `ringway` starts. It is outside the package `ringway`, which cannot be imported with a torch that
is too old: the command says so in one line instead of a traceback."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.text import Text


def main() -> None:
    try:
        from ringway.cli import main as command
    except ImportError as failed:
        if not str(failed).startswith("ringway needs torch"):
            raise
        _print(str(failed))
        sys.exit(1)
    command()


def _print(problem: str) -> None:
    if sys.argv[1:2] == ["doctor"] and "--json" in sys.argv:
        says, _, advice = problem.rpartition(": ")
        finding = {"level": "error", "subject": "torch", "says": says, "advice": advice, "host": ""}
        print(json.dumps({"worst": "error", "findings": [finding]}, indent=2))
        return
    Console(stderr=True).print(Text(problem, style="red"), soft_wrap=True)
