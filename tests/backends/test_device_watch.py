"""The thread that polls the device, with a fake device."""

from __future__ import annotations

import threading
import time

import pytest

from ringway.backends import device_watch
from ringway.backends.device_watch import DeviceWatch
from ringway.work import Completion


class One:
    """A work that ends when its line has advanced past it. Every query raises once `failure` is set."""

    def __init__(self, device: Device, line: int, number: int) -> None:
        self._device, self._line, self._number = device, line, number

    def done(self) -> bool:
        self._device.asked += 1
        if self._device.failure is not None:
            raise self._device.failure
        return self._number < self._device.ended[self._line]

    def outcome(self) -> BaseException | None:
        return None


class Device:
    """Lines of works that end in order, when the test says so. Counts the queries."""

    def __init__(self, lines: int, length: int) -> None:
        self.watch = DeviceWatch()
        self.ended = [0] * lines
        self.asked = 0
        self.failure: Exception | None = None
        self.reported: list[tuple[int, int, BaseException | None]] = []
        self._length = length
        self._changed = threading.Condition()

    def add_all(self, soon: bool) -> None:
        for number in range(self._length):
            for line in range(len(self.ended)):
                self.add(line, number, soon)

    def add(self, line: int, number: int, soon: bool) -> None:
        def completed(error: BaseException | None) -> None:
            with self._changed:
                self.reported.append((line, number, error))
                self._changed.notify_all()

        self.watch.add(line, One(self, line, number), completed, soon)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.reported) >= count, 60)


def test_each_end_is_reported_once_and_in_the_order_of_its_line() -> None:
    for soon in (True, False):
        device = Device(lines=3, length=40)
        device.add_all(soon)
        for reached in (1, 7, 8, 30, 40):
            for line in range(3):
                device.ended[line] = max(0, reached - line)
            device.wait_for(sum(device.ended))
        device.ended = [40] * 3
        device.wait_for(120)
        time.sleep(0.05)
        for line in range(3):
            assert [number for of, number, _ in device.reported if of == line] == list(range(40))


def test_a_poll_queries_only_a_few_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query takes the interpreter's lock from a busy program."""
    monkeypatch.setattr(device_watch, "LOOK_LATER", 0.5)
    device = Device(lines=1, length=1000)
    device.ended[0] = 1000
    device.add_all(soon=False)
    device.wait_for(1000)
    assert device.asked <= 12 * 20, "a thousand works end, and a few polls make about ten queries each"


def test_an_urgent_caller_does_not_wait_for_the_slow_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "LOOK_LATER", 3600.0)
    device = Device(lines=2, length=1)
    device.add(0, 0, soon=False)
    while not device.watch._patient:
        time.sleep(0.001)
    assert device.asked == 0
    device.ended = [1, 1]
    device.add(1, 0, soon=True)
    device.wait_for(2)


def test_a_callback_that_raises_does_not_affect_others() -> None:
    device = Device(lines=1, length=2)

    def broken(error: BaseException | None) -> None:
        raise ValueError("raised by the callback")

    device.ended[0] = 2
    device.watch.add(0, One(device, 0, 0), broken, True)
    device.add_all(soon=True)
    device.wait_for(2)


def test_a_failing_device_ends_pending_works_but_not_the_watch() -> None:
    device = Device(lines=2, length=3)
    device.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    device.add_all(soon=False)
    device.wait_for(6)
    assert all(error is device.failure for _, _, error in device.reported)
    device.failure = None
    device.ended[0] = 1
    device.add(0, 0, soon=True)
    device.wait_for(7)
    assert device.reported[-1] == (0, 0, None)


def test_calls_before_an_overdue_one_have_not_completed() -> None:
    """The later one has the shorter deadline. The device has passed the first of the four only."""

    class Ending:
        def __init__(self, done: bool, error: BaseException | None) -> None:
            self._done, self._error = done, error

        def done(self) -> bool:
            return self._done

        def outcome(self) -> BaseException | None:
            return self._error

    watch, overdue = DeviceWatch(), TimeoutError("overdue")
    reported: dict[int, BaseException | None] = {}
    all_there = threading.Event()
    endings = [Ending(True, None), Ending(False, None), Ending(True, overdue), Ending(False, None)]

    def noted(number: int) -> Completion:
        def note(error: BaseException | None) -> None:
            reported[number] = error
            if len(reported) == 3:
                all_there.set()

        return note

    line = [device_watch.Pending(ending, noted(number), 0.0, soon=True) for number, ending in enumerate(endings)]
    watch._lines["line"] = line
    watch._report("line", line, *device_watch._ended(line))
    assert all_there.wait(30)
    assert reported == {0: None, 1: overdue, 2: overdue}


def test_a_slow_explanation_holds_up_nobody_else() -> None:
    device, explained = Device(2, 1), threading.Event()

    class Failed(One):
        def outcome(self) -> BaseException | None:
            return RuntimeError("failed")

    device.watch.add(0, Failed(device, 0, 0), lambda _: explained.wait(60) and None, soon=True)
    device.add(1, 0, soon=True)
    device.ended = [1, 1]
    device.wait_for(1)
    explained.set()
