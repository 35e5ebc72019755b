"""One call runs the conformance suite on a third-party backend."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

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


def _found_by_its_entry_point(context: RankContext, packages: str) -> list[object]:
    sys.path[:0] = [HERE, packages]
    dist = context.start("packaged")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=dist.new_group(backend="packaged"))
    return [dist.get_backend(), *tensor.tolist()]


def test_an_installed_backend_is_found_by_its_name(pool: RankPool, tmp_path: Path) -> None:
    about = tmp_path / "packaged-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[ringway.backends]\npackaged = third_party:Sound\n")
    pool.replace()
    assert pool.run(_found_by_its_entry_point, str(tmp_path), world_size=2) == [["packaged", 4.0, 4.0]] * 2
    pool.replace()


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
