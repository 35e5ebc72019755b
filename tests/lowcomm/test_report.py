"""What `ringway.lowcomm.Report` counts."""

from __future__ import annotations

import time

import pytest
import torch

from ringway.lowcomm import Report


class _BusyStream:
    def synchronize(self) -> None:
        time.sleep(0.2)


def test_what_a_gpu_still_computes_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _BusyStream())
    report, began = Report(), time.perf_counter()
    with report.waiting(torch.device("cuda")):
        time.sleep(0.01)
    taken = time.perf_counter() - began
    assert taken >= 0.2
    assert 0.01 <= report.waited <= taken - 0.19
