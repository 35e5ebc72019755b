"""Every backend passes the same suite. A new backend adds its name to `BACKENDS`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from ringway.testing import RankPool, Report, check_backend
from ringway.testing import conformance as suite

SOAK = pytest.mark.skipif(not os.environ.get("RINGWAY_SOAK"), reason="make soak")
BACKENDS = {
    "gloo": ((1, 2, 3), 3),
    "shm": ((1, 2, 3, 5), 3),
}
"""The world sizes that a backend is started with, and the world whose ranks without rank 0 are a sub-group."""
SOAKED = {
    "gloo": ((4,), 4),
    "shm": ((4, 7, 8), 8),
}
"""The same for `make soak`: ranks of which many share a core take long."""


def _settings() -> Iterator[Any]:
    for backends, marks in ((BACKENDS, ()), (SOAKED, (SOAK,))):
        for name, (sizes, largest) in backends.items():
            worlds = [suite.Setting(name, size) for size in sizes]
            for setting in (*worlds, suite.Setting(name, largest, members=tuple(range(1, largest)))):
                quick = (pytest.mark.quick,) if setting.world_size == 2 else ()
                yield pytest.param(setting, id=str(setting), marks=[*marks, *quick])


@pytest.mark.parametrize("setting", list(_settings()))
def test_backend(pool: RankPool, setting: suite.Setting) -> None:
    report = Report()
    suite.run_setting(pool, setting, ("*",), report)
    assert len(report.seconds) >= 60
    assert not report.findings, str(report)


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_called_through_torch(pool: RankPool, name: str) -> None:
    """torch.distributed's functions on ringway's group pass the suite too."""
    check_backend(name, (2,), pool=pool, called_through="torch.distributed")
