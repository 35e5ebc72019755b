"""The order of calls in a group with several backends: which call waits for which, and what a callback may do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from ringway.backends.several.call_order import CallOrder
from ringway.call import BARRIER, Call
from ringway.errors import CommTimeout, RingwayError
from ringway.work import DONE, Completion, Handle


class Scripted(Handle):
    """A call that ends when the test says so, on the test's thread or another."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._completions: list[Completion] = []

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._finished.set()
        for completion in self._completions:
            completion(error)

    def wait(self, timeout: float | None = None) -> None:
        if not self._finished.wait(timeout):
            raise CommTimeout("not done")
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._finished.is_set()

    def when_done(self, completion: Completion) -> None:
        if self._finished.is_set():
            completion(self._error)
        else:
            self._completions.append(completion)


class Library:
    """A backend that logs the calls that reach it. Asynchronous ones are in flight until the test finishes them."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.handles: dict[str, Scripted] = {}

    def runner(self, call: str) -> Callable[[Call], Handle]:
        def run(given: Call) -> Handle:
            self.log.append(f"{call} on {self.name}")
            if not given.async_op:
                return DONE
            self.handles[call] = Scripted()
            return self.handles[call]

        return run


@pytest.fixture
def order() -> CallOrder:
    return CallOrder("test", 30.0)


def _call(async_op: bool = True, timeout: float | None = None) -> Call:
    return Call(BARRIER, async_op=async_op, timeout=timeout, group="test")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_calls_of_one_backend_go_straight_to_it(order: CallOrder) -> None:
    log: list[str] = []
    one = Library("one", log)
    order.start("one", one.runner("a"), _call())
    order.start("one", one.runner("b"), _call())
    assert order.start("one", one.runner("c"), _call(async_op=False)) is DONE
    assert log == ["a on one", "b on one", "c on one"]


def test_a_call_waits_for_calls_in_flight_on_another_backend(order: CallOrder) -> None:
    log: list[str] = []
    one, two = Library("one", log), Library("two", log)
    first = order.start("one", one.runner("a"), _call())
    second = order.start("two", two.runner("b"), _call())
    third = order.start("one", one.runner("c"), _call())  # its own backend is free, but b comes before it
    time.sleep(0.05)
    assert log == ["a on one"]
    assert not second.done()
    one.handles["a"].finish()
    first.wait()
    second.wait(30)
    third.wait(30)
    assert log == ["a on one", "b on two", "c on one"]
    _until(lambda: order.start("two", two.runner("d"), _call(async_op=False)) is DONE)
    assert log[-1] == "d on two"


def test_a_synchronous_call_waits_on_the_thread_of_its_caller(order: CallOrder) -> None:
    log: list[str] = []
    one, two = Library("one", log), Library("two", log)
    order.start("one", one.runner("a"), _call())
    threading.Timer(0.05, lambda: one.handles["a"].finish()).start()
    assert order.start("two", two.runner("b"), _call(async_op=False)) is DONE
    assert one.handles["a"].done()


def test_a_call_issued_by_a_callback_runs_before_later_calls(order: CallOrder) -> None:
    log: list[str] = []
    one, two = Library("one", log), Library("two", log)
    first = order.start("one", one.runner("a"), _call())
    behind = order.start("two", two.runner("behind"), _call())

    def callback(error: BaseException | None) -> None:
        assert order.start("two", two.runner("from the callback"), _call(async_op=False)) is DONE

    first.when_done(callback)
    one.handles["a"].finish()
    behind.wait(30)
    assert log == ["a on one", "from the callback on two", "behind on two"]


def test_a_callback_may_wait_for_a_call_that_waits_for_it(order: CallOrder) -> None:
    log: list[str] = []
    one, two = Library("one", log), Library("two", log)
    first = order.start("one", one.runner("a"), _call())
    behind = order.start("two", two.runner("b"), _call())
    first.when_done(lambda error: behind.wait(30))
    one.handles["a"].finish()
    assert log == ["a on one", "b on two"]


def test_a_failed_call_also_ends_the_calls_behind_it(order: CallOrder) -> None:
    log: list[str] = []
    one, two = Library("one", log), Library("two", log)
    order.start("one", one.runner("a"), _call())
    second = order.start("two", two.runner("b"), _call())
    one.handles["a"].finish(RingwayError("a peer is gone"))
    with pytest.raises(RingwayError, match="a peer is gone"):
        second.wait(30)
    assert log == ["a on one"]


def test_waiting_for_other_calls_ends_at_the_deadline(order: CallOrder) -> None:
    log: list[str] = []
    one, two = Library("one", log), Library("two", log)
    order.start("one", one.runner("a"), _call())
    with pytest.raises(CommTimeout):
        order.start("two", two.runner("b"), _call(async_op=False, timeout=0.1))
    one.handles["a"].finish()


def test_fast_paths_are_held_while_a_call_is_in_flight_on_another_backend(order: CallOrder) -> None:
    held = {"one": 0, "two": 0}

    def hold(name: str) -> Callable[[int], None]:
        def change(by: int) -> None:
            held[name] += by

        return change

    one = Library("one", [])
    order.holding("one", hold("one"))
    order.start("one", one.runner("a"), _call())
    order.holding("two", hold("two"))  # added while a call is in flight
    assert held == {"one": 0, "two": 1}
    one.handles["a"].finish()
    assert held == {"one": 0, "two": 0}


def test_stopping_ends_waiting_calls(order: CallOrder) -> None:
    log: list[str] = []
    one, two = Library("one", log), Library("two", log)
    order.start("one", one.runner("a"), _call())
    second = order.start("two", two.runner("b"), _call())
    order.stop(RingwayError("the group was destroyed"))
    with pytest.raises(RingwayError, match="destroyed"):
        second.wait(30)
    one.handles["a"].finish()
    assert log == ["a on one"]
