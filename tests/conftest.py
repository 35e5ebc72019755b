"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from ringway.testing import RankPool

# A slow machine is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks shared by all tests: up to eight, started when a test first needs them."""
    with RankPool(8, preload=("pytest",)) as ranks:
        yield ranks
