"""What the pages of docs/ need to become a site: mkdocs calls `on_page_markdown` for each."""

from __future__ import annotations

import re
from typing import Any

_INFO = re.compile(r"^(\s*`{3,}\w+) (?:output|notest)$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[([^\]\n]+)\]\(images/(\w+)\.png\)$", re.MULTILINE)
_BY_SCHEME = r"![\1](images/\2.png#only-light)\n![\1](images/\2-dark.png#only-dark)"
_OUTSIDE = re.compile(r"\[([^\]\n]+)\]\(\.\./(?!proofs/)[^)\s]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drops the words with which blocks tell the tests what to do with them, and links to files that are not pages.
    Each picture is shown in the version that the page's colors call for."""
    return _PICTURE.sub(_BY_SCHEME, _OUTSIDE.sub(r"\1", _INFO.sub(r"\1", markdown)))
