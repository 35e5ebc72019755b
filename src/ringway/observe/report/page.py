"""Writes the page: a template with the figures in it as data.

Everything that comes from the trace is data, never markup: it is embedded as JSON that cannot end its element, and the
page's script shows it only as text. The page forbids itself any request.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from ringway.errors import UsageError
from ringway.observe.files import replace_whole
from ringway.observe.report import figures
from ringway.observe.report.events import Events, read
from ringway.observe.report.reading import reading

_PLACE = "/*FIGURES*/"


def as_data(value: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or start a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page(events: Events, title: str) -> str:
    events, folder = events.in_one_folder()
    facts = {
        "folder": folder,
        "title": title,
        "dropped": events.dropped,
        "reading": reading(events.calls),
        "timeline": figures.timeline(events.calls),
        "bandwidth": figures.bandwidth(events.calls),
        "lateness": figures.lateness(events.calls),
        "generations": figures.generations(events.calls),
        "streams": figures.streams(events.calls),
        "places": figures.places(events.calls),
        "table": figures.table(events.calls),
    }
    template = files("ringway.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace(_PLACE, as_data(facts))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection, which looks at all calls of a long trace again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def report(trace_path: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Turn a trace into a page."""
    name = os.fspath(trace_path)
    try:
        with _no_collection():
            text = page(read(name), os.path.basename(name))
    except (ValueError, OverflowError) as error:  # an invalid number, which ringway's own traces never have
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{name} is not a ringway trace: {error}") from None
    try:
        replace_whole(output, [text.encode()])
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(output)}: {error.strerror or error}") from None
