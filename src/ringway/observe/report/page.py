"""Writes the page: a template with the figures in it as data.

Everything that comes from the trace is data, never markup: it is put into the page as JSON that cannot end its
element, and the page's script shows it as text only. The page forbids itself any request.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from ringway.errors import UsageError
from ringway.observe.files import write_whole
from ringway.observe.report import figures

_PLACE = "/*FIGURES*/"


def read_trace(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A trace, as `ringway.trace` wrote it."""
    try:
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{os.fspath(path)} is not a trace: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise UsageError(f"{os.fspath(path)} is not a trace: it has no traceEvents")
    return trace


def as_data(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or start a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page(trace: dict[str, Any], title: str) -> str:
    calls = figures.calls_of(trace)
    if not calls:
        raise UsageError("the trace holds no calls of ringway's")
    facts = {
        "title": title,
        "dropped": trace.get("otherData", {}).get("dropped", 0),
        "timeline": figures.timeline(calls),
        "bandwidth": figures.bandwidth(calls),
        "lateness": figures.lateness(calls),
        "table": figures.table(calls),
    }
    template = files("ringway.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace(_PLACE, as_data(facts))


def report(trace_path: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Turns a trace into a page."""
    text = page(read_trace(trace_path), os.path.basename(os.fspath(trace_path)))
    if not write_whole(output, [text.encode()]):
        raise UsageError(f"the report could not be written to {os.fspath(output)}")
