"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringway.testing import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks shared by all tests: up to eight, started when a test first needs them."""
    with RankPool(8, preload=("pytest",)) as ranks:
        yield ranks
