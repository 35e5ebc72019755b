"""What the tests of the doctor share."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

from ringway.doctor import Finding


def called(findings: Iterable[Finding], subject: str) -> Finding:
    """The only finding about this subject."""
    found = [finding for finding in findings if finding.subject == subject]
    assert len(found) == 1, (subject, found)
    return found[0]


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
