"""A process that may open too few files is told what to raise, wherever it runs out of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from exits import in_child
from few_files import leave_descriptors
from free_ports import free_port
from ringway.errors import RendezvousError
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import rendezvous
from ringway.launch.run import run


def _runs_out(work: Callable[[], object], spare: int) -> None:
    leave_descriptors(spare)
    with pytest.raises(RendezvousError, match=r"files open, may open \d+ \(ulimit -n\).*Raise the limit to \d+"):
        work()


def _meet(rank: int) -> Callable[[], object]:
    info = LaunchInfo(rank=rank, size=2, source="test", address="127.0.0.1", port=free_port())
    return lambda: rendezvous(info, 20)


@pytest.mark.timeout(100)
def test_a_rank_or_a_launcher_that_runs_out_of_descriptors_says_what_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start = partial(run, [sys.executable, "-c", ""], 2)
    for work, spare in [(_meet(0), 0), (_meet(0), 1), (_meet(1), 0), *((start, spare) for spare in range(0, 16, 2))]:
        assert in_child(partial(_runs_out, work, spare)) == 0, (work, spare)
    assert list(tmp_path.iterdir()) == []
