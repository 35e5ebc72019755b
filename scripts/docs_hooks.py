"""What the pages of docs/ need to become a site: mkdocs calls `on_page_markdown` for each."""

from __future__ import annotations

import re
from typing import Any

_INFO = re.compile(r"^(\s*`{3,}\w+) (?:output|notest)$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]\n]+)\]\(\.\./(?!proofs/)[^)\s]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drops the words with which blocks tell the tests what to do with them, and links to files that are not pages."""
    return _OUTSIDE.sub(r"\1", _INFO.sub(r"\1", markdown))
