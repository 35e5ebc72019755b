"""A fake device and a fake torch group that a test controls, for hosts without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from ringway.backends.base import GroupInfo
from ringway.backends.torch.adopt import adopt

STREAM, ASIDE = 7, 77
"""The current stream, and the one that a program makes with `torch.cuda.Stream`."""


class ScriptedWork:
    """A work like ProcessGroupNCCL's: `wait` returns or raises, `is_completed` queries the device."""

    def __init__(self, error: Exception | None = None) -> None:
        self.finished = threading.Event()
        self.error = error
        self.waits: list[Any] = []

    def wait(self, *timeout: timedelta) -> bool:
        self.waits.append(timeout)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.finished.is_set()

    def exception(self) -> Exception | None:
        return self.error


class ScriptedGroup:
    def __init__(self, work: ScriptedWork) -> None:
        self.work = work
        self.aborted = 0
        self.shut_down = 0

    def allreduce(self, tensors: Any, options: Any) -> ScriptedWork:
        return self.work

    def abort(self) -> None:
        self.aborted += 1

    def shutdown(self) -> None:
        self.shut_down += 1


def scripted_backend(work: ScriptedWork) -> tuple[Any, ScriptedGroup]:
    group = ScriptedGroup(work)
    return adopt(scripted_info(), group, "nccl"), group


def scripted_info(size: int = 1) -> GroupInfo:
    return GroupInfo(rank=0, size=size, ranks=list(range(size)), store=c10d.HashStore(), name="scripted", timeout=5)


class ScriptedTensor:
    """The attributes of a CUDA tensor that ringway reads."""

    is_cuda = True
    dtype = torch.float32

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def numel(self) -> int:
        return 4


class StandInDriver:
    """The CUDA driver's stand-in (cuda_stand_in.cpp), on whose streams events pass when a test says so."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.stand_in_reach.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        self._library.stand_in_reset()

    def reach(self, events: int = 1 << 60, stream: int = STREAM) -> None:
        self._library.stand_in_reach(stream, events)

    def capture(self, on: bool) -> None:
        self._library.stand_in_capture(int(on))

    def fail(self, status: int) -> None:
        self._library.stand_in_fail(status)

    def call_from_cpp(self, function: Any, *arguments: Any) -> Any:
        """What `function` returns on a thread of C++, on which no Python function runs."""
        call = self._library.stand_in_call
        call.restype, call.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.py_object]
        result = ctypes.cast(call(function, arguments), ctypes.py_object)
        ctypes.pythonapi.Py_DecRef(result)
        return result.value

    @property
    def events(self) -> int:
        """How many events were made."""
        return int(self._library.stand_in_events())


def build_stand_in(folder: Path, name: str = "cuda_stand_in") -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "a C++ compiler built the core; now it is gone"
    library = folder / f"lib{name}.so"
    source = Path(__file__).with_name(f"{name}.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True, timeout=120)
    return library


class ScriptedCuda:
    """torch.cuda with streams that advance only when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached: set[torch.device] = set()
        self.capturing = False
        self.waited = 0
        cuda = self

        class Event:
            def record(self, stream: Any) -> None:
                self.device = stream.device

            def query(self) -> bool:
                return self.device in cuda.reached

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", self._stream)
        self.current = (STREAM, 0, 1)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.current[0], raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: self.current, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_setStream", self._set_stream, raising=False)
        aside = SimpleNamespace(stream_id=ASIDE, device_index=0, device_type=1, cuda_stream=ASIDE)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: aside)

    def _set_stream(self, *stream: int) -> None:
        self.current = (stream[0], stream[1], stream[2])

    def _stream(self, device: torch.device) -> Any:
        return SimpleNamespace(device=device, cuda_stream=0, wait_event=self._wait)

    def _wait(self, event: Any) -> None:
        self.waited += 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
