"""One call runs the conformance suite on a third-party backend."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from ringway.testing import ConformanceFailed, RankContext, RankPool, check_backend

pytestmark = pytest.mark.processes

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def test_a_sound_backend_passes() -> None:
    cases = ["all_to_all*", "all_reduce_*", "send*", "strided*", "lists_*"]
    report = check_backend("sound", (2,), preload=["third_party"], cases=cases)
    assert len(report.seconds) > 20


def _register(context: RankContext) -> None:
    sys.path.insert(0, HERE)
    importlib.import_module("third_party")


def test_an_unsound_backend_is_reported(pool: RankPool) -> None:
    pool.replace()
    pool.run(_register, world_size=2)
    with pytest.raises(ConformanceFailed) as caught:
        check_backend("unsound", (2,), pool=pool, cases=["all_gather", "broadcast", "tags_are_kept_apart"])
    pool.replace()
    cases = {finding.case for _, finding in caught.value.report.findings}
    assert cases == {"all_gather", "tags_are_kept_apart"}
    assert "output 1 is wrong in" in str(caught.value)
    assert "no sending today" in str(caught.value)
