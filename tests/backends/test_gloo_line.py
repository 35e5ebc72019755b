"""The thread that tells the ends of a group's collectives, with works of torch's that are scripted."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from ringway.backends import c10d_work
from ringway.backends.c10d_work import InLine, Line
from ringway.call import ALL_REDUCE, Call
from ringway.errors import PeerLost, RingwayError
from ringway.work import Work


class GlooWork:
    """As gloo's: a wait lasts until it ends or the slice is over."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: Exception | None = None
        self.waits = 0

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._ended.set()

    def wait(self, timeout: timedelta) -> bool:
        self.waits += 1
        if not self._ended.wait(timeout.total_seconds()):
            raise RuntimeError("Wait timeout")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._error is None:
            future.set_result([])
        else:
            future.set_exception(self._error)
        return future


def _in_line(line: Line, count: int) -> tuple[list[GlooWork], list[InLine]]:
    works = [GlooWork() for _ in range(count)]
    tensor = torch.zeros(1)
    return works, [InLine(work, Call(ALL_REDUCE, (tensor,), (tensor,)), line) for work in works]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _threads(line: Line) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"ringway-{line._group}"]


@pytest.mark.parametrize("soon", [True, False])
def test_each_end_is_told_once(soon: bool) -> None:
    line = Line("once")
    works, handles = _in_line(line, 20)
    told: list[int] = []
    for number, handle in enumerate(handles):
        handle.when_finished(lambda error, number=number: told.append(number), soon)
    for work in works:
        work.end()
    _until(lambda: len(told) == 20)
    time.sleep(0.02)
    assert told == list(range(20))
    line.close()


def test_what_ends_before_the_first_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d_work, "SLICE", timedelta(seconds=0.01))
    line = Line("overtaken")
    works, handles = _in_line(line, 3)
    told: list[int] = []
    for number, handle in enumerate(handles):
        handle.when_done(lambda error, number=number: told.append(number))
    works[1].end()
    _until(lambda: told == [1])
    works[2].end()
    works[0].end()
    _until(lambda: sorted(told) == [0, 1, 2])
    line.close()


def test_nobody_waits_beside_the_one_who_issued_it() -> None:
    """Two that wait for the same work get in each other's way; only who wants to be told makes the line wait."""
    line = Line("patient")
    (work,), (handle,) = _in_line(line, 1)
    settled: list[BaseException | None] = []

    def settle(error: BaseException | None) -> BaseException | None:
        settled.append(error)
        return error

    user = Work(handle, (), settle, soon=False)
    time.sleep(0.05)
    assert work.waits == 0
    future = user.get_future()
    _until(lambda: work.waits > 0)
    assert not future.done()
    work.end()
    future.wait()
    assert settled == [None]
    line.close()


def test_an_end_is_recorded_though_nobody_asks() -> None:
    line = Line("recorded")
    (work,), (handle,) = _in_line(line, 1)
    settled: list[BaseException | None] = []
    Work(handle, (), lambda error: settled.append(error), soon=False)
    time.sleep(3 * Line._LOOK_SECONDS * Line._IDLE_LOOKS)  # it does not fall asleep over what is under way
    work.end()
    _until(lambda: settled == [None])
    (later,), (handle,) = _in_line(line, 1)
    time.sleep(2 * Line._LOOK_SECONDS * Line._IDLE_LOOKS)
    Work(handle, (), lambda error: settled.append(error), soon=False)
    later.end()
    _until(lambda: settled == [None, None])
    line.close()


def test_who_is_told_may_wait_for_the_next_end() -> None:
    """As torch's PowerSGD does, in the callback of a future."""
    line = Line("nested")
    works, handles = _in_line(line, 3)
    told = threading.Event()
    for before, after in ((0, 1), (1, 2)):  # one that is in line already, and one that comes to it only now

        def wait_for_next(error: BaseException | None, after: int = after) -> None:
            ended = threading.Event()
            handles[after].when_done(lambda error: ended.set())
            works[after].end()
            assert ended.wait(60)
            if after == 2:
                told.set()

        handles[before].when_done(wait_for_next)
    works[0].end()
    assert told.wait(60)
    line.close()
    _until(lambda: not _threads(line))


def test_an_error_is_ours_and_a_callback_that_raises_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    line = Line("errors")
    works, handles = _in_line(line, 2)

    def broken(error: BaseException | None) -> None:
        raise ValueError("of the callback's own")

    told: list[BaseException | None] = []
    handles[0].when_done(broken)
    handles[1].when_done(told.append)
    works[0].end()
    works[1].end(RuntimeError("Connection closed by peer"))
    _until(lambda: bool(told))
    assert isinstance(told[0], PeerLost)
    assert "of the callback's own" in caplog.text
    line.close()


def test_a_line_that_closes_tells_what_has_ended_and_its_thread_goes() -> None:
    line = Line("closing")
    works, handles = _in_line(line, 2)
    told: list[int] = []
    for number, handle in enumerate(handles):
        handle.when_finished(lambda error, number=number: told.append(number), soon=False)
    assert line.unfinished() == handles
    works[1].end()
    assert line.unfinished() == handles[:1]
    line.close()
    assert told == [1]
    _until(lambda: not _threads(line))


def test_a_wait_that_is_vain_keeps_the_tensors() -> None:
    """gloo's threads are still at them, and would have to let go of them after the interpreter's end."""
    line = Line("vain")
    _, (handle,) = _in_line(line, 1)

    def parted() -> None:
        raise RingwayError("the ranks have parted")

    handle._call.check = parted
    with pytest.raises(RingwayError, match="parted"):
        handle.wait()
    kept = id(handle)
    del handle
    gc.collect()
    assert any(id(one) == kept for one in gc.get_objects())
