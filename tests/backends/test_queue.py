"""The queue of blocking calls: order, callbacks, deadlines and stopping."""

from __future__ import annotations

import threading
import time

import pytest

from ringway.backends.queue import CallQueue, Deadlines
from ringway.call import BARRIER, Call
from ringway.errors import CollectiveMismatch, CommTimeout, RingwayError
from ringway.work import DONE


def _call(async_op: bool = True, timeout: float | None = None) -> Call:
    return Call(BARRIER, async_op=async_op, timeout=timeout, group="test")


def test_a_synchronous_call_on_an_idle_queue_runs_on_the_callers_thread() -> None:
    queue = CallQueue("test", 30)
    where: list[threading.Thread] = []
    handle = queue.submit(_call(async_op=False), lambda: where.append(threading.current_thread()))
    assert handle is DONE
    assert where == [threading.current_thread()]
    queue.stop(RingwayError("over"))


def test_calls_run_in_the_order_of_issue() -> None:
    queue = CallQueue("test", 30)
    seen: list[int] = []
    gate = threading.Event()
    handles = [queue.submit(_call(), gate.wait)]
    handles += [queue.submit(_call(), lambda number=number: seen.append(number)) for number in range(20)]
    late = queue.submit(_call(async_op=False), lambda: seen.append(20))
    assert late is not DONE
    assert seen == []
    gate.set()
    late.wait()
    assert seen == list(range(21))
    assert all(handle.done() for handle in handles)
    queue.stop(RingwayError("over"))


def test_a_call_issued_by_a_callback_runs_before_the_queue() -> None:
    queue = CallQueue("test", 30)
    seen: list[str] = []
    gate = threading.Event()

    def again(error: BaseException | None) -> None:
        queue.submit(_call(), lambda: seen.append("from the callback")).wait()

    first = queue.submit(_call(), gate.wait)
    first.when_done(again)
    last = queue.submit(_call(), lambda: seen.append("queued"))
    gate.set()
    last.wait()
    assert seen == ["from the callback", "queued"]
    queue.stop(RingwayError("over"))


def test_a_callback_may_wait_for_a_queued_call() -> None:
    queue = CallQueue("test", 30)
    gate = threading.Event()
    first = queue.submit(_call(), gate.wait)
    second = queue.submit(_call(), lambda: None)
    first.when_done(lambda error: second.wait())
    gate.set()
    first.wait(30)
    assert second.done()
    queue.stop(RingwayError("over"))


def test_errors_reach_the_waiter_and_the_callback() -> None:
    queue = CallQueue("test", 30)

    def fail() -> None:
        raise RingwayError("no")

    reported: list[BaseException | None] = []
    handle = queue.submit(_call(), fail)
    handle.when_done(reported.append)
    with pytest.raises(RingwayError, match="no"):
        handle.wait()
    assert [str(error) for error in reported] == ["no"]
    queue.submit(_call(), lambda: None).wait()
    queue.stop(RingwayError("over"))


def test_a_wait_with_a_limit_may_end_before_the_call() -> None:
    queue = CallQueue("test", 30)
    gate = threading.Event()
    handle = queue.submit(_call(), gate.wait)
    with pytest.raises(CommTimeout, match="is not done after"):
        handle.wait(0.05)
    assert not handle.done()
    gate.set()
    handle.wait()
    queue.stop(RingwayError("over"))


def test_a_wait_that_can_no_longer_succeed_raises() -> None:
    """The library never returns, but `check` finds that the ranks called different things."""
    queue = CallQueue("test", 300, Deadlines())
    gate = threading.Event()
    found: list[BaseException] = []

    def check() -> None:
        if found:
            raise found[0]

    call = _call()
    call.check = check
    handle = queue.submit(call, gate.wait)
    threading.Timer(0.05, lambda: found.append(CollectiveMismatch("ranks called different things"))).start()
    with pytest.raises(CollectiveMismatch):
        handle.wait()
    gate.set()
    queue.stop(RingwayError("over"))


def test_a_call_that_cannot_be_interrupted_is_given_up_at_its_deadline() -> None:
    """Also without a wait: the callback gets the error."""
    queue = CallQueue("test", 30, Deadlines())
    gate = threading.Event()
    reported: list[BaseException | None] = []
    began = time.monotonic()
    handle = queue.submit(_call(timeout=0.3), gate.wait)
    handle.when_done(reported.append)
    with pytest.raises(CommTimeout, match="timed out"):
        queue.submit(_call(), lambda: None).wait()
    assert 0.3 <= time.monotonic() - began < 25
    assert isinstance(reported[0], CommTimeout)
    assert queue.failed
    with pytest.raises(CommTimeout):
        queue.submit(_call(), lambda: None)
    gate.set()


def test_stopping_ends_queued_calls() -> None:
    queue = CallQueue("test", 30)
    gate = threading.Event()
    handles = [queue.submit(_call(), gate.wait), queue.submit(_call(), lambda: None)]
    queue.stop(RingwayError("the group was destroyed"))
    for handle in handles:
        with pytest.raises(RingwayError, match="destroyed"):
            handle.wait()
    gate.set()
