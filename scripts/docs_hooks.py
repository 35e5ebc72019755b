"""What the pages of docs/ need to become a site: mkdocs calls `on_page_markdown` for each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_README = Path(__file__).parent.parent / "README.md"
_MEASURED = "(../README.md#measured)"

_INFO = re.compile(r"^(\s*`{3,}\w+) (?:output|notest)$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[([^\]\n]+)\]\(images/(\w+)\.png\)$", re.MULTILINE)
_BY_SCHEME = r"![\1](images/\2.png#only-light)\n![\1](images/\2-dark.png#only-dark)"
_OUTSIDE = re.compile(r"\[([^\]\n]+)\]\(\.\./(?!proofs/)[^)\s]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drops the words with which blocks tell the tests what to do with them, and links to files that are not pages.
    Each picture is shown in the version that the page's colors call for. The README is not a page, so a page that links
    to its measurements ends with them."""
    if _MEASURED in markdown:
        markdown = f"{markdown.replace(_MEASURED, '(#measured)')}\n{_measured()}"
    return _PICTURE.sub(_BY_SCHEME, _OUTSIDE.sub(r"\1", _INFO.sub(r"\1", markdown)))


def _measured() -> str:
    """The README's section, with links as seen from docs/."""
    text = _README.read_text()
    begin = text.index("## Measured\n")
    return text[begin : text.index("\n## ", begin)].replace("](docs/", "](")
