"""Reads configuration files: TOML, JSON, JSON with comments, Hjson, and what DeepSpeed passes as base64."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ringway.errors import ConfigError


def read_file(path: str | os.PathLike[str], origin: str) -> Mapping[str, Any]:
    """The table in a JSON or TOML file. Messages name the path's `origin`."""
    name = os.fspath(path)
    try:
        text = Path(name).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        content = _read_toml(text) if name.endswith(".toml") else _read_json(text)
    except OSError as error:
        raise ConfigError(f"cannot read {name} ({origin}): {error.strerror or error}", source=name) from error
    except (ValueError, RecursionError) as error:  # decoding errors of text, JSON and TOML are ValueErrors
        raise ConfigError(f"{name} ({origin}) is not valid: {error}", source=name) from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name} ({origin}) does not contain a table", source=name)
    return content


def from_base64(text: str) -> Mapping[str, Any] | None:
    """The table that DeepSpeed's launcher passes as base64; None if the text is a path."""
    if os.path.exists(text):
        return None
    try:
        content = _read_json(base64.b64decode(text, altchars=b"-_", validate=True).decode())
    except (ValueError, RecursionError, binascii.Error):
        return None
    return content if isinstance(content, Mapping) else None


def _read_json(text: str) -> Any:
    """JSON. As in DeepSpeed, the file may be Hjson: comments and trailing commas always, the rest of its syntax if the
    package hjson is installed."""
    try:
        return json.loads(text, object_pairs_hook=_each_key_once)
    except json.JSONDecodeError as error:
        strict = error
    try:
        return json.loads(_without_comments(text), object_pairs_hook=_each_key_once)
    except json.JSONDecodeError:
        pass
    try:
        hjson = import_module("hjson")
    except ImportError:
        raise ValueError(f"{strict} (if this is Hjson, install the package hjson)") from None
    return hjson.loads(text, object_pairs_hook=_each_key_once)


_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|#[^\n]*|//[^\n]*|/\*.*?\*/|,(?=\s*[}\]])', re.DOTALL)


def _without_comments(text: str) -> str:
    """Replace comments by spaces, then remove commas in front of a closing bracket. Strings stay as they are."""

    def keep(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else "" if found[0] == "," else " "

    return _TOKENS.sub(keep, _TOKENS.sub(keep, text))


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys. JSON parsers take the last one, which may not be what was meant. TOML forbids them."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key!r} occurs twice in one table")
        table[key] = value
    return table


def _read_toml(text: str) -> Mapping[str, Any]:
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    content: Mapping[str, Any] = tomllib.loads(text)
    return content
