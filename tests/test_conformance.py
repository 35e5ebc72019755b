"""Every backend passes the same suite. A new backend adds its name to `BACKENDS`."""

from __future__ import annotations

import pytest

from ringway.testing import RankPool, Report, check_backend
from ringway.testing import conformance as suite

BACKENDS = {
    "gloo": (1, 2, 3, 4),
    "shm": (1, 2, 3, 8),
}
"""The world sizes that a backend is started with; the largest also gets a sub-group."""

SETTINGS = [
    pytest.param(setting, id=str(setting), marks=[pytest.mark.quick] if setting.world_size == 2 else [])
    for name, sizes in BACKENDS.items()
    for setting in suite.settings(name, sizes)
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_backend(pool: RankPool, setting: suite.Setting) -> None:
    report = Report()
    suite.run_setting(pool, setting, ("*",), report)
    assert len(report.seconds) >= 60
    assert not report.findings, str(report)


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_called_through_torch(pool: RankPool, name: str) -> None:
    """torch.distributed's functions on ringway's group pass the suite too."""
    check_backend(name, (2,), pool=pool, called_through="torch.distributed")
