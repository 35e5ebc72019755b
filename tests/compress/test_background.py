"""Where asynchronous compressed calls run. On a GPU: `scripts/nccl_proof.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringway.backends.device_watch import DeviceWatch
from ringway.compress.background import _EventHandle
from ringway.work import Work


def test_waiting_for_a_stream_makes_the_current_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time, on any stream; and the work has ended when the device reports it."""
    waited: list[Any] = []
    ended: list[bool] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=waited.append))
    event: Any = SimpleNamespace(query=lambda: bool(ended))
    work = Work(_EventHandle(event, torch.device("cuda:0"), DeviceWatch()), [], lambda error: error)
    work.wait()
    work.wait()
    assert waited == [event, event]
    assert not work.is_completed()
    ended.append(True)
    assert work.is_success()
